"""``megarl convert``: checkpoints from one format to another, what they hold, and whether two agree.

Called by `megarl.cli` and by ``tools/convert_checkpoint.py``. Runs in this process, on CPUs.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from rich.console import Console

from megarl.convert_report import (
    comparison_lines,
    contents_table,
    counting,
    estimate,
    figures,
    peak_rss_bytes,
    plan_table,
)
from megatron_bridge.conversions import (
    DTYPES,
    Options,
    hf_to_hf,
    hf_to_megatron,
    megatron_to_hf,
    meta_to_hf,
    open_any,
)
from megatron_bridge.convert import Conversion, Converter
from megatron_bridge.errors import BridgeError, ConversionError
from megatron_bridge.io.meta import open_meta
from megatron_bridge.io.store import Stored
from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.models.meta_llama import RELEASES
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.verify import verify

_GIB = 1 << 30


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands and their options."""
    commands = parser.add_subparsers(dest="what", required=True, metavar="COMMAND")
    for name, text in (
        ("hf-to-megatron", "a Hugging Face folder to a torch_dist checkpoint, for any layout"),
        ("megatron-to-hf", "a torch_dist or mp_rank checkpoint to a Hugging Face folder"),
        ("hf-to-hf", "a Hugging Face folder in another dtype, to or from FP8"),
        ("meta-to-hf", "an original Llama (consolidated.*.pth) to a Hugging Face folder"),
    ):
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("source", type=Path)
        sub.add_argument("target", type=Path, help="new folder")
        _add_options(sub)
        if name == "hf-to-megatron":
            _add_layout(sub)
        if name == "megatron-to-hf":
            sub.add_argument("--config", type=Path, metavar="PATH", help=_CONFIG_HELP)
        if name in ("megatron-to-hf", "hf-to-hf"):
            sub.add_argument("--fp8", action="store_true", help="linear layers in FP8 blocks")
        if name == "meta-to-hf":
            sub.add_argument("--llama", required=True, choices=RELEASES, help="the release")
            sub.add_argument("--instruct", action="store_true", help="the model answers in turns")
    compare = commands.add_parser("verify", help="compare two checkpoints of any formats")
    compare.add_argument("first", type=Path)
    compare.add_argument("second", type=Path)
    show = commands.add_parser("inspect", help="what a checkpoint holds")
    show.add_argument("path", type=Path)
    for sub in (compare, show):
        sub.add_argument("--config", type=Path, metavar="PATH", help=_CONFIG_HELP)
        sub.add_argument("--llama", choices=RELEASES, help="the release of an original Llama")
        sub.add_argument("--workers", type=_positive, default=os.cpu_count() or 1)


_NO_ARGUMENTS_HELP = "keep no arguments of Megatron-LM: for a model that it cannot be told of"
_CONFIG_HELP = "folder, config.json or file of configs/models with the sizes of a Megatron model"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="show the plan; read no weights")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--dtype", choices=("keep", *DTYPES), default="keep")
    parser.add_argument("--drop-mtp", action="store_true", help="leave out MTP layers")
    parser.add_argument("--max-file-gib", type=float, default=5.0, help="size of the new files")
    parser.add_argument("--workers", type=_positive, default=os.cpu_count() or 1, help="threads")


def _add_layout(parser: argparse.ArgumentParser) -> None:
    text = "checked against the model, and kept as Megatron's arguments: loads at any other, too"
    for name in ("tp", "pp", "ep", "etp"):
        parser.add_argument(f"--{name}", type=int, default=1, help=text)
    parser.add_argument("--no-arguments", action="store_true", help=_NO_ARGUMENTS_HELP)
    parser.add_argument("--vocab-divisor", type=int, default=128, help="pads the vocabulary")


def main(argv: Sequence[str], console: Console) -> int:
    """Do what a command line says; return the exit code.

    Callers turn off garbage collection before they import this module: plans are tens of thousands
    of objects without cycles, and collections would take a third of the time until the first byte.
    """
    parser = argparse.ArgumentParser(
        prog="megarl convert", description="Convert, compare and show checkpoints of models."
    )
    add_commands(parser)
    try:
        return run(parser.parse_args(argv), console)
    except BridgeError as error:
        print(f"convert: {error}", file=sys.stderr)  # noqa: T201 - the command's own voice
        return 2
    except OSError as error:
        print(f"convert: {error}; start again to go on", file=sys.stderr)  # noqa: T201
        return 1


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Do what the command line says; return the exit code: 1 where `verify` finds differences.

    Raises:
        BridgeError: nothing was written, for this reason.
        OSError: reading or writing failed; the same command goes on where it stopped.
    """
    torch.set_num_threads(1)  # workers are threads already
    if arguments.what == "inspect":
        console.print(contents_table(_open(arguments.path, arguments)))
        return 0
    if arguments.what == "verify":
        return _verify(arguments, console)
    return _convert(arguments, console)


def _convert(arguments: argparse.Namespace, console: Console) -> int:
    start = time.perf_counter()
    converter = Converter(_conversion(arguments))
    if arguments.dry_run:
        seconds, speed = estimate(converter)
        if arguments.json:
            console.print_json(data=figures(converter, seconds))
        else:
            console.print(plan_table(converter, seconds, speed))
        return 0
    _collect_again()
    shown = Console(stderr=True) if arguments.json else console
    with counting(shown, "converting", converter.num_bytes, "bytes") as advance:
        converter.run(advance)
    seconds = time.perf_counter() - start
    if arguments.json:
        found = {**figures(converter, seconds), "peak_rss_bytes": peak_rss_bytes()}
        console.print_json(data=found)
        return 0
    speed = converter.num_bytes / seconds
    said = f"{converter.num_bytes / 1e9:.2f} GB in {seconds:.1f} s, {speed / 1e6:.0f} MB/s"
    console.print(f"[green]done[/green]: {arguments.target} ({said})", highlight=False)
    return 0


def _collect_again() -> None:
    """Begin what may take hours; the plan stays, and need not be looked through."""
    gc.freeze()
    gc.enable()


def _open(path: Path, arguments: argparse.Namespace) -> Stored:
    if not (path / "params.json").is_file():
        return open_any(path, arguments.config)
    if arguments.llama is None:
        raise ConversionError(f"{path} is an original Llama: --llama must say which")
    return open_meta(path, release=arguments.llama)


def _verify(arguments: argparse.Namespace, console: Console) -> int:
    first, second = _open(arguments.first, arguments), _open(arguments.second, arguments)
    _collect_again()
    total = sum(prod(tensor.shape) for tensor in canonical_tensors(first.spec))
    with counting(console, "comparing", total, "elements") as advance:
        comparison = verify(first, second, advance, arguments.workers)
    for line in comparison_lines(comparison):
        console.print(line, highlight=False)
    return 0 if comparison.is_equal else 1


def _conversion(arguments: argparse.Namespace) -> Conversion:
    options = Options(
        dtype="" if arguments.dtype == "keep" else arguments.dtype,
        mtp=not arguments.drop_mtp,
        max_file_bytes=int(arguments.max_file_gib * _GIB),
        workers=arguments.workers,
        is_dry=arguments.dry_run,
    )
    source, target = arguments.source, arguments.target
    if arguments.what == "hf-to-megatron":
        layout = TrainerLayout(
            tp=arguments.tp,
            pp=arguments.pp,
            dp=arguments.ep,  # experts are spread over data-parallel ranks
            ep=arguments.ep,
            etp=arguments.etp,
            sequence_parallel=arguments.tp > 1,  # which mixtures and latent attention need
            vocab_divisor=arguments.vocab_divisor,
        )
        return hf_to_megatron(
            source, target, replace(options, layout=layout, arguments=not arguments.no_arguments)
        )
    if arguments.what == "meta-to-hf":
        return meta_to_hf(source, target, arguments.llama, options, instruct=arguments.instruct)
    options = replace(options, fp8=arguments.fp8)
    if arguments.what == "hf-to-hf":
        return hf_to_hf(source, target, options)
    return megatron_to_hf(source, target, arguments.config, options)
