"""Own gradients of the local layer spec beside autograd's and beside finite differences."""

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_bridge.runtime.pointwise import RmsNorm, swiglu

SHAPES = [(5, 1, 8), (3, 2, 4, 8), (6, 8)]


def _norm(size: int) -> RmsNorm:
    config = TransformerConfig(num_layers=1, hidden_size=size, num_attention_heads=1)
    norm = RmsNorm(config, size, 1e-5)
    torch.nn.init.normal_(norm.weight)
    return norm


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_is_torchs_with_its_gradients(shape: tuple[int, ...]):
    torch.manual_seed(0)
    own = _norm(shape[-1])
    reference = torch.nn.RMSNorm(shape[-1], 1e-5)
    reference.load_state_dict(own.state_dict())
    x, grad = torch.randn(shape), torch.randn(shape)

    def run(norm: torch.nn.Module) -> tuple[Tensor, ...]:
        leaf = x.clone().requires_grad_()
        output = norm(leaf)
        return output.detach(), *torch.autograd.grad(output, [leaf, *norm.parameters()], grad)

    torch.testing.assert_close(run(own), run(reference))


@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu_has_the_gradient_of_finite_differences(shape: tuple[int, ...]):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    first, second = x.chunk(2, -1)
    torch.testing.assert_close(swiglu(x), first * torch.sigmoid(first) * second)
    assert torch.autograd.gradcheck(swiglu, x)


def test_a_strided_gradient_is_taken():
    x = torch.randn(4, 6, requires_grad=True)
    norm = _norm(6)
    (found,) = torch.autograd.grad(norm(x.T.contiguous().T).T.sum(), x)
    (expected,) = torch.autograd.grad(norm(x).sum(), x)
    torch.testing.assert_close(found, expected)
