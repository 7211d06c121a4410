import pytest
import torch
from tests.backends.cuda.closeness import DTYPES, assert_close, poisoned, random
from transformers.activations import ACT2FN

from twostroke.backends.cuda.kernels.activation import activate_rows, gate_by_sigmoid, gate_with, gated

TRANSFORMERS_NAME = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "intermediate"), [(1, 1024), (3, 1100), (2, 96)])
def test_gated_is_transformers_activation_times_up(device, kind, dtype, tokens, intermediate):
    gate_up = random(tokens, 2 * intermediate, dtype=dtype, device=device) * 4
    out = poisoned(tokens, intermediate, dtype=dtype, device=device)
    gated(gate_up, out, kind=kind)
    gate, up = gate_up.float().chunk(2, dim=1)
    assert_close(out, ACT2FN[TRANSFORMERS_NAME[kind]](gate) * up)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_large_gates_overflow_nothing(device, kind):
    gate_up = torch.tensor([[-300.0, -30.0, 30.0, 300.0, 1.0, 1.0, 1.0, 1.0]], device=device)
    out = poisoned(1, 4, dtype=torch.float32, device=device)
    gated(gate_up, out, kind=kind)
    torch.testing.assert_close(out, torch.tensor([[0.0, 0.0, 30.0, 300.0]], device=device))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_pass_a_gate_of_their_own(device, dtype):
    rows = random(3, 1100, dtype=dtype, device=device)
    gates = random(3, 1200, dtype=dtype, device=device, seed=1)[:, 100:] * 4
    expected = rows.float() * gates.float().sigmoid()
    gate_by_sigmoid(rows, gates)
    assert_close(rows, expected)


@pytest.mark.parametrize("kind", ["squared_relu", "gelu", "silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_a_gate_are_transformers_activation(device, kind, dtype):
    """In place, and nothing beside them."""
    wide = random(3, 1200, dtype=dtype, device=device) * 4
    rows, behind = wide[:, :1100], wide[:, 1100:].clone()
    name = {"squared_relu": "relu2", **TRANSFORMERS_NAME}.get(kind, kind)
    expected = ACT2FN[name](rows.float())
    activate_rows(rows, kind=kind)
    assert_close(rows, expected)
    assert torch.equal(wide[:, 1100:], behind)


def test_a_gate_and_what_it_lets_pass_may_lie_anywhere(device):
    gates = random(3, 96, dtype=torch.float32, device=device)
    ups = random(3, 300, dtype=torch.float32, device=device)[:, 100:196]
    expected = torch.nn.functional.silu(gates) * ups
    gate_with(gates, ups, gates, kind="silu")
    assert_close(gates, expected)


def test_no_tokens(device):
    gated(torch.empty(0, 32, device=device), torch.empty(0, 16, device=device), kind="silu")
