"""vmap of an op with a seed gives every sample what its own call gives, forward and backward."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.func import grad, vmap  # noqa: E402

from kernel_pytorch import functional  # noqa: E402


def activation(x, seed):
    return functional.activation(x, "gelu", bias=torch.ones(8), dropout_p=0.5, seed=seed)


def gated(x, seed):
    return functional.gated_activation(x, x * 2, "silu", dropout_p=0.5, seed=seed)


def packed(x, seed):
    return functional.gated_activation_packed(x, "silu", dropout_p=0.5, seed=seed)


def dropout(x, seed):
    return functional.dropout(x, 0.5, seed=seed)


def attention(x, seed):
    query = x.view(1, 1, 4, 8)
    return functional.attention(query, query * 0.5, query + 1, dropout_p=0.5, seed=seed)


CALLS = [activation, gated, packed, dropout, attention]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("batched", ["x", "seed", "both"])
@pytest.mark.parametrize("with_gradient", [False, True])
def test_each_sample_equals_its_own_call(call, batched, with_gradient):
    xs, seeds = torch.randn(3, 4, 8), torch.tensor([[1, 0], [2, 5], [3, 7]])
    dims = (None if batched == "seed" else 0, None if batched == "x" else 0)
    given = [values[0] if dim is None else values for values, dim in zip((xs, seeds), dims)]
    function = grad(lambda x, seed: call(x, seed).square().sum()) if with_gradient else call
    found = vmap(function, in_dims=dims)(*given)
    for i in range(3):
        x, seed = (value if dim is None else value[i] for value, dim in zip(given, dims))
        torch.testing.assert_close(found[i], function(x, seed))
    if batched == "x":
        assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_autograd_of_a_mapped_call(call):
    xs, seed = torch.randn(3, 4, 8, requires_grad=True), torch.tensor([1, 2])
    (found,) = torch.autograd.grad(vmap(call, in_dims=(0, None))(xs, seed).square().sum(), xs)
    for i in range(3):
        x = xs[i].detach().requires_grad_()
        (expected,) = torch.autograd.grad(call(x, seed).square().sum(), x)
        torch.testing.assert_close(found[i], expected)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_randomness_is_what_vmap_was_asked_for(call):
    xs = torch.ones(1, 4, 8).expand(6, 4, 8)
    same = vmap(lambda x: call(x, None), randomness="same")(xs)
    assert all(torch.equal(same[0], sample) for sample in same)
    different = vmap(lambda x: call(x, None), randomness="different")(xs)
    assert not all(torch.equal(different[0], sample) for sample in different)
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(lambda x: call(x, None))(xs)
