import pytest

from megatron_bridge.models.families import spec_from_hf
from megatron_bridge.models.flops import training_flops
from tests.unit.megatron_bridge.test_families import DEEPSEEK_V3

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def test_a_short_sequence_of_llama_8b_costs_six_operations_a_weight() -> None:
    # Llama 3 8B has 8.03e9 parameters (its model card).
    assert training_flops(spec_from_hf(LLAMA_8B), [1]) == pytest.approx(6 * 8.03e9, rel=1e-3)


def test_attention_grows_with_the_square_of_the_length() -> None:
    spec = spec_from_hf(LLAMA_8B)
    # At 8192 tokens causal attention is 6 x 32 layers x 4096 x 8192 a token.
    extra = training_flops(spec, [8192]) - 8192 * training_flops(spec, [1])
    assert extra == pytest.approx(6 * 32 * 4096 * 8192 * 8192, rel=1e-3)


def test_a_token_costs_only_the_experts_that_it_goes_through() -> None:
    # Mixtral 8x7B has 12.9e9 active parameters (its paper, arXiv 2401.04088).
    mixtral = {
        **LLAMA_8B,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "rope_theta": 1e6,
    }
    assert training_flops(spec_from_hf(mixtral), [1]) == pytest.approx(6 * 12.9e9, rel=5e-3)


def test_a_token_of_deepseek_v3_costs_its_active_parameters() -> None:
    # 37e9 of them (its report, arXiv 2412.19437).
    spec = spec_from_hf(DEEPSEEK_V3).without_mtp()
    assert training_flops(spec, [1]) == pytest.approx(6 * 37e9, rel=2e-2)
    # Causal attention over 192 features of a query and 128 of a value: 3 x (192 + 128) a head.
    extra = training_flops(spec, [4096]) - 4096 * training_flops(spec, [1])
    assert extra == pytest.approx(3 * (192 + 128) * 61 * 128 * 4096 * 4095)
