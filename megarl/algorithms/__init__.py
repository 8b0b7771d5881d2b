"""Algorithms: losses, advantages and KL estimators as pure functions of tensors."""
