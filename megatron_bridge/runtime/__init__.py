"""The only importers of megatron.core: initialisation, model, training, log-probabilities."""
