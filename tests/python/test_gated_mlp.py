"""A gated MLP whose gate is the end of a product: values and gradients, and the two weights that stay parameters."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch._ops import gated_mlp as halves  # noqa: E402
from kernel_pytorch._ops.gated_mlp import gated_mlp  # noqa: E402
from kernel_pytorch._optimize.demo_models import SwiGLU  # noqa: E402
from kernel_pytorch._optimize.patterns.packs import JOIN_KEY, Join  # noqa: E402
from kernel_pytorch._optimize.patterns.perceptrons import Perceptron  # noqa: E402

ACTIVATIONS = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}


def drawn(*shape, device="cpu", dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64).to(device, dtype).requires_grad_()


def by_torch(x, weight_in, weight_out, residual, activation):
    gate, up = (x @ weight_in.T).chunk(2, -1)
    return (ACTIVATIONS[activation](gate) * up) @ weight_out.T + residual


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("rows", [(7,), (2, 3), (0,)])
def test_values_and_gradients(activation, rows) -> None:
    torch.manual_seed(0)
    leaves = [drawn(*rows, 6), drawn(10, 6), drawn(4, 5), drawn(*rows, 4)]
    mine = gated_mlp(*leaves[:3], activation=activation, residual=leaves[3])
    theirs = by_torch(*leaves, activation)
    torch.testing.assert_close(mine, theirs)
    grad = torch.randn_like(theirs)
    found, expected = (torch.autograd.grad(one, leaves, grad) for one in (mine, theirs))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_only_what_is_wanted() -> None:
    torch.manual_seed(0)
    x, weight_in, weight_out = drawn(7, 6), drawn(10, 6).detach(), drawn(4, 5)
    gated_mlp(x, weight_in, weight_out).sum().backward()
    expected = by_torch(x, weight_in, weight_out, 0.0, "silu").sum()
    for leaf, wanted in zip((x, weight_out), torch.autograd.grad(expected, (x, weight_out)), strict=True):
        torch.testing.assert_close(leaf.grad, wanted)


def test_gradcheck_and_opcheck() -> None:
    torch.manual_seed(0)
    leaves = [drawn(3, 4), drawn(6, 4), drawn(5, 3)]
    assert torch.autograd.gradcheck(lambda x, a, b: gated_mlp(x, a, b), leaves)
    torch.library.opcheck(torch.ops.kernel_pytorch.gated_mlp_forward.default, (*leaves, None, "silu", False))


def test_errors() -> None:
    with pytest.raises(RuntimeError, match="pairs"):
        gated_mlp(drawn(3, 4), drawn(7, 4), drawn(5, 3))
    with pytest.raises(RuntimeError, match="hidden size 3"):
        gated_mlp(drawn(3, 4), drawn(6, 4), drawn(5, 4))


def test_two_parameters_one_after_the_other(monkeypatch) -> None:
    """The module's own parameters train: dense gradients, an optimizer's step is seen, a copy computes by itself."""
    asked: list[int] = []
    monkeypatch.setattr(halves, "runs_on_halves", lambda x, hidden: asked.append(hidden) is None)
    torch.manual_seed(0)
    module, x, residual = SwiGLU(12, 20).double(), drawn(5, 12), drawn(5, 12)
    original, gate = copy.deepcopy(module), module.gate_proj.weight
    join = Join(module, module.gate_proj, module.up_proj)
    join.apply()
    assert module.gate_proj.weight is gate and gate.is_contiguous()
    found = Perceptron("gated", "silu", ("gate_proj", "up_proj", "down_proj"))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (module, original)]
    for _ in range(2):
        outputs = found(module, x, "ours", residual=residual), original(x) + residual
        torch.testing.assert_close(*outputs)
        for output, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            output.square().sum().backward()
        for a, b in zip(module.parameters(), original.parameters(), strict=True):
            assert a.grad.is_contiguous()
            torch.testing.assert_close(a.grad, b.grad)
        for optimizer in optimizers:
            optimizer.step()
    assert asked == [20, 20]
    copied = copy.deepcopy(module)
    torch.testing.assert_close(found(copied, x, "ours"), original(x))
    assert asked == [20, 20]  # a copy's weights lie by themselves
    with torch.no_grad():
        torch.testing.assert_close(found(module, x, "ours"), original(x))
    join.undo()
    assert JOIN_KEY not in module.__dict__ and module.gate_proj.weight is gate
    torch.testing.assert_close(module(x), original(x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("tokens, features, hidden", [(300, 256, 320), (4096, 512, 1408), (16, 128, 64)])
@pytest.mark.parametrize("vendor", [False, True])
def test_on_a_gpu(dtype, bound, tokens, features, hidden, vendor) -> None:
    torch.manual_seed(0)
    leaves = [
        drawn(tokens, features, device="cuda", dtype=dtype),
        drawn(2 * hidden, features, device="cuda", dtype=dtype),
        drawn(features, hidden, device="cuda", dtype=dtype),
        drawn(tokens, features, device="cuda", dtype=dtype),
    ]
    with torch.no_grad():
        leaves[1] *= features**-0.5
        leaves[2] *= hidden**-0.5
    assert halves.runs_on_halves(leaves[0], hidden)
    mine = gated_mlp(*leaves[:3], residual=leaves[3], vendor=vendor)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    theirs = by_torch(*wide, "silu")
    grad = torch.randn_like(mine)
    found = torch.autograd.grad(mine, leaves, grad)
    expected = torch.autograd.grad(theirs, wide, grad.double())
    for a, b in zip([mine, *found], [theirs, *expected], strict=True):
        assert a.dtype is dtype
        assert ((a.double() - b).norm() / b.norm()).item() < bound
