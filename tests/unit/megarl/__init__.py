"""Unit tests of megarl."""
