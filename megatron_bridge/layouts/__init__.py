"""Layouts: (model spec, parallel layout, rank) -> local parameters and shards."""
