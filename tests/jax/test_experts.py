"""Mixtures of experts in JAX: values and gradients against every expert computed, and against jax.lax.ragged_dot."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernel_pytorch.jax as kp


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def dense(x: Any, logits: Any, gate_up: Any, down: Any, k: int) -> Any:
    """Every expert of every token."""
    scores = jax.nn.softmax(logits)
    weights, chosen = jax.lax.top_k(scores, k)
    weights = weights / weights.sum(-1, keepdims=True)
    gate, up = jnp.split(jnp.einsum("td,edn->etn", x, gate_up), 2, -1)
    y = jnp.einsum("etn,end->etd", jax.nn.silu(gate) * up, down)
    return jnp.einsum("tk,tke,etd->td", weights, jax.nn.one_hot(chosen, logits.shape[-1]), y)


def test_a_layer_and_its_gradients() -> None:
    x, logits = normal(0, 2, 15, 8), normal(1, 2, 15, 5)
    gate_up, down = normal(2, 5, 8, 12) / 3, normal(3, 5, 6, 8) / 3

    @jax.jit
    def layer(x: Any, logits: Any, gate_up: Any, down: Any) -> Any:
        routing = kp.route(logits, 2)
        return kp.moe_mlp(x, routing, gate_up, down)

    @jax.jit
    def expected(x: Any, logits: Any, gate_up: Any, down: Any) -> Any:
        return dense(x.reshape(-1, 8), logits.reshape(-1, 5), gate_up, down, 2).reshape(x.shape)

    given = (x, logits, gate_up, down)
    np.testing.assert_allclose(layer(*given), expected(*given), rtol=1e-4, atol=1e-5)
    gradient = lambda f: jax.jit(jax.grad(lambda *a: (f(*a) ** 2).sum(), argnums=(0, 1, 2, 3)))  # noqa: E731
    grads = [gradient(f)(*given) for f in (layer, expected)]
    for ours, theirs in zip(*grads):
        np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=1e-4)


def test_losses_have_gradients() -> None:
    logits = normal(4, 20, 6)

    def losses(logits: Any) -> Any:
        routing = kp.route(logits, 2)
        return routing.aux_loss + routing.z_loss

    def expected(logits: Any) -> Any:
        scores = jax.nn.softmax(logits)
        chosen = jax.nn.one_hot(jax.lax.top_k(scores, 2)[1], 6).sum((0, 1)) / 40
        return 6 * (chosen * scores.mean(0)).sum() + (jax.nn.logsumexp(logits, -1) ** 2).mean()

    np.testing.assert_allclose(losses(logits), expected(logits), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(losses)(logits), jax.grad(expected)(logits), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_ragged_dot_is_jaxs(dtype: Any) -> None:
    lhs, rhs, sizes = normal(5, 20, 8, dtype=dtype), normal(6, 4, 8, 6, dtype=dtype), jnp.array([3, 0, 9, 5])
    tolerance = dict(rtol=1e-4, atol=1e-4) if dtype == jnp.float32 else dict(rtol=2e-2, atol=6e-2)
    ours, theirs = kp.ragged_dot(lhs, rhs, sizes), jax.lax.ragged_dot(lhs, rhs, sizes)
    np.testing.assert_allclose(ours.astype(jnp.float32)[:17], theirs.astype(jnp.float32)[:17], **tolerance)
    assert not ours[17:].any()
    grads = [
        jax.grad(lambda a, b, f=f: (f(a, b, sizes)[:17].astype(jnp.float32) ** 2).sum(), argnums=(0, 1))(lhs, rhs)
        for f in (kp.ragged_dot, jax.lax.ragged_dot)
    ]
    for one, other in zip(*grads):
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), rtol=3e-2, atol=0.5)


def test_gathers_biases_and_activations() -> None:
    x, weight, bias = normal(7, 9, 8), normal(8, 3, 10, 8), normal(9, 3, 10)
    ends, gather = jnp.array([0, 4, 11, 11]), jnp.arange(12) % 9
    rows = x[gather]
    group = jnp.array([0] * 4 + [1] * 7)
    v = jnp.einsum("rk,rnk->rn", rows[:11], weight[group]) + bias[group]
    options = dict(bias=bias, gather=gather, transpose_weight=True)
    np.testing.assert_allclose(kp.grouped_matmul(x, weight, ends, **options)[:11], v, rtol=1e-4, atol=1e-4)
    gated = kp.grouped_matmul(x, weight, ends, activation="swiglu_clamped_interleaved", limit=1.0, **options)
    gate, up = jnp.minimum(v[:, ::2], 1.0), jnp.clip(v[:, 1::2], -1, 1)
    np.testing.assert_allclose(gated[:11], gate * jax.nn.sigmoid(1.702 * gate) * (up + 1), rtol=1e-4, atol=1e-4)

    def loss(x: Any, bias: Any) -> Any:
        return kp.grouped_matmul(x, weight, ends, bias=bias, gather=gather, transpose_weight=True).sum()

    of_x, of_bias = jax.grad(loss, argnums=(0, 1))(x, bias)
    np.testing.assert_allclose(of_bias, jnp.array([4.0, 7.0, 0.0])[:, None] * jnp.ones((3, 10)), rtol=1e-5)
    wanted = jnp.zeros_like(x).at[gather[:11]].add(weight[group].sum(1))
    np.testing.assert_allclose(of_x, wanted, rtol=1e-4, atol=1e-4)


def test_experts_that_were_chosen() -> None:
    routing = kp.route(normal(10, 30, 6), 2, capacity=7)
    again = kp.route_chosen(routing.experts, routing.weights, 6, capacity=7)
    for name in ("weights", "offsets", "counts", "token_of_row", "row_of_token", "dropped"):
        assert (getattr(again, name) == getattr(routing, name)).all(), name
    y = normal(11, 60, 4)
    rows = routing.row_of_token
    wanted = (y[jnp.maximum(rows, 0)] * (routing.weights * (rows >= 0))[..., None]).sum(1)
    np.testing.assert_allclose(kp.moe_combine(y, routing), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("transposed", [False, True])
def test_ejkernels_grouped_matmul(transposed: bool) -> None:
    from kernel_pytorch.jax import ej

    lhs, rhs, sizes = normal(12, 20, 8), normal(13, 4, 8, 6), jnp.array([3, 0, 9, 5])
    whole = jax.lax.ragged_dot(lhs, rhs, sizes).at[17:].set(0)
    stored = jnp.swapaxes(rhs, 1, 2) if transposed else rhs
    for function in (ej.grouped_matmul, ej.grouped_matmulv2):
        np.testing.assert_allclose(function(lhs, stored, sizes, transpose_rhs=transposed), whole, rtol=1e-4, atol=1e-4)
    parts = [ej.grouped_matmul(lhs, stored[i : i + 2], sizes, jnp.array([i]), transpose_rhs=transposed) for i in (0, 2)]
    np.testing.assert_allclose(parts[0] + parts[1], whole, rtol=1e-4, atol=1e-4)  # experts on two devices
    more = ej.grouped_matmul(lhs, stored, sizes, None, jnp.ones((20, 6)), transpose_rhs=transposed)
    np.testing.assert_allclose(more, whole + 1, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="interpret"):
        ej.grouped_matmul(lhs, stored, sizes, interpret=True)


@pytest.mark.parametrize("capacity", [None, 4])
def test_experts_on_four_devices_are_those_of_one(capacity: int | None) -> None:
    """Tokens and experts are cut; the capacity is of each device's tokens. Gradients are taken outside."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("devices",))
    cut = jax.sharding.PartitionSpec("devices")
    x, logits = normal(0, 20, 8), normal(1, 20, 8)
    gate_up, down = normal(2, 8, 8, 12) / 3, normal(3, 8, 6, 8) / 3

    def own(x: Any, logits: Any, gate_up: Any, down: Any) -> Any:
        return kp.expert_parallel_mlp(x, kp.route(logits, 3, capacity=capacity), gate_up, down, axis_name="devices")

    def alone(x: Any, logits: Any, gate_up: Any, down: Any) -> Any:
        parts = zip(jnp.split(x, 4), jnp.split(logits, 4))
        return jnp.concatenate([kp.moe_mlp(a, kp.route(b, 3, capacity=capacity), gate_up, down) for a, b in parts])

    both = [jax.shard_map(own, mesh=mesh, in_specs=(cut,) * 4, out_specs=cut), alone]
    given = (x, logits, gate_up, down)
    values = [
        jax.jit(jax.value_and_grad(lambda *a, f=f: ((y := f(*a)) ** 2).sum() + y.sum(), argnums=(0, 1, 2, 3)))(*given)
        for f in both
    ]
    for ours, theirs in zip(jax.tree.leaves(values[0]), jax.tree.leaves(values[1])):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-5)


def test_experts_of_another_axis_raise() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("devices",))
    cut = jax.sharding.PartitionSpec("devices")

    def own(x: Any, gate_up: Any, down: Any) -> Any:
        return kp.expert_parallel_mlp(x, kp.route(x[:, :6], 2), gate_up, down, axis_name="devices")

    with pytest.raises(ValueError, match="4 devices with 2 experts each have 8, the routing is among 6"):
        jax.jit(jax.shard_map(own, mesh=mesh, in_specs=(cut,) * 3, out_specs=cut))(
            normal(0, 8, 8), normal(1, 8, 8, 12), normal(2, 8, 6, 8)
        )


def test_scaled_grouped_products() -> None:
    x, weight = kp.quantize(normal(5, 12, 40), granularity="row"), normal(6, 3, 7, 40).astype(jnp.float8_e4m3fn)
    ends, scales = jnp.array([4, 4, 10]), jnp.array([1.0, 2.0, 3.0])
    found = kp.scaled_grouped_matmul(x.codes, weight, x.scales, scales, ends, dtype=jnp.float32)
    left = np.asarray(x.codes, np.float32) * np.asarray(x.scales).reshape(12, 1)
    expected = np.zeros((12, 7), np.float32)
    for group, (begin, end) in enumerate(((0, 4), (4, 4), (4, 10))):
        expected[begin:end] = left[begin:end] @ np.asarray(weight[group], np.float32).T * float(scales[group])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
