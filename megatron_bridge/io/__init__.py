"""Weights from and to files."""
