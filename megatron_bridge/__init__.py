"""Where every weight lives in Megatron, in vLLM and on disk; no RL, nothing from megarl.

NVIDIA's PyPI package ``megatron-bridge`` imports as ``megatron.bridge``: the two do not collide."""
