"""Executors: one role (trainer, generator, reward) on one set of ranks."""
