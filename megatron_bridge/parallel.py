"""Parallel layouts of the two worlds, and where each rank stands in them; no torch.

Megatron numbers its ranks with tensor parallelism fastest, then context, data and pipeline
(``initialize_model_parallel``'s default order "tp-cp-ep-dp-pp"). For experts it divides the ranks
of a stage anew: expert tensor parallelism fastest, then expert and expert data parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCoordinate:
    """Where one trainer rank stands."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCoordinate:
    """Where one trainer rank stands among those that hold the experts of its pipeline stage."""

    etp: int
    ep: int


@dataclass(frozen=True, kw_only=True)
class TrainerLayout:
    """How the trainer's ranks divide the model and the batch."""

    tp: int = 1  # tensor parallel ranks
    pp: int = 1  # pipeline stages
    dp: int = 1  # data parallel ranks
    cp: int = 1  # context parallel ranks; above 1 needs Transformer Engine
    ep: int = 1  # expert parallel ranks, inside dp
    etp: int = 1  # tensor parallel ranks of an expert
    vpp: int = 1  # model chunks a pipeline rank holds (interleaved schedule)
    sequence_parallel: bool = False  # split norms and residuals over the tp ranks
    num_layers_in_first_stage: int | None = None  # of an uneven pipeline
    num_layers_in_last_stage: int | None = None  # of an uneven pipeline
    account_for_embedding: bool = False  # the embedding counts as a layer of the first stage
    account_for_loss: bool = False  # the head counts as a layer of the last stage
    pipeline_layout: str = ""  # Megatron's pipeline_model_parallel_layout, such as "Ett|tt|ttL"
    vocab_divisor: int = 128  # the vocabulary is padded to a multiple of this times tp

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def ranks_per_replica(self) -> int:
        return self.tp * self.cp * self.pp

    @property
    def micro_batch_multiple(self) -> int:
        """What the number of micro-batches must be a multiple of (interleaved schedule)."""
        return self.pp if self.vpp > 1 else 1

    def coordinate(self, rank: int) -> TrainerCoordinate:
        """Return the place of executor-world rank ``rank``."""
        tp, rest = rank % self.tp, rank // self.tp
        cp, rest = rest % self.cp, rest // self.cp
        return TrainerCoordinate(tp=tp, cp=cp, dp=rest % self.dp, pp=rest // self.dp)

    def expert_coordinate(self, rank: int) -> ExpertCoordinate:
        """Return the place of executor-world rank ``rank`` in the grid of experts."""
        rest = rank // self.etp
        return ExpertCoordinate(etp=rank % self.etp, ep=rest % self.ep)

    def rank_of(self, at: TrainerCoordinate) -> int:
        """Return the executor-world rank that stands at ``at``."""
        return at.tp + self.tp * (at.cp + self.cp * (at.dp + self.dp * at.pp))

    def data_parallel_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return, for each data-parallel index, all ranks that train on the same part of a batch.

        The first rank of each is its head.
        """
        groups: list[list[int]] = [[] for _ in range(self.dp)]
        for rank in range(self.world_size):
            groups[self.coordinate(rank).dp].append(rank)
        return tuple(tuple(group) for group in groups)


class Quantization(StrEnum):
    """How a generator holds the matrices of its linear layers and experts."""

    NONE = "none"
    FP8_BLOCK = "fp8_block"  # float8_e4m3fn, a scale for each 128 x 128 block
    FP8_TENSOR = "fp8_tensor"  # float8_e4m3fn, a scale for each parameter


@dataclass(frozen=True, kw_only=True)
class GeneratorLayout:
    """How the generator's ranks divide: ``replicas`` engines of ``tp`` x ``pp`` ranks each."""

    tp: int = 1  # tensor parallel ranks of one engine
    pp: int = 1  # pipeline stages of one engine
    ep: bool = False  # a rank holds whole experts instead of a part of each
    replicas: int = 1  # engines
    quantization: Quantization = Quantization.NONE  # of the weights of linear layers

    @property
    def ranks_per_replica(self) -> int:
        return self.tp * self.pp

    @property
    def world_size(self) -> int:
        return self.ranks_per_replica * self.replicas
