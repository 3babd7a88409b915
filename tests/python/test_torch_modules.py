"""The modules: torch's parameters and state_dict both ways, several normalised dimensions, copies and pickles."""

from __future__ import annotations

import copy
import io
import pickle

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch.core import OptimizedLayerNorm, OptimizedRMSNorm  # noqa: E402

nn = torch.nn

PAIRS = [
    (lambda shape, **k: OptimizedRMSNorm(shape, **k), lambda shape, **k: nn.RMSNorm(shape, eps=1e-6, **k), {}),
    (OptimizedRMSNorm, lambda shape, **k: nn.RMSNorm(shape, eps=1e-6, **k), {"elementwise_affine": False}),
    (lambda shape, **k: OptimizedRMSNorm(shape, eps=None, **k), nn.RMSNorm, {}),
    (OptimizedLayerNorm, nn.LayerNorm, {}),
    (OptimizedLayerNorm, nn.LayerNorm, {"bias": False}),
    (OptimizedLayerNorm, nn.LayerNorm, {"elementwise_affine": False}),
]


@pytest.mark.parametrize("ours, theirs, options", PAIRS)
@pytest.mark.parametrize("shape", [6, (6,), (3, 6), (2, 3, 4)], ids=str)
def test_state_dict_both_ways_and_equal_results(ours, theirs, options, shape):
    ours, theirs = ours(shape, **options), theirs(shape, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(5, 2, *((shape,) if isinstance(shape, int) else shape))
    torch.testing.assert_close(ours(x), theirs(x))
    output, total = ours(x, x * 2)
    torch.testing.assert_close(output, theirs(x * 3))
    torch.testing.assert_close(total, x * 3)
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    torch.testing.assert_close(ours(x), theirs(x))
    ours_x, theirs_x = (x.clone().requires_grad_() for _ in range(2))
    ours(ours_x).square().sum().backward()
    theirs(theirs_x).square().sum().backward()
    torch.testing.assert_close(ours_x.grad, theirs_x.grad, rtol=1e-5, atol=5e-5)  # differences of terms of about one
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-5)


def test_constructor_arguments():
    norm = OptimizedRMSNorm(8, 1e-3, True, "cpu", torch.bfloat16, 1.0)
    assert norm.eps == 1e-3 and norm.weight.dtype == torch.bfloat16 and norm.weight_offset == 1.0
    assert torch.equal(norm.weight, torch.zeros(8, dtype=torch.bfloat16))  # so that weight + offset is one
    assert torch.equal(OptimizedRMSNorm(8).weight, torch.ones(8))
    assert "weight_offset=1.0" in repr(norm) and "eps=0.001" in repr(norm)
    assert OptimizedRMSNorm(8).eps == 1e-6 and OptimizedLayerNorm(8).eps == 1e-5
    assert OptimizedRMSNorm(8, device="meta").weight.device.type == "meta"
    assert isinstance(norm, nn.RMSNorm) and isinstance(OptimizedLayerNorm(8), nn.LayerNorm)


def test_weight_offset_is_the_same_function():
    x = torch.randn(3, 8)
    plain, offset = OptimizedRMSNorm(8), OptimizedRMSNorm(8, weight_offset=1.0)
    nn.init.normal_(plain.weight)
    with torch.no_grad():
        offset.weight.copy_(plain.weight - 1)
    torch.testing.assert_close(offset(x), plain(x))


@pytest.mark.parametrize("norm", [OptimizedRMSNorm(8, weight_offset=1.0), OptimizedLayerNorm((2, 8))], ids=repr)
def test_copies(norm):
    x = torch.randn(3, 2, 8)
    buffer = io.BytesIO()
    torch.save(norm, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(norm), pickle.loads(pickle.dumps(norm)), torch.load(buffer, weights_only=False)]
    for other in copies:
        assert torch.equal(other(x), norm(x)) and other.weight is not norm.weight


@pytest.mark.parametrize("norm", [OptimizedRMSNorm((2, 8), elementwise_affine=False), OptimizedLayerNorm((2, 8))])
def test_wrong_shape_names_both(norm):
    with pytest.raises(RuntimeError, match=r"Optimized\w+: x has shape \[3, 2, 7\], .* normalized_shape \[2, 8\]"):
        norm(torch.zeros(3, 2, 7))
    with pytest.raises(RuntimeError, match=r"residual has shape \[3, 2, 7\]"):
        norm(torch.zeros(3, 2, 8), torch.zeros(3, 2, 7))


def test_half_precision_training_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), OptimizedRMSNorm(16), nn.Linear(16, 1)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    x = torch.randn(64, 16).bfloat16()
    target = x[:, :1]
    losses = []
    for _ in range(20):
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
