"""Every configuration of megarl: frozen dataclasses over YAML, dotted overrides, early errors.

A key that no dataclass has is an error that names the nearest key. Nothing mutates a config;
derived values are properties. The comment behind a field is its line in `docs/config.md`.
Imports no torch: a bad configuration is refused before any engine is imported.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import cast, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.errors import ConfigError
from megatron_bridge.parallel import GeneratorLayout, TrainerLayout


class Mode(StrEnum):
    """async: trainer and generators at the same time, one version apart; sync: in turns."""

    ASYNC = "async"
    SYNC = "sync"


class PolicyLoss(StrEnum):
    AIPO = "aipo"
    PPO = "ppo"
    GRPO = "grpo"


class AdvantageEstimator(StrEnum):
    GROUP_MEAN = "group_mean"
    LEAVE_ONE_OUT = "leave_one_out"
    NONE = "none"


class KLEstimator(StrEnum):
    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class Resume(StrEnum):
    AUTO = "auto"
    NEVER = "never"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: str = ""  # Hugging Face folder: config.json, safetensors, tokenizer
    dtype: str = "float32"  # compute dtype of the trainer: float32 or bfloat16
    generator_dtype: str = ""  # dtype of the generators' weights; empty: as the trainer's


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    layout: TrainerLayout = field(default_factory=TrainerLayout)  # parallel layout of the trainer
    lr: float = 1e-6  # peak learning rate
    min_lr_ratio: float = 1.0  # last learning rate as a share of the peak
    lr_decay_style: str = "constant"  # constant, linear or cosine
    lr_warmup_steps: int = 0  # steps of linear warm-up
    weight_decay: float = 0.0  # AdamW weight decay
    adam_beta1: float = 0.9  # AdamW first moment decay
    adam_beta2: float = 0.999  # AdamW second moment decay
    adam_eps: float = 1e-8  # AdamW epsilon
    clip_grad: float = 1.0  # global gradient norm limit; 0 for none
    distributed_optimizer: bool = False  # shard optimizer states over data-parallel ranks
    max_tokens_per_micro_batch: int = 4096  # token budget of one packed micro-batch
    recompute: bool = False  # recompute activations in the backward pass


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig:
    layout: GeneratorLayout = field(default_factory=GeneratorLayout)  # engines and their tp
    max_running_sequences: int = 256  # sequences decoded together in one replica
    kv_cache_gib: float = 0.0625  # KV cache memory of one rank
    enforce_eager: bool = True  # no CUDA graphs
    prefix_caching: bool = True  # reuse KV blocks of common prompt prefixes


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    n: int = 8  # samples a prompt
    temperature: float = 1.0  # sampling temperature
    top_p: float = 1.0  # must be 1 in training: see docs/algorithms.md
    top_k: int = -1  # must be -1 in training: see docs/algorithms.md
    max_response_length: int = 1024  # longest response in tokens


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    train_path: str = ""  # jsonl of prompts to train on
    eval_path: str = ""  # jsonl of held-out prompts; empty for none
    prompt_key: str = "prompt"  # key of the prompt: a string or a list of chat messages
    answer_key: str = "answer"  # key of the reference answer
    response_key: str = "response"  # key of the demonstration (sft only)
    train_batch_size: int = 64  # prompts a step (sft: demonstrations a step)
    max_prompt_length: int = 1024  # longest prompt in tokens; a longer one is an error
    shuffle: bool = True  # shuffle at each epoch, by seed


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    policy_loss: PolicyLoss = PolicyLoss.AIPO  # aipo, ppo or grpo: see docs/algorithms.md
    rho: float = 4.0  # AIPO: upper bound of the importance ratio pi / mu
    clip_ratio_low: float = 0.2  # ppo and grpo: lower clip
    clip_ratio_high: float = 0.2  # ppo and grpo: upper clip
    adv_estimator: AdvantageEstimator = AdvantageEstimator.GROUP_MEAN  # baseline of a group
    norm_adv_by_std: bool = False  # divide advantages by the group's standard deviation
    kl_loss_coef: float = 0.0  # weight of the KL to the frozen starting model; 0: no reference
    kl_loss_type: KLEstimator = KLEstimator.K3  # k1, k2 or k3 estimator
    entropy_coeff: float = 0.0  # weight of the entropy bonus


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    path: str = "megarl.rewards.arithmetic:score"  # module:function or file.py:function
    timeout_seconds: float = 10.0  # a response whose scoring takes longer scores 0
    num_processes: int = 1  # scoring processes


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    save_freq: int = 0  # steps between checkpoints; 0: only at the end
    export_hf: bool = True  # write the final model as a Hugging Face folder


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    test_freq: int = 0  # steps between evaluations on data.eval_path; 0: only first and last
    n: int = 1  # samples a held-out prompt, at rollout.temperature


@dataclass(frozen=True, kw_only=True)
class ObserveConfig:
    tensorboard: bool = False  # write TensorBoard events beside metrics.jsonl
    wandb_project: str = ""  # Weights & Biases project; empty for none
    trace: bool = True  # write trace.json for Perfetto
    peak_tflops: float = 0.0  # peak of one trainer rank in TFLOP/s, for perf/mfu; 0: not reported


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    timeout_seconds: float = 600.0  # longest wait for a peer before the job ends


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run of `megarl train` (and, without generators, of `megarl sft`)."""

    name: str = "run"  # the run folder is run_dir/name
    run_dir: str = "runs"  # where run folders lie
    seed: int = 0  # seed of data order and sampling
    mode: Mode = Mode.ASYNC  # async or sync
    max_steps: int = 100  # optimizer steps
    resume: Resume = Resume.NEVER  # auto: go on from the newest checkpoint where there is one
    model: ModelConfig = field(default_factory=ModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)

    @property
    def folder(self) -> Path:
        return Path(self.run_dir) / self.name

    @property
    def generator_dtype(self) -> str:
        return self.model.generator_dtype or self.model.dtype


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
    for key in ("dtype", "generator_dtype"):
        value = getattr(config.model, key)
        allowed = ("float32", "bfloat16") + (("",) if key == "generator_dtype" else ())
        _require(value in allowed, f"model.{key}", value, "float32 or bfloat16")
    _require(config.max_steps >= 1, "max_steps", config.max_steps, "at least 1")
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
    ):
        _require(value > 0, key, value, "above 0")
    _validate_rollout(config.rollout)
    _validate_algorithm(config.algorithm, config.rollout.n)


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
    for item in ("tp", "replicas"):
        value = getattr(config.generator.layout, item)
        _require(value >= 1, f"generator.layout.{item}", value, "at least 1")


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
