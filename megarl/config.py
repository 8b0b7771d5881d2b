"""Every configuration of megarl: frozen dataclasses, which `megarl.config_file` fills from YAML.

Nothing mutates a config; derived values are properties. The comment behind a field is its line in `docs/config.md`.
Imports no torch: a bad configuration is refused before any engine is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from megatron_bridge.parallel import GeneratorLayout, TrainerLayout

MIN_BATCHED_TOKENS = 8192  # prompt tokens prefilled in one step; vLLM's own default on GPUs


class Mode(StrEnum):
    """async: trainer and generators at the same time; sync: in turns, as with max_staleness 0."""

    ASYNC = "async"
    SYNC = "sync"


class Placement(StrEnum):
    """separate: trainer and generators on ranks of their own; colocated: on the same, in turns."""

    SEPARATE = "separate"
    COLOCATED = "colocated"


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


class PartialKv(StrEnum):
    """What becomes of the KV cache of unfinished responses when new weights come."""

    KEEP = "keep"
    RECOMPUTE = "recompute"


class StalePolicy(StrEnum):
    """Of a group that is due and unfinished while a batch of others is complete."""

    WAIT = "wait"
    DROP = "drop"
    REGENERATE = "regenerate"


class Overlong(StrEnum):
    """Of responses that are cut or nearly: as any other, no loss, or a lower reward."""

    KEEP = "keep"
    MASK = "mask"
    PENALTY = "penalty"


class WeightTransport(StrEnum):
    """ipc: into the receiver's memory on one host, messages between hosts; auto: where it helps."""

    AUTO = "auto"
    COLLECTIVE = "collective"
    IPC = "ipc"


class WeightForwarding(StrEnum):
    """Whether generators pass weights on; auto: as `weights.cluster`, or the numbers of ranks, say."""

    AUTO = "auto"
    NONE = "none"
    RING = "ring"
    SPREAD = "spread"


class Verify(StrEnum):
    """How much of each region the checksums after a weight transfer read."""

    NONE = "none"
    SAMPLED = "sampled"
    FULL = "full"


class Resume(StrEnum):
    AUTO = "auto"
    NEVER = "never"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: str = ""  # Hugging Face folder: config.json, safetensors, tokenizer
    dtype: str = "float32"  # compute dtype of the trainer: float32 or bfloat16
    generator_dtype: str = ""  # dtype of the generators' weights; empty: as the trainer's
    drop_mtp: bool = False  # leave out layers that predict further tokens: they cannot be trained
    architecture: str = ""  # where model.path is not at hand: a config.json, or of configs/models


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    layout: TrainerLayout = field(default_factory=TrainerLayout)  # parallel layout of the trainer
    lr: float = 1e-6  # peak learning rate
    min_lr_ratio: float = 1.0  # last learning rate as a share of the peak
    lr_decay_style: str = "constant"  # constant, linear or cosine
    lr_warmup_steps: int = 0  # optimizer steps of linear warm-up
    weight_decay: float = 0.0  # AdamW weight decay
    adam_beta1: float = 0.9  # AdamW first moment decay
    adam_beta2: float = 0.999  # AdamW second moment decay
    adam_eps: float = 1e-8  # AdamW epsilon
    clip_grad: float = 1.0  # global gradient norm limit; 0 for none
    distributed_optimizer: bool = False  # shard optimizer states over data-parallel ranks
    max_tokens_per_micro_batch: int = 4096  # token budget of one packed micro-batch
    recompute: bool = False  # recompute activations in the backward pass
    updates_per_batch: int = 1  # optimizer steps a batch, each on its own share of it


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig:
    layout: GeneratorLayout = field(default_factory=GeneratorLayout)  # engines and their tp
    max_running_sequences: int = 256  # sequences decoded together in one replica
    kv_cache_gib: float = 0.0625  # KV cache memory of one rank
    enforce_eager: bool = True  # no CUDA graphs
    prefix_caching: bool = True  # reuse KV blocks of common prompt prefixes


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    transport: WeightTransport = WeightTransport.AUTO  # auto, collective or ipc
    forwarding: WeightForwarding = WeightForwarding.AUTO  # auto, none, ring or spread
    verify: Verify = Verify.SAMPLED  # none, sampled or full: checksums of each transfer
    slots: int = 2  # rounds of messages in flight on a rank
    chunk_mib: float = 72.0  # memory of one round
    message_mib: float = 32.0  # largest message
    sync_every: int = 1  # batches from one transfer to the next: see docs/async.md
    cluster: str = ""  # YAML file of link speeds, for predictions and weights.forwarding=auto


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    n: int = 8  # samples a prompt
    temperature: float = 1.0  # sampling temperature
    top_p: float = 1.0  # must be 1 in training: see docs/algorithms.md
    top_k: int = -1  # must be -1 in training: see docs/algorithms.md
    max_response_length: int = 1024  # longest response in tokens
    stale_policy: StalePolicy = StalePolicy.WAIT  # wait, drop or regenerate: see docs/async.md
    dynamic_sampling: bool = False  # leave out prompts whose samples all earn the same
    max_oversample: float = 3.0  # batches of prompts started for one because of that, at most
    overlong: Overlong = Overlong.KEEP  # cut responses: keep, mask (no loss) or penalty
    overlong_buffer: int = 0  # penalty: last tokens over which the reward falls by 1
    partial_kv: PartialKv = PartialKv.RECOMPUTE  # KV of unfinished responses when new weights come


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
    keep_last: int = 0  # newest checkpoints that stay; 0: all stay
    keep_best: int = 0  # with keep_last: also so many of the best held-out accuracy
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
    record: bool = False  # write each batch into batches/, for `megarl replay`


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    timeout_seconds: float = 600.0  # longest wait for a peer, longest silence: docs/faults.md
    max_restarts: int = 0  # the launcher's new starts in a row without a newer checkpoint
    max_logprob_error: float = 0.0  # trainer to generator, at the start; 0: see docs/doctor.md
    mean_logprob_error: float = 0.0  # the same, mean over tokens; 0: see docs/doctor.md


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run of `megarl train` (and, without generators, of `megarl sft`)."""

    name: str = "run"  # the run folder is run_dir/name
    run_dir: str = "runs"  # where run folders lie
    seed: int = 0  # seed of data order and sampling
    mode: Mode = Mode.ASYNC  # async or sync
    placement: Placement = Placement.SEPARATE  # separate or colocated: see docs/async.md
    max_staleness: int = 1  # versions between a token's policy and the one it trains; 0: on-policy
    max_steps: int = 100  # batches to train on, trainer.updates_per_batch optimizer steps each
    resume: Resume = Resume.NEVER  # auto: go on from the newest checkpoint where there is one
    replay_from: str = ""  # folder of the recorded run (replay only): see docs/async.md
    model: ModelConfig = field(default_factory=ModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
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
    def staleness_bound(self) -> int:
        """`max_staleness`, which mode=sync makes 0."""
        return 0 if self.mode is Mode.SYNC else self.max_staleness

    @property
    def is_colocated(self) -> bool:
        return self.placement is Placement.COLOCATED

    @property
    def first_generator_rank(self) -> int:
        """The trainer's ranks come before, where they are not the same."""
        return 0 if self.is_colocated else self.trainer.layout.world_size

    @property
    def num_engine_ranks(self) -> int:
        """Ranks that hold weights: all but the reward executor's."""
        return self.first_generator_rank + self.generator.layout.world_size

    @property
    def generator_dtype(self) -> str:
        return self.model.generator_dtype or self.model.dtype
