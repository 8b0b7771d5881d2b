"""Megatron's training on gloo ranks reproduces a dense oracle in every layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from megatron_bridge.parallel import TrainerLayout
from tests.dist.dense import (
    CLIP,
    ENTROPY,
    EPS,
    EXPERTS,
    LR,
    TEMPERATURE,
    WEIGHT_DECAY,
    Case,
    DenseStep,
    dense_logprobs,
    hf_model,
    local_weight,
    make_case,
    micro_batch,
    train_dense,
)
from tests.processes import run_ranks

pytestmark = pytest.mark.dist

SMALL_VOCAB = {"vocab_divisor": 24}  # 32 entries become 48: the second rank's end is padding


@dataclass
class Trial:
    """A layout to try: how the batch is cut, and what else is on."""

    layout: TrainerLayout
    num_micro_batches: int = 2
    distributed_optimizer: bool = False
    recompute: bool = False
    family: str = "llama"


@dataclass
class Oracle:
    cases: dict[str, Case]
    steps: dict[str, list[DenseStep]]
    logprobs: dict[str, list[torch.Tensor]]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the oracle to a file: tensors among a process's arguments take a descriptor each."""
    torch.set_num_threads(1)
    made = Oracle({}, {}, {})
    for family in ("llama", "qwen2", "qwen3", *EXPERTS):
        case = make_case(family, num_layers=2 if family in EXPERTS else 4)
        made.cases[family], made.steps[family] = case, train_dense(case, 2)
        model = hf_model(case.spec)
        model.load_state_dict(case.weights)
        with torch.no_grad():
            made.logprobs[family] = [dense_logprobs(model, t, TEMPERATURE)[0] for t in case.tokens]
    file = tmp_path_factory.mktemp("oracle") / "oracle.pt"
    torch.save(made, file)
    return file


def _read(file: Path) -> Oracle:
    return torch.load(file, weights_only=False)


def _members(trial: Trial, dp_rank: int) -> list[list[int]]:
    """Cut the 8 sequences into micro-batches of this data-parallel rank."""
    mine = list(range(dp_rank, 8, trial.layout.dp))
    return [mine[i :: trial.num_micro_batches] for i in range(trial.num_micro_batches)]


class _Session:
    """A model and trainer in one layout, holding the case's weights; closes Megatron's groups."""

    def __init__(self, trial: Trial, case: Case, rank: int, lr: float = LR, dtype: str = "float32"):
        from megatron_bridge.runtime import setup
        from megatron_bridge.runtime.model import MegatronModel, ModelSettings
        from megatron_bridge.runtime.train import MegatronTrainer, OptimizerSettings

        setup.initialize(trial.layout, seed=1)
        self.trial, self.case, self.rank = trial, case, rank
        self.at = trial.layout.coordinate(rank)
        sharded = trial.distributed_optimizer
        settings = ModelSettings(
            dtype=dtype, recompute=trial.recompute, distributed_optimizer=sharded
        )
        self.model = MegatronModel(case.spec, trial.layout, settings)
        self.trainer = MegatronTrainer(
            self.model,
            OptimizerSettings(
                lr=lr,
                adam_eps=EPS,
                weight_decay=WEIGHT_DECAY,
                clip_grad=CLIP,
                distributed_optimizer=sharded,
            ),
        )
        self.micro_batches = [micro_batch(case, m) for m in _members(trial, self.at.dp)]

    def write_weights(self) -> None:
        for name, parameter in self.model.parameters().items():
            parameter.data.copy_(self.expected(name, self.case.weights))
        self.trainer.reload_master_weights()

    def expected(self, name: str, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return local_weight(name, weights, self.case.spec, self.trial.layout, self.rank)

    def step(self, scale: float = 1.0):
        from megatron_bridge.runtime.train import LossOutputs

        def loss(outputs, batch):
            mask, weights = batch.columns["loss_mask"], batch.columns["weights"]
            entropy = (outputs.entropy * mask).sum()
            return LossOutputs(
                loss_sum=(-(outputs.logprobs * weights).sum() - ENTROPY * entropy) * scale,
                num_tokens=mask.sum(),
                sums={"entropy": entropy.detach()},
                maxima={"longest": batch.lengths.max()},
            )

        return self.trainer.train_step(
            self.micro_batches, loss, temperature=TEMPERATURE, entropy=True
        )

    def check_step(self, expected: DenseStep) -> None:
        found = self.step()
        where = f"{self.trial} rank {self.rank}"
        assert found.loss == pytest.approx(expected.loss, rel=1e-5), where
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5), where
        assert found.num_tokens == expected.num_tokens, where
        assert found.sums["entropy"] == pytest.approx(expected.entropy_sum, rel=1e-5), where
        assert found.maxima == {"longest": 40.0}, where
        assert found.lr == LR, where

    def check_weights(self, weights: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.model.parameters().items():
            torch.testing.assert_close(
                parameter.detach(),
                self.expected(name, weights),
                atol=2e-5,
                rtol=0,
                msg=lambda text, name=name: f"{name}, {self.trial}, rank {self.rank}: {text}",
            )

    def check_logprobs(self, expected: list[torch.Tensor]) -> None:
        found = self.model.logprobs(self.micro_batches, TEMPERATURE)
        on_last_stage = self.at.pp == self.trial.layout.pp - 1
        assert (found is not None) == on_last_stage
        for logprobs, members in zip(found or [], _members(self.trial, self.at.dp), strict=False):
            wanted = torch.cat([expected[i] for i in members]).float()
            torch.testing.assert_close(logprobs, wanted, atol=1e-5, rtol=0)

    def close(self) -> None:
        from megatron_bridge.runtime import setup

        setup.destroy()


def _train_two_steps(rank: int, size: int, trials: list[Trial], file: Path) -> int:
    oracle = _read(file)
    for trial in trials:
        session = _Session(trial, oracle.cases[trial.family], rank)
        session.write_weights()
        session.check_logprobs(oracle.logprobs[trial.family])
        for expected in oracle.steps[trial.family]:
            session.check_step(expected)
        session.check_weights(oracle.steps[trial.family][-1].weights)
        session.close()
    return len(trials)


ONE_RANK = TrainerLayout(**SMALL_VOCAB)
ALONE = [
    Trial(ONE_RANK, 1),
    Trial(ONE_RANK, 3, recompute=True),
    Trial(ONE_RANK, distributed_optimizer=True),
    Trial(ONE_RANK, family="qwen2"),
    Trial(ONE_RANK, family="qwen3"),
    *(Trial(ONE_RANK, family=family) for family in EXPERTS),
]
TP2_SP = TrainerLayout(tp=2, sequence_parallel=True, **SMALL_VOCAB)
EP2 = TrainerLayout(dp=2, ep=2, **SMALL_VOCAB)
TWO = [
    Trial(TrainerLayout(tp=2, **SMALL_VOCAB)),
    Trial(TP2_SP),
    Trial(TP2_SP, recompute=True, family="qwen3"),
    Trial(TrainerLayout(pp=2, **SMALL_VOCAB), 3),
    Trial(TrainerLayout(pp=2, **SMALL_VOCAB), family="qwen2"),
    Trial(TrainerLayout(pp=2, vpp=2, **SMALL_VOCAB), 3),
    Trial(TrainerLayout(pp=2, num_layers_in_first_stage=3, **SMALL_VOCAB)),
    Trial(TrainerLayout(pp=2, num_layers_in_last_stage=3, **SMALL_VOCAB), family="qwen3"),
    Trial(TrainerLayout(dp=2, **SMALL_VOCAB)),
    Trial(TrainerLayout(dp=2, **SMALL_VOCAB), distributed_optimizer=True, family="qwen2"),
    Trial(EP2, family="mixtral"),
    Trial(EP2, family="qwen3_moe", distributed_optimizer=True, recompute=True),
    Trial(replace(TP2_SP, etp=2), family="mixtral"),
    Trial(TP2_SP, family="qwen3_moe"),  # experts are alike on both ranks, their tokens are not
]
FOUR = [
    Trial(TrainerLayout(tp=2, pp=2, sequence_parallel=True, **SMALL_VOCAB)),
    Trial(TrainerLayout(tp=2, pp=2, **SMALL_VOCAB), family="qwen2", distributed_optimizer=True),
    Trial(TrainerLayout(tp=2, dp=2, **SMALL_VOCAB), distributed_optimizer=True),
    Trial(replace(EP2, pp=2), family="qwen3_moe"),
    Trial(replace(TP2_SP, dp=2, ep=2), family="mixtral", distributed_optimizer=True),
    Trial(replace(TP2_SP, dp=2, ep=2), family="qwen3_moe"),
]


@pytest.mark.parametrize(("size", "trials"), [(1, ALONE), (2, TWO), (4, FOUR)])
def test_every_layout_reproduces_the_dense_steps(
    size: int, trials: list[Trial], oracle: Path
) -> None:
    assert run_ranks(_train_two_steps, size, trials, oracle) == [len(trials)] * size


def _bits(session: _Session) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in session.model.parameters().items()}


def _check_untouched(session: _Session, act: Callable[[], object]) -> None:
    before = _bits(session)
    act()
    for name, parameter in session.model.parameters().items():
        assert torch.equal(parameter, before[name]), f"{name}, {session.trial}"


def _special_steps(rank: int, size: int, file: Path) -> float:
    from megatron_bridge.runtime.train import NonFiniteGradients

    oracle = _read(file)
    case = oracle.cases["llama"]
    plain = Trial(TrainerLayout(dp=2, **SMALL_VOCAB))
    sharded = Trial(TrainerLayout(dp=2, **SMALL_VOCAB), distributed_optimizer=True)
    for trial in (plain, sharded):
        for dtype in ("float32", "bfloat16"):
            session = _Session(trial, case, rank, lr=0.0, dtype=dtype)
            session.write_weights()
            _check_untouched(session, session.step)  # learning rate 0
            session.close()

    session = _Session(sharded, case, rank)
    session.write_weights()

    def overflow() -> None:
        with pytest.raises(NonFiniteGradients, match="gradient norm is") as caught:
            session.step(scale=float("inf"))
        assert not torch.isfinite(torch.tensor(caught.value.result.grad_norm))

    _check_untouched(session, overflow)
    session.check_step(oracle.steps["llama"][0])  # nothing of it is left
    session.close()

    session = _Session(Trial(TP2_SP), case, rank, dtype="bfloat16")
    session.write_weights()
    losses = [session.step().loss for _ in range(2)]
    session.close()
    wanted = oracle.steps["llama"]
    assert losses == pytest.approx([step.loss for step in wanted], rel=0.03)
    return losses[1]


def test_steps_at_learning_rate_zero_or_with_infinite_gradients_leave_weights_alone(
    oracle: Path,
) -> None:
    first, second = run_ranks(_special_steps, 2, oracle)
    assert first == second


RESHARDED = [
    (Trial(TrainerLayout(tp=2, **SMALL_VOCAB)), Trial(TrainerLayout(tp=2, **SMALL_VOCAB))),
    (Trial(TP2_SP), Trial(TrainerLayout(pp=2, vpp=2, **SMALL_VOCAB))),
    (
        Trial(TrainerLayout(dp=2, **SMALL_VOCAB), distributed_optimizer=True),
        Trial(TrainerLayout(tp=2, **SMALL_VOCAB), distributed_optimizer=True),
    ),
    (
        Trial(TrainerLayout(pp=2, **SMALL_VOCAB), family="qwen2", distributed_optimizer=True),
        Trial(TrainerLayout(dp=2, **SMALL_VOCAB), family="qwen2", distributed_optimizer=True),
    ),
    (Trial(EP2, family="mixtral"), Trial(TrainerLayout(dp=2, **SMALL_VOCAB), family="mixtral")),
    (
        Trial(replace(EP2, ep=1), family="qwen3_moe", distributed_optimizer=True),
        Trial(EP2, family="qwen3_moe", distributed_optimizer=True),
    ),
]


def _save_and_load(rank: int, size: int, folder: Path, file: Path) -> int:
    from megatron_bridge.runtime import checkpoint

    oracle = _read(file)
    for number, (source, target) in enumerate(RESHARDED):
        case, steps = oracle.cases[source.family], oracle.steps[source.family]
        session = _Session(source, case, rank)
        session.write_weights()
        session.check_step(steps[0])
        checkpoint.save(folder / str(number), session.trainer)
        session.close()

        session = _Session(target, case, rank)
        checkpoint.load(folder / str(number), session.trainer)
        session.check_weights(steps[0].weights)
        session.check_step(steps[1])
        session.check_weights(steps[1].weights)
        session.close()

        session = _Session(target, case, rank, lr=LR / 4)
        checkpoint.load(folder / str(number), session.trainer)
        assert session.step().lr == LR / 4  # the settings' learning rate, not the checkpoint's
        assert session.trainer.scheduler.num_steps == 2
        session.close()
    return len(RESHARDED)


def test_a_checkpoint_goes_on_at_another_layout(tmp_path: Path, oracle: Path) -> None:
    assert run_ranks(_save_and_load, 2, tmp_path, oracle) == [len(RESHARDED)] * 2
