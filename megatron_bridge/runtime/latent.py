"""What latent attention and limited choice of experts need beyond Megatron-Core's own modules.

Called by `architecture` only.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor


class _ReplicatedLinear(torch.nn.Linear):
    """A linear layer that every tensor-parallel rank holds whole, as Megatron's specs call it."""

    def __init__(self, num_inputs: int, num_outputs: int, config: TransformerConfig) -> None:
        super().__init__(num_inputs, num_outputs, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore

    def forward(self, input: Tensor) -> tuple[Tensor, None]:
        return super().forward(input), None  # pyright: ignore


class LatentSelfAttention(MLASelfAttention):
    """Latent attention of the local spec, whose projections down are replicated as Transformer
    Engine's are.

    Megatron's local spec divides them over tp, and then loses the other ranks' part of the rotary
    key's gradient: what it gathers forward it only cuts backward.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        # Where Transformer Engine is missing the module takes it for there: its wrapper can be
        # imported, and then "is this a TELinear?" fails, for TELinear is None.
        multi_latent_attention.HAVE_TE = False
        super().__init__(config, *args, **kwargs)
        hidden, rotary = config.hidden_size, config.qk_pos_emb_head_dim
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = _ReplicatedLinear(hidden, config.q_lora_rank, config)
        latent = config.kv_lora_rank + rotary
        self.linear_kv_down_proj = _ReplicatedLinear(hidden, latent, config)


class _GroupLimitedChoice:
    """Chooses experts where Megatron's router lets a recorded choice be replayed."""

    def __init__(self, num_groups: int, groups_per_token: int, score_experts: int) -> None:
        self._num_groups, self._groups_per_token = num_groups, groups_per_token
        self._score_experts = score_experts

    def get_replay_topk(self, scores: Tensor, topk: int, *unused: Any) -> tuple[Tensor, Tensor]:
        """Return scores and indices [T, topk] of the best experts in the best groups of each token.

        Args:
            scores: [T, E], with the router's bias.
        """
        grouped = scores.view(len(scores), self._num_groups, -1)
        of_groups = grouped.topk(self._score_experts, dim=-1).values.sum(-1)
        best = of_groups.topk(self._groups_per_token, dim=-1).indices
        allowed = torch.zeros_like(of_groups, dtype=torch.bool).scatter(1, best, True)
        return grouped.masked_fill(~allowed[:, :, None], -torch.inf).flatten(1).topk(topk, dim=1)


class GroupLimitedRouter(TopKRouter):
    """Megatron's router with DeepSeek's choice among groups of experts.

    Megatron scores a group by its best ``topk // groups`` experts; DeepSeek-V2 by its best one,
    DeepSeek-V3 by its best two, whatever those numbers are.
    """

    def __init__(
        self, num_groups: int, groups_per_token: int, score_experts: int, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.router_replay: Any = _GroupLimitedChoice(num_groups, groups_per_token, score_experts)
