"""The layouts that a run should have: ``python -m tools.plan_layout CONFIG --cluster FILE``.

`megarl advise` for a run's own configuration: its model, batch, staleness bound and number of ranks. It
prints the best few as overrides of that configuration. With ``--curves`` (of `tools.measure_curves`, for
CONFIG with one copy of each engine) at measured rates, else at those of the cluster file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from launch.advise import Proposal, Setting, advise, layouts_of
from launch.advise_measured import divisions
from launch.advise_report import SHOWN, measured_rows, measured_table, proposal_row
from launch.curves import load_curves, pipeline_of
from launch.engine_costs import Workload
from launch.lengths import Lengths
from launch.site import Site, load_site
from megarl.config import RunConfig
from megarl.config_file import load_config
from megarl.weights import run_spec
from megatron_bridge.parallel import Quantization

_ONE_OF_EACH = ("trainer.layout.dp=1", "generator.layout.replicas=1")


def overrides_of(setting: Setting, proposal: Proposal) -> list[str]:
    """Return what a configuration must say to have this layout, where that is no default."""
    trainer, generator = layouts_of(setting, proposal.layout)
    longest = setting.workload.prompt_length + setting.workload.lengths.longest
    said = {
        "trainer.layout.tp": trainer.tp,
        "trainer.layout.pp": trainer.pp,
        "trainer.layout.dp": trainer.dp,
        "trainer.layout.sequence_parallel": str(trainer.sequence_parallel).lower(),
        "trainer.layout.num_layers_in_first_stage": trainer.num_layers_in_first_stage,
        "trainer.layout.num_layers_in_last_stage": trainer.num_layers_in_last_stage,
        "trainer.max_tokens_per_micro_batch": max(
            longest,
            round(
                proposal.layout.trainer.micro_batch
                * (setting.workload.prompt_length + setting.sizes.response)
            ),
        ),
        "generator.layout.tp": generator.tp,
        "generator.layout.replicas": generator.replicas,
        "generator.max_running_sequences": proposal.layout.generator.slots,
    }
    if generator.pp > 1:
        said["generator.layout.pp"] = generator.pp
    if generator.quantization is not Quantization.NONE:
        said["generator.layout.quantization"] = generator.quantization.value
    return [f"{name}={value}" for name, value in said.items() if value is not None]


def plan_modelled(config: RunConfig, site: Site, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the best few layouts of the model on the configuration's number of ranks."""
    longest = config.rollout.max_response_length
    lengths = Lengths(mean=asked.mean_length or longest / 2, spread=asked.spread, longest=longest)
    setting = Setting(
        model=config.name,
        spec=run_spec(config).without_mtp(),
        num_gpus=asked.ranks or config.num_engine_ranks,
        site=site,
        workload=Workload(
            prompts=config.data.train_batch_size,
            samples=config.rollout.n,
            prompt_length=asked.prompt_length or config.data.max_prompt_length // 2,
            lengths=lengths,
        ),
        max_staleness=config.max_staleness,
        fp8=config.generator.layout.quantization is not Quantization.NONE,
    )
    return [
        {"overrides": overrides_of(setting, found), **proposal_row(found)}
        for found in advise(setting).proposals
    ]


def plan_measured(asked: argparse.Namespace, site: Site) -> list[dict[str, Any]]:
    """Return all divisions of the ranks between copies of the engines as they were measured."""
    config = load_config(asked.config, (*asked.overrides, *_ONE_OF_EACH))
    ranks = asked.ranks or config.num_engine_ranks
    curves = load_curves(asked.curves)
    return measured_rows(
        divisions(curves, pipeline_of(curves, config), ranks, site.computing_ranks(ranks))
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.plan_layout", description=__doc__)
    parser.add_argument("config", type=Path, help="YAML file of a run")
    parser.add_argument("overrides", nargs="*", help="dotted overrides: max_staleness=4")
    parser.add_argument("--cluster", type=Path, required=True, help="YAML file of the machines")
    parser.add_argument("--curves", type=Path, help="measured, in place of the cluster's rates")
    parser.add_argument("--ranks", type=int, help="of both engines; as many as CONFIG has")
    parser.add_argument("--prompt-length", type=int, help="mean tokens; half of the longest")
    parser.add_argument("--mean-length", type=float, help="of a response; half of the longest")
    parser.add_argument("--spread", type=float, default=0.7, help="deviation of log lengths")
    parser.add_argument("--json", action="store_true", help="one object")
    asked = parser.parse_intermixed_args(argv)
    site = load_site(asked.cluster)
    console = Console()
    if asked.curves:
        rows = plan_measured(asked, site)
    else:
        rows = plan_modelled(load_config(asked.config, tuple(asked.overrides)), site, asked)
    if asked.json:
        print(json.dumps({"rows": rows}, indent=1))
    else:
        console.print(measured_table(rows[:SHOWN], title=asked.config.stem))
    return 0


if __name__ == "__main__":
    sys.exit(main())
