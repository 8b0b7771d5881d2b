"""Everything about a run that can be refused before an engine starts; imports no engine.

Called by the command line before it starts ranks and by each rank before it joins. Reads the
model's and the tokenizer's configuration and the rows of the data, never weights.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path

from tokenizers import Tokenizer

from megarl.config import Resume, RunConfig, TrainerConfig
from megarl.data.rows import read_rows
from megarl.errors import ConfigError, DataError
from megarl.recording import check_recording
from megarl.rewards.loading import load_score_function
from megarl.topology import Topology, eval_topology, rl_topology, sft_topology
from megarl.weights import run_spec
from megatron_bridge.models.checks import check_generator_layout, check_layout


class Command(StrEnum):
    """What a job does; each is a sub-command of ``megarl``."""

    TRAIN = "train"
    SFT = "sft"
    EVAL = "eval"
    REPLAY = "replay"
    DOCTOR = "doctor"


_GENERATES = (Command.TRAIN, Command.EVAL, Command.DOCTOR)
SAVES = (Command.TRAIN, Command.SFT, Command.REPLAY)


def topology_of(command: Command, config: RunConfig) -> Topology:
    """Return the executors and ranks that ``command`` needs."""
    match command:
        case Command.TRAIN | Command.DOCTOR:
            trainer, generator = config.trainer.layout, config.generator.layout
            return rl_topology(trainer, generator, colocated=config.is_colocated)
        case Command.SFT | Command.REPLAY:
            return sft_topology(config.trainer.layout)
        case Command.EVAL:
            return eval_topology(config.generator.layout)


def folder_of(command: Command, config: RunConfig) -> Path:
    """Return the run folder; a doctor has its own, so that it never stands in a run's way."""
    folder = config.folder
    return folder.with_name(f"{folder.name}.doctor") if command is Command.DOCTOR else folder


def check_run(command: Command, config: RunConfig) -> None:
    """Refuse what cannot run.

    Raises:
        ConfigError, DataError, ConversionError, PlanError: what, got, expected, where.
    """
    if not config.model.path:
        raise ConfigError("model.path is empty; expected a Hugging Face folder")
    spec = run_spec(config)
    if command is not Command.EVAL:
        check_layout(spec, config.trainer.layout)
    if command in _GENERATES:
        check_generator_layout(spec, config.generator.layout)
        load_score_function(config.reward.path)
    _check_tokenizer(Path(config.model.path), spec.vocab_size)
    _check_data(command, config, spec.max_positions)
    _check_folder(command, config)
    if command is Command.REPLAY:
        check_recording(config, spec.vocab_size)


def _check_data(command: Command, config: RunConfig, max_positions: int) -> None:
    data, rollout = config.data, config.rollout
    sequences = data.train_batch_size * (1 if command is Command.SFT else rollout.n)
    if command is not Command.EVAL:
        _check_batch(command, sequences, config.trainer)
    second = data.response_key if command is Command.SFT else data.answer_key
    if command not in (Command.EVAL, Command.REPLAY):
        _check_rows(data.train_path, "data.train_path", data.prompt_key, second)
    if command is not Command.SFT:
        longest = data.max_prompt_length + rollout.max_response_length
        if longest > max_positions:
            raise ConfigError(
                f"data.max_prompt_length {data.max_prompt_length} + rollout.max_response_length "
                f"{rollout.max_response_length} must fit the model's {max_positions} positions"
            )
        budget = config.trainer.max_tokens_per_micro_batch
        if command is not Command.EVAL and longest > budget:
            raise ConfigError(
                f"trainer.max_tokens_per_micro_batch {budget} must hold the longest sequence, "
                f"data.max_prompt_length + rollout.max_response_length = {longest}"
            )
        if command in _GENERATES and (data.eval_path or command is Command.EVAL):
            _check_rows(data.eval_path, "data.eval_path", data.prompt_key, data.answer_key)


def _check_batch(command: Command, num_sequences: int, trainer: TrainerConfig) -> None:
    updates, dp = trainer.updates_per_batch, trainer.layout.dp
    if command is Command.SFT and updates != 1:
        raise ConfigError(
            f"trainer.updates_per_batch is {updates}, expected 1 for megarl sft: there a smaller "
            "data.train_batch_size is the same"
        )
    if num_sequences < updates * dp:
        several = f"trainer.updates_per_batch {updates} x " if updates > 1 else ""
        raise ConfigError(
            f"a batch of {num_sequences} sequences is less than {several}trainer.layout.dp = "
            f"{updates * dp}: every data-parallel rank needs one{' in each update' * (updates > 1)}"
        )


def _check_rows(path: str, key: str, *row_keys: str) -> None:
    if not path:
        raise ConfigError(f"{key} is empty; expected a jsonl or parquet file")
    for row in read_rows(path):
        for row_key in row_keys:
            if row.get(row_key) in ("", [], None):
                raise row.error(row_key, "not empty")


def _check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Compare tokenizer.json with the model; not through transformers, which imports for seconds.

    `megarl.data.tokenizer.check_tokenizer` checks the loaded one, of whatever format, on the ranks.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return
    vocabulary = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    token, largest = max(vocabulary.items(), key=lambda item: item[1])
    if largest >= vocab_size:
        raise DataError(
            f"{file}: token {token!r} has id {largest}, but the model's vocabulary ends at "
            f"{vocab_size - 1}; tokenizer and model do not belong together"
        )


def _check_folder(command: Command, config: RunConfig) -> None:
    used = (config.folder / "metrics.jsonl").is_file()
    if command in SAVES and used and config.resume is Resume.NEVER:
        raise ConfigError(
            f"{config.folder} holds a run already; give another name=, or resume=auto "
            "to go on with it"
        )
    if not os.access(_nearest_existing(config.folder), os.W_OK):
        raise ConfigError(f"run folder {config.folder} cannot be written")


def _nearest_existing(folder: Path) -> Path:
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def check_world_size(topology: Topology, given: int) -> None:
    """Refuse a launcher that started another number of ranks than the layouts need.

    Raises:
        ConfigError: names the ranks of each executor.
    """
    if topology.size != given:
        parts = " + ".join(f"{len(place.ranks)} {place.name}" for place in topology.places)
        if len(topology.places_of(0)) > 1:
            parts += ", trainer and generator on the same"
        raise ConfigError(
            f"the layouts need {topology.size} ranks ({parts}), the launcher gave {given}"
        )
