"""The placement as a picture: a row a host, a column a device; called by the launch command."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from launch.placement import Placement
from megarl.topology import REWARD

_HOSTS_PER_INCH = 8.0


def draw(placement: Placement, path: Path) -> None:
    """Draw each rank in the colour of its stage or replica, with a name where one begins."""
    names = list(dict.fromkeys(seat.parts for seat in placement.seats))
    colours = plt.get_cmap("tab20")
    height = max(placement.num_hosts / _HOSTS_PER_INCH, 2.0)
    figure, axes = plt.subplots(figsize=(8, height + 1), layout="constrained")
    labelled: set[tuple[str, ...]] = set()
    for seat in placement.seats:
        colour = "black" if seat.parts == (REWARD,) else colours(names.index(seat.parts) % 20)
        axes.barh(seat.host, 1, left=seat.local_rank, height=0.9, color=colour)
        if seat.parts not in labelled:
            labelled.add(seat.parts)
            label = " + ".join(seat.parts)
            axes.text(seat.local_rank + 0.05, seat.host, label, va="center", fontsize=5)
    axes.set(xlabel="device of a host", ylabel="host", title=f"{len(placement.seats)} ranks")
    axes.set_ylim(placement.num_hosts - 0.5, -0.5)
    figure.savefig(path, dpi=150)
    plt.close(figure)
