"""A planned weight transfer as tables and as a picture; called by `tools.plan_reshard` only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

from megatron_bridge.cost import link_loads
from megatron_bridge.flows import Forwarding
from tools.plan_reshard import Study

_MOST_CELLS = 32  # of a heat map's axis, before ranks are drawn together
_BUSIEST = 3
_WHOLE = ("predicted: nic", "predicted")  # seconds to set beside the floor


def _table(title: str, heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


def _sides(study: Study) -> Table:
    trainer, generator = study.config.trainer.layout, study.config.generator.layout
    whole = study.chosen.plan
    rows = [
        (
            "trainer",
            str(trainer.world_size),
            f"tp {trainer.tp}, pp {trainer.pp}, cp {trainer.cp}, dp {trainer.dp}, ep {trainer.ep}",
            whole.source.dtype,
        ),
        (
            "generators",
            str(generator.world_size),
            f"{generator.replicas} x (tp {generator.tp}, pp {generator.pp})",
            f"{whole.target.dtype}, quantization {generator.quantization.value}",
        ),
    ]
    return _table("Sides", ("", "ranks", "layout", "weights"), rows)


def _plan(study: Study, found: Mapping[str, Any]) -> Table:
    rows = [
        ("parameters", f"{found['model_parameters'] / 1e9:.2f} billion"),
        ("every element exactly once", "proven" if found["coverage_exact"] else "NO"),
        ("whole plan and proof", f"{found['plan_seconds']:.3f} s"),
        ("one rank's own messages", f"{1e3 * found['rank_plan_seconds_max']:.1f} ms at most"),
        ("bytes in all", _gb(found["bytes_total"])),
        ("operations in messages", f"{found['num_operations']:,} in {found['num_messages']:,}"),
        ("staging memory of a rank", _gb(found["staging_bytes_max"])),
        (
            "busiest sender over the mean",
            f"{found['imbalance']:.3f} ({found['imbalance_floor']:.3f} from uneven stages)",
        ),
    ]
    return _table(f"Plan of {study.config.name}", ("", ""), rows)


def _load(found: Mapping[str, Any]) -> Table:
    rows = [
        (name.replace("_", " "), *(_gb(row[part]) for part in ("max", "mean", "min")))
        for name, row in found["bytes"].items()
    ]
    return _table("Load of a rank or NIC", ("", "most", "mean", "least"), rows)


def _busiest(study: Study) -> Table:
    load, rows = study.chosen.load, []
    layout = study.config.trainer.layout
    for word, by_rank in (("sends", load.sent), ("receives", load.received)):
        for rank in sorted(by_rank, key=lambda rank: -by_rank[rank])[:_BUSIEST]:
            place = "generator"
            if rank < layout.world_size:
                at = layout.coordinate(rank)
                place = f"trainer: stage {at.pp}, tp {at.tp}, cp {at.cp}, dp {at.dp}"
            peers = sum(1 for pair in load.pairs if pair[word == "receives"] == rank)
            rows.append((f"{word} most", str(rank), place, _gb(by_rank[rank]), str(peers)))
    return _table("Busiest ranks", ("", "rank", "where", "bytes", "peers"), rows)


def _seconds(study: Study) -> Table:
    floor, best = study.floors, study.chosen.prediction
    parts = [(name.removesuffix("_seconds"), getattr(best, name)) for name in best.__slots__]
    rows = [
        ("floor: busiest receiver", floor.receiver),
        ("floor: senders, each replica its own copy", floor.sender_unicast),
        ("floor: senders, one copy", floor.sender_multicast),
        *((f"predicted: {name}", seconds) for name, seconds in parts),
        ("predicted", best.seconds),
    ]
    cells = [
        (
            name,
            f"{seconds:.4f}",
            f"{floor.seconds / seconds:.0%}" if name in _WHOLE and seconds else "",
        )
        for name, seconds in rows  # nothing takes seconds where each rank gives only itself
    ]
    title = f"Seconds on {study.cluster.name or 'the cluster'}"
    return _table(title, ("", "seconds", "floor / this"), cells)


def _forwardings(study: Study) -> Table:
    rows = []
    for forwarding in Forwarding:
        costed = study.plans.get(forwarding)
        seconds = f"{costed.prediction.seconds:.3f}" if costed else "not possible"
        trainer = max(costed.load.sent[r] for r in costed.plan.source.ranks) if costed else 0
        mark = "chosen" if costed is study.chosen else ""
        rows.append((forwarding.value, seconds, _gb(trainer) if costed else "", mark))
    return _table("Forwarding", ("", "predicted seconds", "busiest trainer sends", ""), rows)


def _peer(found: Mapping[str, Any]) -> Table:
    peer = found["peer"]
    rows = [
        ("planning, seconds", f"{found['plan_seconds']:.2f}", f"{peer['loop_seconds']:.2f}"),
        ("busiest sender over the mean", f"{found['imbalance']:.2f}", f"{peer['imbalance']:.2f}"),
        (
            "busiest sender",
            _gb(found["bytes"]["trainer_sent"]["max"]),
            _gb(peer["busiest_bytes"]),
        ),
        ("operations", f"{found['num_operations']:,}", f"{peer['num_operations']:,}"),
    ]
    return _table("Beside Megatron-Core's planner", ("", "megarl", "megatron.core"), rows)


def show(study: Study, found: Mapping[str, Any]) -> None:
    """Print all tables."""
    console = Console()
    tables = [_sides(study), _plan(study, found), _seconds(study), _forwardings(study)]
    tables += [_load(found), _busiest(study)]
    for table in tables:
        console.print(table)
    if "peer" in found:
        peer = found["peer"]
        if peer["refused"]:
            console.print(f"Megatron-Core has no plan: {peer['refused']}", markup=False)
        else:
            console.print(_peer(found))
        console.print(peer["cannot"], markup=False)


# --- Picture ----------------------------------------------------------------------------------


def _groups(study: Study) -> tuple[dict[int, str], dict[int, str]]:
    """Return the row of each rank and the column of each: ranks, or what they are parts of."""
    layout, generator = study.config.trainer.layout, study.config.generator.layout
    first, total = layout.world_size, layout.world_size + generator.world_size
    rows: dict[int, str] = {}
    for rank in range(first):
        at = layout.coordinate(rank)
        part = f"stage {at.pp}" if layout.pp > 1 else f"tp {at.tp}"
        rows[rank] = f"rank {rank}" if first <= _MOST_CELLS else part
    columns: dict[int, str] = {}
    for rank in range(first, total):
        replica = (rank - first) // generator.ranks_per_replica
        few = total - first <= _MOST_CELLS
        columns[rank] = f"rank {rank}" if few else f"replica {replica}"
    return {**rows, **columns}, columns


def _heat(axes: Axes, study: Study) -> None:
    names, columns = _groups(study)
    cells: dict[tuple[str, str], int] = defaultdict(int)
    for (source, target), nbytes in study.chosen.load.pairs.items():
        if target in columns:
            cells[names[source], names[target]] += nbytes
    across = list(dict.fromkeys(columns.values()))
    senders = {source for source, _ in cells}
    down = [name for name in dict.fromkeys(names.values()) if name in senders]
    image = axes.imshow(
        [[cells.get((row, column), 0) / 1e9 for column in across] for row in down],
        aspect="auto",
        interpolation="nearest",
        vmin=0,
    )
    for axis, labels in ((axes.xaxis, across), (axes.yaxis, down)):
        step = -(-len(labels) // _MOST_CELLS)
        axis.set_ticks(range(0, len(labels), step), labels[::step], fontsize=6)
    axes.tick_params(axis="x", rotation=90)
    axes.set(title="Who sends how much to whom", xlabel="to generators", ylabel="from")
    axes.figure.colorbar(image, ax=axes, label="GB")


def _bars(axes: Axes, study: Study) -> None:
    nics = link_loads(study.chosen.load, study.cluster).nics
    places = sorted({(host, nic) for host, nic, _ in nics})
    for direction in ("out", "in"):
        heights = [nics.get((*place, direction), 0) / 1e9 for place in places]
        axes.stairs(heights, fill=True, alpha=0.7, label=direction)  # a bar each would take seconds
    floor = study.floors.seconds * study.cluster.nic_bytes_per_second / 1e9
    axes.axhline(floor, color="black", linestyle="--", linewidth=1, label="floor")
    axes.set(title="Bytes of each NIC", xlabel="NIC, by host", ylabel="GB")
    axes.legend(loc="lower center")


def draw(study: Study, found: Mapping[str, Any], path: str) -> None:
    """Write the picture: a map of who sends to whom, and the bytes of each NIC."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(16, 7), layout="constrained")
    _heat(left, study)
    _bars(right, study)
    predicted, floor = found["predicted_seconds"], found["floor_seconds"]
    figure.suptitle(
        f"{study.config.name} on {study.cluster.name}: predicted {predicted:.2f} s, floor "
        f"{floor:.2f} s, forwarding {found['forwarding']}"
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
