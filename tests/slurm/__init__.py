"""Tests against a real Slurm controller."""
