"""How the messages of a plan move between ranks."""
