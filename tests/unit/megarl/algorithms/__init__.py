"""Unit tests of megarl.algorithms."""
