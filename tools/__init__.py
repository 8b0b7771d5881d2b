"""Command-line utilities."""
