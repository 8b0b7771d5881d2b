"""What DDMA is measured against: Megatron-Core's resharding, and gather + broadcast + load.

Called by `tools.weight_rank` on every rank of a benchmark, trainers and generators alike, inside a
default group of all of them. Each peer is given its best: groups, buckets and plans exist before
the clock runs, names and shapes are known without messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core.resharding import build_centralized_reshard_plan
from megatron.core.resharding.copy_services.base import CopyService
from megatron.core.resharding.refit import reshard_model_weights
from torch import Tensor

from megatron_bridge.layouts.megatron import megatron_side, padded_vocab_size
from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.spec import LocalParam, RankManifest, Shard
from tools.known_weights import DTYPE, empty_params
from tools.weight_cases import Case, Unavailable
from tools.weight_schemes import Scheme, Tensors

_BUCKET_BYTES = 64 << 20
_CHUNK_BYTES = 2 << 20  # a receiver passes a chunk on while the next one arrives


def _group_of(rank: int, groups: Iterable[tuple[int, ...]]) -> dist.ProcessGroup:
    """Return this rank's group of several that all ranks make together; the world for outsiders."""
    mine: dist.ProcessGroup = dist.distributed_c10d._get_default_group()
    for ranks in groups:
        group = dist.new_group(list(ranks), backend="gloo")
        if rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            mine = group
    return mine


# --- Megatron-Core ------------------------------------------------------------------------------


class _CpuCopyService(CopyService):
    """Megatron's service over gloo less its CUDA stream and its second copy of what arrives."""

    def __init__(self) -> None:
        self._operations: list[dist.P2POp] = []

    def submit_send(self, src_tensor: Tensor, dest_rank: int) -> None:
        self._operations.append(dist.P2POp(dist.isend, src_tensor, dest_rank))

    def submit_recv(self, dest_tensor: Tensor, src_rank: int) -> None:
        self._operations.append(dist.P2POp(dist.irecv, dest_tensor, src_rank))

    def run(self) -> None:
        operations, self._operations = self._operations, []
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()


def _megatron_target(case: Case) -> TrainerLayout:
    """Return the generators' parallelism as a layout of Megatron's."""
    tp, experts = case.generator.tp, case.spec.num_experts > 0
    return TrainerLayout(
        tp=tp,
        dp=case.generator.replicas,
        etp=tp if experts else 1,
        sequence_parallel=experts and tp > 1,
        vocab_divisor=case.trainer.vocab_divisor,
    )


def why_megatron_cannot(case: Case) -> str:
    """Return why Megatron-Core 0.16.1 cannot plan a case; an empty string where it can."""
    source, target = case.trainer, _megatron_target(case)
    rows = [padded_vocab_size(case.spec, layout) for layout in (source, target)]
    if rows[0] != rows[1]:
        return f"the padded vocabularies differ ({rows[0]} and {rows[1]} rows)"
    if source.vpp > 1:
        return "it plans the first chunk of an interleaved pipeline only"
    sizes = (case.spec.moe_ffn_size,) if case.spec.num_experts else (case.spec.ffn_size,)
    tiles = lcm(2 * source.tp, 2 * target.tp)
    if any(2 * size % tiles for size in sizes):
        return f"ffn sizes {sizes} are no multiples of its {tiles} tiles"
    return ""


def _mark(name: str, param: torch.nn.Parameter, expert_parallel: bool) -> None:
    """Set what Megatron's own layers set for its planner.

    Experts are marked too: 0.16.1 leaves that out in Transformer Engine's grouped layers and then
    copies the wrong experts; later versions mark them.
    """
    rows = ("word_embeddings", "output_layer", "linear_qkv.weight", "linear_qkv.bias", "linear_fc1")
    if "norm" in name or "router" in name:
        dim = None
    else:
        dim = 0 if any(part in name for part in rows) else 1
    marks = {"allreduce": not (expert_parallel and ".experts." in name)}
    if dim is not None:
        stride = 2 if "linear_fc1" in name else 1
        marks |= {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": stride}
    for mark, value in marks.items():
        setattr(param, mark, value)


def _module(params: Mapping[str, Tensor], case: Case, expert_parallel: bool) -> torch.nn.Module:
    """Return a tree of modules with these parameters, as Megatron's planner reads a model."""
    root = torch.nn.Module()
    for name, tensor in params.items():
        *path, leaf = name.split(".")
        at = root
        for step in path:
            if not hasattr(at, step):
                at.add_module(step, torch.nn.Module())
            at = at.get_submodule(step)
        param = torch.nn.Parameter(tensor, requires_grad=False)
        _mark(name, param, expert_parallel)
        at.register_parameter(leaf, param)
    # A module's own attributes, not parameters of it: set past its typed ``__setattr__``.
    vars(root)["config"] = SimpleNamespace(num_moe_experts=case.spec.num_experts or None)
    return root


def _axes(layout: TrainerLayout, first: int) -> dict[str, list[tuple[int, ...]]]:
    """Return the groups of ranks along each axis of a layout whose ranks start at ``first``."""
    keys: dict[str, Callable[[int], tuple[int, ...]]] = {}
    size = layout.tp * layout.cp * layout.dp

    def place(rank: int) -> tuple[int, int, int]:
        at = layout.coordinate(rank)
        return at.tp, at.dp, at.pp

    keys["tp"] = lambda rank: place(rank)[1:]
    keys["dp"] = lambda rank: place(rank)[::2]
    keys["pp"] = lambda rank: place(rank)[:2]
    keys["expt_tp"] = lambda rank: (rank // layout.etp,)
    keys["ep"] = lambda rank: (
        rank // size,
        rank % layout.etp,
        rank % size // (layout.etp * layout.ep),
    )
    axes: dict[str, list[tuple[int, ...]]] = {}
    for axis, key in keys.items():
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(layout.world_size):
            groups.setdefault(key(rank), []).append(first + rank)
        axes[axis] = [tuple(ranks) for ranks in groups.values()]
    return axes


class MegatronReshard(Scheme):
    """`megatron.core.resharding` 0.16.1 from Megatron's layout to Megatron's layout.

    `setup` plans (``plan_seconds``: a collective of all ranks, on rank 0's core); `run` executes.
    """

    def __init__(self, case: Case, rank: int, source: Tensors):
        """Raises: Unavailable: Megatron-Core cannot plan the case."""
        reason = why_megatron_cannot(case)
        if reason:
            raise Unavailable(f"Megatron-Core: {reason}")
        self.params = {}
        self._case, self._rank = case, rank
        first, layout = case.trainer.world_size, _megatron_target(case)
        if rank >= first:
            local = megatron_side(case.spec, layout, te=True).manifest(rank - first)
            self.target = RankManifest(rank=rank, params=local.params)
            self.params = empty_params(self.target)
        self._layouts = ((case.trainer, 0), (layout, first))
        self._modules = [
            _module(params, case, side.ep > 1)
            for params, (side, _) in zip((source, self.params), self._layouts, strict=True)
        ]
        self._service = _CpuCopyService()

    def setup(self) -> None:
        for module, (layout, first) in zip(self._modules, self._layouts, strict=True):
            groups = {
                axis: _group_of(self._rank, members)
                for axis, members in _axes(layout, first).items()
            }
            vars(module)["pg_collection"] = SimpleNamespace(**groups)
        source, target = self._modules
        began = time.perf_counter()
        num_experts = self._case.spec.num_experts
        plan = build_centralized_reshard_plan(source, target, num_experts)
        self.plan_seconds = time.perf_counter() - began
        vars(target)["_cached_reshard_plan"] = plan  # where Megatron looks for one
        params = dict(source.named_parameters())
        self.sent_bytes = sum(params[op.param_name][op.my_slice].nbytes for op in plan.send_ops)

    def sync(self) -> None:
        source, target = self._modules
        reshard_model_weights(source, target, self._service)  # pyright: ignore[reportArgumentType]


# --- Gather and broadcast -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """A parameter of one stage, on all ranks that gather it together, and what it becomes."""

    param: LocalParam
    ranks: tuple[int, ...]
    shards: tuple[tuple[int, Shard], ...]  # with the index of their holder in ``ranks``
    tensors: tuple[str, ...]  # canonical, each of them whole after the gathering


def _units(case: Case, pp: int, shapes: Mapping[str, tuple[int, ...]]) -> list[_Unit]:
    """Return what the first data-parallel replica of a stage gathers, in order."""
    layout = case.trainer
    size = layout.tp * layout.cp * layout.dp
    first = pp * size
    experts = tuple(range(first, first + layout.etp * layout.ep))
    holders = {m.rank: {p.name: p for p in m.params} for m in case.sources}
    units: list[_Unit] = []
    for param in case.sources[first].params:
        ranks = experts if ".experts." in param.name else tuple(range(first, first + layout.tp))
        shards = [
            (index, shard)
            for index, rank in enumerate(ranks)
            for shard in holders[rank][param.name].shards
        ]
        held = [[(s.tensor, s.box) for s in holders[rank][param.name].shards] for rank in ranks]
        if all(each == held[0] for each in held):
            ranks = ranks[:1]  # alike on all: nothing to gather
            shards = [(index, shard) for index, shard in shards if index == 0]
        names = tuple(dict.fromkeys(shard.tensor for _, shard in shards))
        covered = sum({(s.tensor, s.box): s.box.numel for _, s in shards}.values())
        assert covered == sum(prod(shapes[name]) for name in names), param.name
        units.append(_Unit(param=param, ranks=ranks, shards=tuple(shards), tensors=names))
    return units


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Units of one stage whose canonical tensors are broadcast together, and where these lie."""

    pp: int
    units: tuple[_Unit, ...]
    places: dict[str, tuple[int, tuple[int, ...]]]  # canonical name -> first element, shape
    numel: int

    def views(self, buffer: Tensor) -> Tensors:
        return {
            name: buffer[at : at + prod(shape)].view(shape)
            for name, (at, shape) in self.places.items()
        }


def buckets_of(case: Case) -> list[Bucket]:
    """Divide the model into buckets, stage by stage, in the order in which they are sent."""
    shapes = {tensor.name: tensor.shape for tensor in canonical_tensors(case.spec)}
    limit = _BUCKET_BYTES // DTYPE.itemsize
    buckets: list[Bucket] = []
    for pp in range(case.trainer.pp):
        groups: list[tuple[list[_Unit], int]] = []
        for unit in _units(case, pp, shapes):
            numel = sum(prod(shapes[name]) for name in unit.tensors)
            if not groups or groups[-1][1] + numel > limit:
                groups.append(([], 0))
            groups[-1] = ([*groups[-1][0], unit], groups[-1][1] + numel)
        for units, numel in groups:
            places: dict[str, tuple[int, tuple[int, ...]]] = {}
            at = 0
            for name in (name for unit in units for name in unit.tensors):
                places[name] = (at, shapes[name])
                at += prod(shapes[name])
            buckets.append(Bucket(pp=pp, units=tuple(units), places=places, numel=numel))
    return buckets


class GatherBroadcast(Scheme):
    """What most RL frameworks do, with full tensors on every generator.

    For each bucket: the stage's tensor- and expert-parallel ranks all-gather its parameters, all at
    once, the stage's first rank rebuilds the full tensors and broadcasts them to all generators, which copy
    their part in place. The broadcast is torch's; gloo's sends everything once for each level of a
    tree. Replicas of the first data-parallel one do not gather.
    """

    def __init__(self, case: Case, rank: int, source: Tensors, params: Tensors):
        self._case, self._rank, self._source = case, rank, source
        self.params = params
        self._wanted: dict[str, list[tuple[str, Shard]]] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._buckets: list[Bucket] = []
        if rank in case.generator_ranks:
            self.target = case.target.manifest(rank)
            for param in self.target.params:
                for shard in param.shards:
                    self._wanted.setdefault(shard.tensor, []).append((param.name, shard))

    def setup(self) -> None:
        self._buckets = buckets_of(self._case)
        units = (unit for bucket in self._buckets for unit in bucket.units)
        for members in dict.fromkeys(unit.ranks for unit in units if len(unit.ranks) > 1):
            self._groups[members] = _group_of(self._rank, [members])
        self._connect()
        self._buffer = torch.empty(max(b.numel for b in self._buckets), dtype=DTYPE)
        self.sent_bytes = sum(map(self._bytes_of, self._buckets))

    def _connect(self) -> None:
        for chain in dict.fromkeys(tuple(self._chain(bucket)) for bucket in self._buckets):
            self._groups[chain] = _group_of(self._rank, [chain])

    def _bytes_of(self, bucket: Bucket) -> int:
        """Return what this rank sends for a bucket; gloo's all-gather is a ring."""
        gathered = sum(
            (len(unit.ranks) - 1) * prod(unit.param.shape)
            for unit in bucket.units
            if self._rank in unit.ranks
        )
        return DTYPE.itemsize * (gathered + bucket.numel * self._copies_sent(self._chain(bucket)))

    def _copies_sent(self, chain: Sequence[int]) -> int:
        """Return how often this rank sends a bucket: in a binomial tree, to each of its children."""
        if self._rank not in chain:
            return 0
        place, size = chain.index(self._rank), len(chain)
        spans = (1 << level for level in range(size.bit_length()))
        return sum(place % (2 * span) == 0 and place + span < size for span in spans)

    def _chain(self, bucket: Bucket) -> list[int]:
        """Return the stage's source rank and all that its bucket goes to, in order."""
        source = bucket.pp * self._case.trainer.world_size // self._case.trainer.pp
        return [source, *self._case.generator_ranks]

    @torch.no_grad()
    def sync(self) -> None:
        for bucket in self._buckets:
            chain = self._chain(bucket)
            whole = bucket.views(self._buffer)
            self._gather(bucket, whole if self._rank == chain[0] else {})
            self._broadcast(self._buffer[: bucket.numel], chain)
            for name in whole if self._rank in self._case.generator_ranks else ():
                for param, shard in self._wanted.get(name, ()):
                    self.params[param][shard.local.slices].copy_(whole[name][shard.box.slices])

    def _gather(self, bucket: Bucket, whole: Tensors) -> None:
        """Bring the shards of all parameters together; on the source lay them into ``whole``."""
        units = [unit for unit in bucket.units if self._rank in unit.ranks]
        started = [self._start_gather(unit) for unit in units]
        for unit, (work, parts) in zip(units, started, strict=True):
            if work is not None:
                work.wait()
            for index, shard in unit.shards if whole else ():
                part = parts[index][shard.local.slices]
                whole[shard.tensor][shard.box.slices].copy_(part)

    def _start_gather(self, unit: _Unit) -> tuple[dist.Work | None, list[Tensor]]:
        mine = self._source[unit.param.name]
        if len(unit.ranks) == 1:
            return None, [mine]
        parts = [torch.empty_like(mine) for _ in unit.ranks]
        group = self._groups[unit.ranks]
        return dist.all_gather(parts, mine, group=group, async_op=True), parts

    def _broadcast(self, buffer: Tensor, chain: list[int]) -> None:
        if self._rank in chain:
            dist.broadcast(buffer, chain[0], group=self._groups[tuple(chain)])


class GatherChain(GatherBroadcast):
    """Gather + broadcast whose broadcast is a pipelined chain, as NCCL's: every NIC at work at once."""

    def _connect(self) -> None:
        """Use the default group: neighbours in the chain only."""

    def _copies_sent(self, chain: Sequence[int]) -> int:
        return int(self._rank in chain[:-1])

    def _broadcast(self, buffer: Tensor, chain: list[int]) -> None:
        """Pass a buffer from rank to rank, chunk by chunk."""
        if self._rank not in chain:
            return
        place = chain.index(self._rank)
        chunks = buffer.split(_CHUNK_BYTES // DTYPE.itemsize)
        arriving = [dist.irecv(chunk, chain[place - 1]) for chunk in chunks] if place else []
        leaving = []
        for index, chunk in enumerate(chunks):
            if arriving:
                _wait(arriving[index])
            if place + 1 < len(chain):
                leaving.append(dist.isend(chunk, chain[place + 1]))
        for work in leaving:
            _wait(work)


def _wait(work: dist.Work | None) -> None:
    assert work is not None, "this rank is in the default group"
    work.wait()
