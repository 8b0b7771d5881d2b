"""Reading a configuration: YAML over the dataclasses, dotted overrides, every early error.

A key that no dataclass has is an error that names the nearest key. Called by the command line, by
each rank and by planning tools; imports no torch.
"""

from __future__ import annotations

import difflib
from dataclasses import fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import cast, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.config import (
    AdvantageEstimator,
    AlgorithmConfig,
    Overlong,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from megarl.errors import ConfigError


def load_config(path: str | Path, overrides: tuple[str, ...] = ()) -> RunConfig:
    """Read a YAML file over `RunConfig`'s defaults and apply ``a.b=c`` overrides.

    Raises:
        ConfigError: missing file, unknown key (names the nearest), wrong type, value out of range.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"config file {file} does not exist")
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"override {override!r} is not of the form key=value")
    # `key=` is the empty text, not YAML's null, which no key takes.
    dotted = [f"{item}''" if item.endswith("=") else item for item in overrides]
    try:
        layers = [OmegaConf.load(file), OmegaConf.from_dotlist(dotted)]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{file} is not readable YAML: {error}") from error
    for layer, where in zip(layers, (str(file), "command line"), strict=True):
        given = OmegaConf.to_container(layer)
        if given is not None and not isinstance(given, dict):
            raise ConfigError(f"{where}: expected a mapping of keys, got {type(given).__name__}")
        _refuse_unknown_keys(cast(dict[str, object], given or {}), RunConfig, where, "")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), *layers)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "?"
        raise ConfigError(f"{file}: {key}: {str(error).splitlines()[0]}") from error
    assert isinstance(config, RunConfig)
    validate(config)
    return config


def to_yaml(config: RunConfig) -> str:
    """Return the resolved configuration as YAML, as it is written beside the run."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=False)
    return yaml.safe_dump(_without_enums(plain), sort_keys=False)


def _without_enums(node: object) -> object:
    if isinstance(node, dict):
        items = cast(dict[str, object], node)
        return {key: _without_enums(value) for key, value in items.items()}
    return str(node.value) if isinstance(node, StrEnum) else node


def schema_rows(schema: type, prefix: str = "") -> list[tuple[str, str, object]]:
    """Return (dotted key, type name, default) of every leaf key, in order."""
    rows: list[tuple[str, str, object]] = []
    hints: dict[str, object] = get_type_hints(schema)
    defaults = schema()
    for item in fields(schema):
        kind = hints[item.name]
        value = getattr(defaults, item.name)
        if is_dataclass(value):
            rows += schema_rows(type(value), f"{prefix}{item.name}.")
        else:
            name = kind.__name__ if isinstance(kind, type) else str(kind)
            rows.append((f"{prefix}{item.name}", name, value))
    return rows


def _refuse_unknown_keys(given: dict[str, object], schema: type, where: str, prefix: str) -> None:
    hints = get_type_hints(schema)
    for key, value in given.items():
        if key not in hints:
            known = [row[0] for row in schema_rows(RunConfig)] + list(hints)
            near = difflib.get_close_matches(f"{prefix}{key}", known, n=1, cutoff=0.5)
            near = near or difflib.get_close_matches(str(key), known, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{where}: unknown key {prefix + str(key)!r}{hint}")
        if is_dataclass(hints[key]):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}: {prefix}{key} must be a mapping, got {value!r}")
            inner = cast(dict[str, object], value)
            _refuse_unknown_keys(inner, hints[key], where, f"{prefix}{key}.")


def _require(condition: bool, key: str, got: object, expected: str) -> None:
    if not condition:
        raise ConfigError(f"{key} must be {expected}, got {got!r}")


def validate(config: RunConfig) -> None:
    """Check every rule that needs no file; `megarl.train` checks the rest.

    Raises:
        ConfigError: names the key, its value and what was expected.
    """
    _validate_layouts(config)
    _validate_trainer(config.trainer)
    _validate_schedule(config)
    for key in ("dtype", "generator_dtype"):
        value = getattr(config.model, key)
        allowed = ("float32", "bfloat16") + (("",) if key == "generator_dtype" else ())
        _require(value in allowed, f"model.{key}", value, "float32 or bfloat16")
    _require(config.max_steps >= 1, "max_steps", config.max_steps, "at least 1")
    _require(config.max_staleness >= 0, "max_staleness", config.max_staleness, "at least 0")
    _require(
        config.data.train_batch_size >= 1,
        "data.train_batch_size",
        config.data.train_batch_size,
        "at least 1",
    )
    for key, value in (
        ("reward.num_processes", config.reward.num_processes),
        ("reward.timeout_seconds", config.reward.timeout_seconds),
        ("fault.timeout_seconds", config.fault.timeout_seconds),
        ("generator.kv_cache_gib", config.generator.kv_cache_gib),
        ("weights.slots", config.weights.slots),
        ("weights.chunk_mib", config.weights.chunk_mib),
        ("weights.message_mib", config.weights.message_mib),
    ):
        _require(value > 0, key, value, "above 0")
    for key in ("max_restarts", "max_logprob_error", "mean_logprob_error"):
        value = getattr(config.fault, key)
        _require(value >= 0, f"fault.{key}", value, "at least 0")
    _validate_sync(config)
    _validate_rollout(config.rollout)
    _validate_algorithm(config.algorithm, config.rollout.n)


def _validate_sync(config: RunConfig) -> None:
    every, bound, freq = config.weights.sync_every, config.staleness_bound, config.eval.test_freq
    _require(every >= 1, "weights.sync_every", every, "at least 1")
    _require(
        bound >= every - 1,
        "max_staleness",
        bound,
        f"at least {every - 1} for weights.sync_every={every} (mode=sync makes it 0): just before a "
        f"transfer the generators are {every - 1} versions behind, and with less nothing that they "
        "may start could complete the batch to train",
    )
    _require(
        freq % every == 0,
        "eval.test_freq",
        freq,
        f"a multiple of weights.sync_every={every}: generators hold no other versions to evaluate",
    )


def _validate_rollout(rollout: RolloutConfig) -> None:
    _require(rollout.n >= 1, "rollout.n", rollout.n, "at least 1")
    _require(rollout.temperature > 0, "rollout.temperature", rollout.temperature, "above 0")
    _require(
        rollout.top_p == 1.0 and rollout.top_k in (-1, 0),
        "rollout.top_p / rollout.top_k",
        (rollout.top_p, rollout.top_k),
        "1.0 / -1 in training: a truncated distribution is renormalised over the kept tokens, "
        "so mu would not be the probability that the trainer's pi is compared with and every "
        "importance ratio would carry the kept mass",
    )
    _require(
        rollout.max_response_length >= 1,
        "rollout.max_response_length",
        rollout.max_response_length,
        "at least 1",
    )
    _require(
        rollout.max_oversample >= 1, "rollout.max_oversample", rollout.max_oversample, "at least 1"
    )
    _require(
        rollout.overlong is not Overlong.PENALTY
        or 1 <= rollout.overlong_buffer <= rollout.max_response_length,
        "rollout.overlong_buffer",
        rollout.overlong_buffer,
        f"in 1..{rollout.max_response_length} for rollout.overlong=penalty",
    )


def _validate_algorithm(algorithm: AlgorithmConfig, num_samples: int) -> None:
    _require(algorithm.rho > 0, "algorithm.rho", algorithm.rho, "above 0")
    _require(
        algorithm.adv_estimator != AdvantageEstimator.LEAVE_ONE_OUT or num_samples > 1,
        "rollout.n",
        num_samples,
        "at least 2 for algorithm.adv_estimator=leave_one_out",
    )
    _require(
        algorithm.adv_estimator != AdvantageEstimator.NONE or not algorithm.norm_adv_by_std,
        "algorithm.norm_adv_by_std",
        True,
        "false where algorithm.adv_estimator is none: there is no group statistic to divide by",
    )
    _require(algorithm.kl_loss_coef >= 0, "algorithm.kl_loss_coef", algorithm.kl_loss_coef, ">= 0")


def _validate_layouts(config: RunConfig) -> None:
    layout = config.trainer.layout
    for item in ("tp", "pp", "dp", "cp", "ep", "etp", "vpp", "vocab_divisor"):
        value = getattr(layout, item)
        _require(value >= 1, f"trainer.layout.{item}", value, "at least 1")
    _require(
        not layout.sequence_parallel or layout.tp > 1,
        "trainer.layout.sequence_parallel",
        True,
        "false where trainer.layout.tp is 1",
    )
    _require(
        layout.vpp == 1 or layout.pp > 1,
        "trainer.layout.vpp",
        layout.vpp,
        "1 where trainer.layout.pp is 1",
    )
    _require(
        layout.dp * layout.cp % layout.ep == 0 or layout.ep == 1,
        "trainer.layout.ep",
        layout.ep,
        f"a divisor of dp x cp = {layout.dp * layout.cp}",
    )
    for item in ("tp", "pp", "replicas"):
        value = getattr(config.generator.layout, item)
        _require(value >= 1, f"generator.layout.{item}", value, "at least 1")
    if config.is_colocated:
        _validate_colocated(config)


def _validate_colocated(config: RunConfig) -> None:
    _require(
        config.staleness_bound == 0,
        "mode",
        config.mode.value,
        "sync (or max_staleness 0) for placement=colocated: trainer and generators take turns",
    )
    trainer, generator = config.trainer.layout.world_size, config.generator.layout.world_size
    _require(
        trainer == generator,
        "generator.layout",
        generator,
        f"of {trainer} ranks, as the trainer's, for placement=colocated: each rank is both",
    )
    _require(
        config.generator.enforce_eager,
        "generator.enforce_eager",
        False,
        "true for placement=colocated: CUDA graphs would not find the KV cache of an engine that slept",
    )


def _validate_schedule(config: RunConfig) -> None:
    trainer, steps = config.trainer, config.max_steps * config.trainer.updates_per_batch
    _require(
        trainer.lr_warmup_steps >= 0, "trainer.lr_warmup_steps", trainer.lr_warmup_steps, ">= 0"
    )
    _require(
        trainer.lr_decay_style == "constant" or trainer.lr_warmup_steps < steps,
        "trainer.lr_warmup_steps",
        trainer.lr_warmup_steps,
        f"below the run's {steps} optimizer steps, with which {trainer.lr_decay_style} decay ends",
    )


def _validate_trainer(trainer: TrainerConfig) -> None:
    styles = ("constant", "linear", "cosine")
    _require(
        trainer.lr_decay_style in styles,
        "trainer.lr_decay_style",
        trainer.lr_decay_style,
        " or ".join(styles),
    )
    _require(trainer.lr >= 0, "trainer.lr", trainer.lr, ">= 0")
    _require(
        0 <= trainer.min_lr_ratio <= 1, "trainer.min_lr_ratio", trainer.min_lr_ratio, "in 0..1"
    )
    _require(trainer.clip_grad >= 0, "trainer.clip_grad", trainer.clip_grad, ">= 0")
    _require(
        trainer.max_tokens_per_micro_batch >= 1,
        "trainer.max_tokens_per_micro_batch",
        trainer.max_tokens_per_micro_batch,
        "at least 1",
    )
    _require(
        trainer.updates_per_batch >= 1,
        "trainer.updates_per_batch",
        trainer.updates_per_batch,
        "at least 1",
    )
