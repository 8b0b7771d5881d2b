"""Unit tests of megarl.data."""
