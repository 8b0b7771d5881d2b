"""DDMA: weights from the trainer's shards into the generators' shards, as a plan says."""
