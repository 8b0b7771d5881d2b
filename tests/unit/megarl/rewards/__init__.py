"""Unit tests of megarl.rewards."""
