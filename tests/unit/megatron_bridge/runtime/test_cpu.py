"""Each substitution of the CPU backend: the fault without it, and that it mends the fault.

A fault that no longer shows means that Megatron-Core no longer needs the substitution.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from tests.processes import run_ranks

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is substituted with CUDA"),
]


def _config():
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, calculate_per_token_loss=True
    )


def _make_linear() -> torch.nn.Module:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    config = _config()
    return ColumnParallelLinear(8, 8, config=config, init_method=torch.nn.init.zeros_, bias=False)


def _exchange_shapes() -> None:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    group = parallel_state.get_pipeline_model_parallel_group()
    P2PCommunicator(group, _config())._communicate_shapes(None, None, False, False)


def _move_tied_embedding() -> None:
    from megatron.core.models.common.language_module.language_module import LanguageModule

    source = inspect.getsource(LanguageModule.setup_embeddings_and_output_layer)
    assert "weight.data = weight.data.cuda()" in source
    torch.zeros(1).cuda()


def _track_random_state() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, _fork_rng

    tracker = CudaRNGStatesTracker()
    tracker.add("ours", 5)
    with tracker.fork("ours"), _fork_rng():
        pass


def _count_tokens() -> None:
    from megatron.core.pipeline_parallel import schedules

    assert 'torch.zeros([], dtype=torch.int, device="cuda")' in inspect.getsource(schedules)
    schedules.torch.zeros([], dtype=torch.int, device="cuda")  # pyright: ignore


def _make_float32_optimizer() -> None:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    FP32Optimizer(_adam(torch.float32), OptimizerConfig(), lambda _: None)


def _measure_gradients() -> None:
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    assert get_grad_norm_fp32([torch.tensor([3.0, 4.0])]) == pytest.approx(5.0)


def _adam(dtype: torch.dtype) -> torch.optim.AdamW:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(2, dtype=dtype))])


def _make_bfloat16_optimizer() -> None:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    config = OptimizerConfig(bf16=True, params_dtype=torch.bfloat16)
    Float16OptimizerWithFloat16Params(_adam(torch.bfloat16), config, None, lambda _: None)  # pyright: ignore


def _clip() -> None:
    from megatron.core.optimizer import optimizer

    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    optimizer.clip_grad_by_total_norm_fp32([parameter], 1.0, 5.0)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))


def _make_distributed_optimizer():
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    reduction = DistributedDataParallelConfig(use_distributed_optimizer=True)
    chunk = DistributedDataParallel(_config(), reduction, _make_linear())
    config = OptimizerConfig(use_distributed_optimizer=True, lr=0.1)
    made = get_megatron_optimizer(config, [chunk], use_gloo_process_groups=False)  # pyright: ignore
    return chunk, made.chained_optimizers[0]  # pyright: ignore


def _load_distributed_optimizer() -> None:
    chunk, sharded = _make_distributed_optimizer()
    parameter = chunk.module.weight
    main = sharded.optimizer.param_groups[0]["params"][0]
    step, zeros = torch.tensor(3.0), torch.zeros_like(main)
    sharded.optimizer.state[main] = {"step": step, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
    ones = torch.ones_like(main)
    saved = {"param": ones, "exp_avg": ones, "exp_avg_sq": ones}
    with torch.no_grad():
        sharded._set_main_param_and_optimizer_states(parameter, saved)
    state = sharded.optimizer.state[main]
    assert torch.equal(state["exp_avg"], ones)
    assert float(state["step"]) == 3.0
    assert state["step"] is not step, "a counter shared by parameters would advance for each"


def _route() -> None:
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    logits = router_gating_linear(torch.eye(2), torch.ones(3, 2), None, torch.float32)
    assert torch.equal(logits, torch.ones(2, 3))


def _dispatch() -> None:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    config = TransformerConfig(
        num_layers=1,
        hidden_size=2,
        num_attention_heads=1,
        num_moe_experts=2,
        moe_ffn_hidden_size=2,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        moe_token_dispatcher_type="alltoall",
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    dispatcher = MoEAlltoAllTokenDispatcher(2, [0, 1], config, groups)
    tokens = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    chosen = torch.tensor([[False, True], [True, False]])
    sent = dispatcher.dispatch_preprocess(tokens, chosen, chosen.float())
    sorted_tokens, counts, _ = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*sent))
    assert torch.equal(sorted_tokens, tokens.flip(0))
    assert counts.tolist() == [1, 1]


FAULTS = (AssertionError, AttributeError, TypeError, KeyError, NameError, RuntimeError)


def _show_faults(rank: int, size: int) -> int:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megatron_bridge.runtime import cpu

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    no_cuda = "Torch not compiled with CUDA enabled"
    steps: list[tuple[Callable[[], None], str, list[Callable[[], object]]]] = [
        (cpu._substitute_current_device, no_cuda, [_exchange_shapes, _move_tied_embedding]),
        (cpu._substitute_random_state, no_cuda, [_track_random_state]),
        (
            cpu._substitute_factories,
            no_cuda,
            [_count_tokens, _make_float32_optimizer, _measure_gradients],
        ),
        (
            cpu._substitute_type_names,
            "FloatTensor|^$",  # clipping's assertion has no words
            [_make_bfloat16_optimizer, _clip, _make_distributed_optimizer],
        ),
        (cpu._substitute_step_counter, "'step'", [_load_distributed_optimizer]),
        (cpu._substitute_router_product, "te_general_gemm", [_route]),
        # vLLM, once imported, leaves streams in torch.cuda that do nothing
        (cpu._substitute_dispatch_stream, "CUDA|synchronize", [_dispatch]),
    ]
    with pytest.raises(AssertionError, match=no_cuda):
        torch.empty(1, device=torch.cuda.current_device())
    for substitute, fault, uses in steps:
        for use in uses:
            with pytest.raises(FAULTS, match=fault):
                use()
        substitute()
        if substitute is cpu._substitute_random_state:
            model_parallel_cuda_manual_seed(1)
        for use in uses:
            use()
    return sum(len(uses) for _, _, uses in steps)


def test_every_substitution_mends_a_fault_that_megatron_still_has() -> None:
    assert run_ranks(_show_faults, 1) == [12]


def _apply_twice(rank: int, size: int) -> bool:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from megatron_bridge.runtime.cpu import apply_substitutions

    apply_substitutions()
    once = DistributedOptimizer.__init__
    apply_substitutions()
    return DistributedOptimizer.__init__ is once


def test_applying_twice_is_applying_once() -> None:
    assert run_ranks(_apply_twice, 1) == [True]


def test_megatrons_norm_still_refuses_what_our_layer_spec_replaces_it_for() -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from megatron_bridge.runtime.pointwise import RmsNorm

    config = SimpleNamespace(
        layernorm_zero_centered_gamma=False,
        persist_layer_norm=False,
        sequence_parallel=True,
        memory_efficient_layer_norm=False,
        normalization="RMSNorm",
        params_dtype=torch.float32,
    )
    with pytest.raises(AssertionError, match="sequence parallel"):
        WrappedTorchNorm(config, 8)  # pyright: ignore
    assert RmsNorm(config, 8).weight.sequence_parallel is True  # pyright: ignore


def test_megatrons_attention_still_refuses_packed_sequences() -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    assert "packed_seq_params is None" in inspect.getsource(DotProductAttention.forward)
