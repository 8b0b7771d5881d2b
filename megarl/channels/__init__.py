"""Channels: directed, named edges over which executors exchange messages."""
