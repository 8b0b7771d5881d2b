"""The command line: ``megarl train | sft | replay | eval | doctor | data | convert | launch | advise | status``.

Checks everything that can be checked before an engine starts, then starts the ranks of this
machine; where a launcher (torchrun, srun) has set RANK already, it becomes that rank.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
from pathlib import Path

from rich.console import Console

from launch.local import LocalLauncher
from launch.ranks import LocalJob
from megarl.check import Command, check_run, check_world_size, folder_of, topology_of
from megarl.config import RunConfig
from megarl.config_file import load_config, to_yaml
from megarl.errors import ConfigError, MegarlError
from megatron_bridge.errors import BridgeError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megarl", description="Asynchronous reinforcement learning of language models."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for command, text in (
        (Command.TRAIN, "reinforcement learning"),
        (Command.SFT, "supervised fine-tuning"),
        (Command.REPLAY, "train again on the recorded batches of the run in replay_from"),
        (Command.EVAL, "score a Hugging Face checkpoint on data.eval_path"),
        (Command.DOCTOR, "check that a training run would start right, without training"),
    ):
        sub = commands.add_parser(command, help=text)
        # A doctor may look at a configuration, at machines, or at both.
        doctor = command is Command.DOCTOR
        sub.add_argument("config", type=Path, nargs="?" if doctor else None, help="YAML file")
        sub.add_argument("overrides", nargs="*", help="dotted overrides: trainer.lr=1e-4")
        if doctor:
            text = "YAML file of the machines: examine those of this allocation, or this one"
            sub.add_argument("--cluster", type=Path, help=text)
    data = commands.add_parser("data", help="write the built-in arithmetic task and its model")
    data.add_argument("folder", type=Path)
    data.add_argument("--seed", type=int, default=0)
    data.add_argument("--num-train", type=int, default=16384)
    commands.add_parser("convert", help="convert, compare and show checkpoints (--help says more)")
    commands.add_parser("advise", help="say which layouts train fastest (--help says more)")
    commands.add_parser("launch", help="submit a training run to Slurm (--help says more)")
    commands.add_parser("status", help="say how far a run is (--help says more)")
    return parser


def _write_data(arguments: argparse.Namespace) -> int:
    from megarl.data.arithmetic import write_dataset
    from megarl.data.starting_model import write_starting_model

    write_dataset(arguments.folder, arguments.seed, arguments.num_train)
    write_starting_model(arguments.folder / "model", arguments.seed)
    return 0


def _run(command: Command, arguments: argparse.Namespace, console: Console) -> int:
    overrides = tuple(arguments.overrides)
    config = load_config(arguments.config, overrides)
    topology = topology_of(command, config)
    if "RANK" in os.environ:
        check_world_size(topology, int(os.environ.get("WORLD_SIZE", "1")))
    check_run(command, config)
    if "RANK" in os.environ:
        from megarl.train import main as rank_main

        rank_main([command, str(arguments.config), *overrides])
    folder = folder_of(command, config)
    if command is Command.DOCTOR:
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier doctor
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    job = LocalJob(
        command=command,
        arguments=(str(arguments.config), *overrides),
        topology=topology,
        folder=folder,
        max_steps=config.max_steps,
        fault=config.fault,
    )
    code = LocalLauncher(job, console).run()
    if command is Command.DOCTOR:
        _print_findings(folder, code, console)
    elif code == 0:
        _print_result(command, config, console)
    return code


def _doctor(arguments: argparse.Namespace, console: Console) -> int:
    """Examine the machines, where a file of them is given, then the configuration, where one is."""
    if arguments.cluster is None and arguments.config is None:
        raise ConfigError("megarl doctor needs a configuration, or --cluster FILE")
    if arguments.cluster is not None:
        from launch.preflight.doctor import main as examine_machines

        code = examine_machines(arguments.cluster, console)
        if code or arguments.config is None:
            return code
    return _run(Command.DOCTOR, arguments, console)


def _print_findings(folder: Path, code: int, console: Console) -> None:
    """Show what a doctor found; its folder stays only where something was wrong."""
    from megarl.doctor import read_findings, table

    if code:
        console.print("[bold red]refused[/bold red]: training would not start; see above")
        return
    console.print(table(read_findings(folder)))
    shutil.rmtree(folder)
    console.print("[green]ready[/green]: megarl train with these arguments starts right")


def _print_result(command: Command, config: RunConfig, console: Console) -> None:
    name = {Command.SFT: "hf/config.json", Command.EVAL: "eval.json"}
    path = config.folder / name.get(command, "summary.json")
    if path.is_file() and command is not Command.SFT:
        console.print_json(path.read_text())
    console.print(f"[green]done[/green]: {path}", highlight=False)


def main() -> None:
    """Entry point of the ``megarl`` command."""
    console = Console()
    try:
        if sys.argv[1:2] == ["convert"]:  # which has commands of its own, and needs torch to say so
            gc.disable()
            from megarl.convert import main as convert_main

            sys.exit(convert_main(sys.argv[2:], console))
        if sys.argv[1:2] == ["advise"]:
            from launch.advise_report import main as advise_main

            sys.exit(advise_main(sys.argv[2:], console))
        if sys.argv[1:2] == ["launch"]:
            from launch.command import main as launch_main

            sys.exit(launch_main(sys.argv[2:], console))
        if sys.argv[1:2] == ["status"]:
            from launch.status import main as status_main

            sys.exit(status_main(sys.argv[2:], console))
        arguments = _parser().parse_args()
        if arguments.command == "data":
            sys.exit(_write_data(arguments))
        if arguments.command == Command.DOCTOR:
            sys.exit(_doctor(arguments, console))
        sys.exit(_run(Command(arguments.command), arguments, console))
    except (MegarlError, BridgeError) as error:
        print(f"megarl: {error}", file=sys.stderr)  # noqa: T201 - the command's own voice
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
