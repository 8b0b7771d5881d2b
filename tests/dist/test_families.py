"""Mixtures with shared experts and latent attention: Megatron's runtime against transformers.

Each rank's names, shapes and weights are those of the layouts' dense oracle.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_bridge.errors import LayoutError, PlanError
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.spec import LatentAttention, ModelSpec
from tests.dist.dense import (
    TEMPERATURE,
    Weights,
    dense_logprobs,
    hf_model,
    make_case_of,
    train_dense,
)
from tests.dist.test_runtime import SMALL_VOCAB, Oracle, Trial, _Session
from tests.processes import run_ranks
from tests.unit.megatron_bridge.oracle import Tensors, make_spec, megatron_tensors

pytestmark = pytest.mark.dist

SIZES: dict = {
    "vocab_size": 32,
    "hidden_size": 64,
    "ffn_size": 96,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 4,
    "norm_eps": 1e-6,
    "num_experts": 8,
    "moe_ffn_size": 32,
    "shared_ffn_size": 32,
}
MLA = LatentAttention(
    q_lora_rank=24, kv_lora_rank=28, nope_head_dim=16, rope_head_dim=8, v_head_dim=12
)
YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "mscale": 0.707,
    "mscale_all_dim": 1.2,
    "original_max_position_embeddings": 16.0,
}
DEEPSEEK: dict = {
    **SIZES,
    "mla": MLA,
    "head_dim": 24,
    "first_dense_layers": 1,
    "num_expert_groups": 4,
    "groups_per_token": 2,
    "rope_scaling": tuple(YARN.items()),
}
SPECS = {
    "qwen2_moe": make_spec(
        **{**SIZES, "num_kv_heads": 2, "ffn_size": 128},
        family="qwen2_moe",
        head_dim=16,
        qkv_bias=True,
        experts_per_token=3,
        shared_switch=True,
    ),
    # three of eight experts from two of four groups: Megatron's own rule would choose others
    "deepseek_v2": make_spec(
        **{**DEEPSEEK, "shared_ffn_size": 64},
        family="deepseek_v2",
        experts_per_token=3,
        group_score_experts=1,
        routed_scale=3.0,
    ),
    "deepseek_v2_lite": make_spec(
        **{
            **DEEPSEEK,
            "mla": LatentAttention(
                q_lora_rank=None, kv_lora_rank=28, nope_head_dim=16, rope_head_dim=8, v_head_dim=12
            ),
            "num_expert_groups": 1,
            "groups_per_token": 1,
            "rope_scaling": (),
        },
        family="deepseek_v2",
        experts_per_token=2,
    ),
    "deepseek_v3": make_spec(
        **DEEPSEEK,
        family="deepseek_v3",
        experts_per_token=3,
        group_score_experts=2,
        sigmoid_scores=True,
        router_bias=True,
        norm_topk=True,
        routed_scale=2.5,
    ),
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    made = Oracle({}, {}, {})
    for name, spec in SPECS.items():
        case = make_case_of(spec)
        made.cases[name], made.steps[name] = case, train_dense(case, 2)
        model = hf_model(spec)
        model.load_state_dict(case.weights)
        with torch.no_grad():
            made.logprobs[name] = [dense_logprobs(model, t, TEMPERATURE)[0] for t in case.tokens]
    file = tmp_path_factory.mktemp("oracle") / "oracle.pt"
    torch.save(made, file)
    return file


def _as_saved(weights: Weights) -> Tensors:
    """Give the stacked experts of transformers' memory the names of its files."""
    whole: Tensors = {}
    for name, tensor in weights.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                at = name.replace("gate_up_proj", str(expert))
                whole[f"{at}.gate_proj.weight"], whole[f"{at}.up_proj.weight"] = both.chunk(2)
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                whole[f"{name.replace('down_proj', str(expert))}.down_proj.weight"] = down
        else:
            whole[name] = tensor
    return whole


class _FamilySession(_Session):
    def expected_all(self, weights: Weights) -> Tensors:
        layout, spec = self.trial.layout, self.case.spec
        size = spec.num_layers // layout.pp
        stages = [list(range(pp * size, (pp + 1) * size)) for pp in range(layout.pp)]
        return megatron_tensors(spec, _as_saved(weights), layout, stages)[self.rank]

    def expected(self, name: str, weights: Weights) -> torch.Tensor:
        return self.expected_all(weights)[name]

    def check_names(self) -> None:
        found = {name: tuple(tensor.shape) for name, tensor in self.model.parameters().items()}
        wanted = self.expected_all(self.case.weights)
        assert found == {name: tuple(tensor.shape) for name, tensor in wanted.items()}


def _train_two_steps(rank: int, size: int, trials: list[Trial], file: Path) -> int:
    oracle = torch.load(file, weights_only=False)
    for trial in trials:
        session = _FamilySession(trial, oracle.cases[trial.family], rank)
        session.check_names()
        session.write_weights()
        session.check_logprobs(oracle.logprobs[trial.family])
        for expected in oracle.steps[trial.family]:
            session.check_step(expected)
        session.check_weights(oracle.steps[trial.family][-1].weights)
        session.close()
    return len(trials)


ONE_RANK = TrainerLayout(**SMALL_VOCAB)
TP2 = TrainerLayout(tp=2, sequence_parallel=True, **SMALL_VOCAB)
EP2 = TrainerLayout(dp=2, ep=2, **SMALL_VOCAB)
PP2 = TrainerLayout(pp=2, **SMALL_VOCAB)


def test_one_rank_trains_as_transformers_does(oracle: Path) -> None:
    trials = [Trial(ONE_RANK, family=family) for family in SPECS]
    trials.append(Trial(ONE_RANK, recompute=True, family="deepseek_v3"))
    assert run_ranks(_train_two_steps, 1, trials, oracle) == [len(trials)]


@pytest.mark.parametrize("layout", [TP2, EP2, PP2], ids=["tp2", "ep2", "pp2"])
def test_two_ranks_train_as_transformers_does(layout: TrainerLayout, oracle: Path) -> None:
    trials = [Trial(layout, family=family) for family in SPECS]
    assert run_ranks(_train_two_steps, 2, trials, oracle, timeout=400) == [len(trials)] * 2


def test_four_ranks_with_tensor_and_expert_parallelism(oracle: Path) -> None:
    layout = TrainerLayout(tp=2, dp=2, ep=2, sequence_parallel=True, **SMALL_VOCAB)
    trials = [Trial(layout, distributed_optimizer=True, family="deepseek_v3")]
    assert run_ranks(_train_two_steps, 4, trials, oracle, timeout=400) == [1] * 4


def _save_and_load(rank: int, size: int, folder: Path, file: Path) -> int:
    from megatron_bridge.runtime import checkpoint

    oracle = torch.load(file, weights_only=False)
    families = ("qwen2_moe", "deepseek_v3")
    for family in families:
        case, steps = oracle.cases[family], oracle.steps[family]
        session = _FamilySession(Trial(TP2, family=family), case, rank)
        session.write_weights()
        session.check_step(steps[0])
        checkpoint.save(folder / family, session.trainer)
        session.close()
        session = _FamilySession(Trial(EP2, family=family), case, rank)
        checkpoint.load(folder / family, session.trainer)
        session.check_weights(steps[0].weights)
        session.check_step(steps[1])
        session.close()
    return len(families)


def test_a_checkpoint_with_its_router_bias_goes_on_at_another_layout(
    tmp_path: Path, oracle: Path
) -> None:
    assert run_ranks(_save_and_load, 2, tmp_path, oracle, timeout=400) == [2, 2]


def _bias_dtypes(rank: int, size: int) -> list[str]:
    from megatron_bridge.runtime import setup
    from megatron_bridge.runtime.model import MegatronModel, ModelSettings

    setup.initialize(ONE_RANK, seed=1)
    settings = ModelSettings(dtype="bfloat16")
    found = MegatronModel(SPECS["deepseek_v3"], ONE_RANK, settings).parameters()
    setup.destroy()
    return sorted(name for name, tensor in found.items() if tensor.dtype == torch.float32)


def test_the_router_bias_alone_stays_float32_in_a_bfloat16_model() -> None:
    biases = [f"decoder.layers.{layer}.mlp.router.expert_bias" for layer in (1, 2, 3)]
    assert run_ranks(_bias_dtypes, 1) == [biases]


def _refusals(rank: int, size: int) -> int:
    from megatron_bridge.runtime.architecture import transformer_config

    def refuse(spec: ModelSpec, layout: TrainerLayout, words: str) -> None:
        with pytest.raises((LayoutError, PlanError), match=words):
            transformer_config(spec, layout, "float32", recompute=False)

    spec = SPECS["deepseek_v3"]
    refuse(make_spec(num_mtp_layers=1), ONE_RANK, "multi-token-prediction")
    refuse(spec, TrainerLayout(tp=2), "trainer tp 2 needs sequence_parallel")
    refuse(make_spec(**{**DEEPSEEK, "ffn_size": 95}), TP2, "ffn size 95")
    refuse(make_spec(**{**DEEPSEEK, "shared_ffn_size": 33}), TP2, "shared expert ffn size 33")
    return 1


def test_what_megatron_cannot_build_is_named() -> None:
    assert run_ranks(_refusals, 1) == [1]
