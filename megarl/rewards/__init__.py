"""Rewards: scoring functions given by import path, run in killable processes."""
