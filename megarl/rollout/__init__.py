"""Rollouts: how prompts become trajectories, and the engine that samples them."""
