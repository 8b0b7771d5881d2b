"""megarl: asynchronous reinforcement learning of language models on Megatron-Core and vLLM."""
