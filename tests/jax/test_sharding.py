"""Programs that XLA partitions over a mesh of four devices: the same numbers, and nothing gathered."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import kernel_pytorch.jax as kp

pytestmark = pytest.mark.skipif(len(jax.devices()) < 4, reason="it takes four devices")
BATCH, LENGTH, HEADS, KEY_HEADS, SIZE = 4, 6, 4, 2, 8
DIM = HEADS * SIZE


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def both(function: Any, arrays: Any, specs: Any, kind: AxisType = AxisType.Auto) -> tuple[Any, Any, str]:
    """Value and gradients on one device, on four, and the compiled text of the latter."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    step = jax.value_and_grad(lambda *arrays: (function(*arrays) ** 2).mean(), argnums=tuple(range(len(arrays))))
    expected = jax.jit(step)(*arrays)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(one, NamedSharding(mesh, spec)) for one, spec in zip(arrays, specs)]
        compiled = jax.jit(step).lower(*placed).compile()
        return expected, compiled(*placed), compiled.as_text()


def check(function: Any, arrays: Any, specs: Any, calls: tuple[str, ...], kind: AxisType = AxisType.Auto) -> None:
    expected, found, text = both(function, arrays, specs, kind)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)
    for call in calls:
        assert call in text


P = PartitionSpec


def test_rows_and_gradients_of_weights() -> None:
    x, weight = normal(0, BATCH, LENGTH, DIM), normal(1, DIM)
    shape = f"f32[{BATCH // 2},{LENGTH // 2},{DIM}]"
    check(kp.rms_norm, (x, weight), (P("data", "model"), P()), (f"{shape}{{2,1,0}}", "rms_norm_backward"))
    check(lambda x, w: kp.layer_norm(x, w, w), (x, weight), (P("data"), P()), ("layer_norm_backward",))
    check(kp.swiglu, (x, x + 1), (P("data"), P("data")), ("gated_activation_backward",))
    check(lambda x: kp.softmax(x), (x,), (P(("data", "model")),), ("softmax_backward",))
    few_bits = kp.quantize_weight(normal(3, 2 * DIM, DIM), "int4", group=32)
    check(lambda x: kp.quantized_matmul(x, few_bits), (x,), (P("data"),), ("quantized_matmul",))
    indices = jnp.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % 7
    check(lambda w: kp.embedding(indices, w), (normal(2, 8, DIM),), (P(),), ("embedding_backward",))


def test_packed_heads_with_a_batch_on_several_devices() -> None:
    qkv = normal(0, BATCH, LENGTH, HEADS + 2 * KEY_HEADS, SIZE)
    angles = np.arange(LENGTH)[:, None] * np.array([1.0, 0.1, 0.01, 0.001], np.float32)

    def attend(qkv: Any) -> Any:
        return kp.attention_packed(qkv, np.cos(angles), np.sin(angles), heads=HEADS, key_heads=KEY_HEADS, causal=True)

    check(attend, (qkv,), (P("data"),), ("rope_backward", "attention_backward"))


@pytest.mark.parametrize("key_heads", [KEY_HEADS, HEADS])
def test_batch_and_heads_of_attention(key_heads: int) -> None:
    query = normal(0, BATCH, LENGTH, HEADS, SIZE)
    key, value = normal(1, BATCH, LENGTH, key_heads, SIZE), normal(2, BATCH, LENGTH, key_heads, SIZE)
    bias, sinks = normal(3, 1, HEADS, LENGTH, LENGTH), normal(4, HEADS)
    spec = P("data", None, "model")
    local = f"f32[{BATCH // 2},{LENGTH},{HEADS // 2},{SIZE}]"

    def attend(query: Any, key: Any, value: Any, bias: Any, sinks: Any) -> Any:
        return kp.attention(query, key, value, causal=True, bias=bias, sinks=sinks)

    specs = (spec, spec, spec, P(None, "model"), P("model"))
    check(attend, (query, key, value, bias, sinks), specs, (local, "attention_backward"))


def test_a_product_by_columns_and_then_by_what_it_sums_over() -> None:
    x, first, second = normal(0, BATCH, LENGTH, DIM), normal(1, 2 * DIM, DIM), normal(2, DIM, 2 * DIM)

    def layers(x: Any, first: Any, second: Any) -> Any:
        return kp.linear(kp.linear(x, first, activation="gelu"), second) + x

    check(
        layers, (x, first, second), (P("data"), P("model"), P(None, "model")), (f"f32[{DIM},{DIM}]", "linear_backward")
    )
    check(kp.matmul, (x, first.T), (P("data"), P(None, "model")), ("kernel_pytorch.matmul",))


def test_types_that_say_where_arrays_lie() -> None:
    """Explicit axes, which jax.make_mesh makes where nothing is said."""
    x, weight = normal(0, BATCH, LENGTH, DIM), normal(1, DIM)
    query = normal(0, BATCH, LENGTH, HEADS, SIZE)
    key, value = normal(1, BATCH, LENGTH, KEY_HEADS, SIZE), normal(2, BATCH, LENGTH, KEY_HEADS, SIZE)
    spec = P("data", None, "model")

    def attend(*arrays):
        return kp.attention(*arrays, causal=True)

    explicit = AxisType.Explicit
    check(kp.rms_norm, (x, weight), (P("data"), P()), ("rms_norm_backward",), explicit)
    check(attend, (query, key, value), (spec, spec, spec), ("attention_backward",), explicit)
    target = jnp.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % DIM
    check(lambda x: kp.cross_entropy(x, target), (x,), (P("data"),), ("cross_entropy",), explicit)
    expected, found, text = both(kp.rms_norm, (x, weight), (P(None, None, "data"), P()), explicit)
    np.testing.assert_allclose(found[1][0], expected[1][0], rtol=1e-4, atol=1e-6)
    assert "all-gather" in text


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_by_rows(reduction: str) -> None:
    hidden, weight = normal(0, BATCH, LENGTH, DIM), normal(1, 11, DIM)
    target = jnp.where(jnp.arange(BATCH * LENGTH) % 5 == 0, -100, jnp.arange(BATCH * LENGTH) % 11).reshape(
        BATCH, LENGTH
    )
    specs = (P("data", "model"), P())

    def of_logits(hidden: Any, weight: Any) -> Any:
        return kp.cross_entropy(hidden @ weight.T, target, reduction=reduction)

    def of_hidden(hidden: Any, weight: Any) -> Any:
        return kp.linear_cross_entropy(hidden, weight, target, reduction=reduction)

    check(of_logits, (hidden, weight), specs, (f"f32[{BATCH // 2},{LENGTH // 2},11]", "kernel_pytorch.cross_entropy"))
    check(of_hidden, (hidden, weight), specs, ("linear_cross_entropy",))


def test_rope_by_batch_and_heads() -> None:
    query, key = normal(0, BATCH, LENGTH, HEADS, SIZE), normal(1, BATCH, LENGTH, KEY_HEADS, SIZE)
    angles = jnp.arange(LENGTH)[:, None] * jnp.array([1.0, 0.1, 0.01, 0.001])

    def turned(query: Any, key: Any) -> Any:
        query, key = kp.rope(query, key, jnp.cos(angles), jnp.sin(angles))
        return query.sum(2) * key.sum(2)

    check(turned, (query, key), (P("data", None, "model"), P("data", None, "model")), ("rope_backward",))

    def normed(query: Any, weight: Any) -> Any:
        return kp.norm_rope(query, weight, jnp.cos(angles), jnp.sin(angles))

    check(normed, (query, normal(2, SIZE)), (P("data", None, "model"), P()), ("norm_rope_backward",))


def test_what_is_not_free_is_gathered_and_right() -> None:
    """A sharded last dimension of a norm, and dropout, whose numbers depend on positions."""
    x, weight = normal(0, BATCH, LENGTH, DIM), normal(1, DIM)
    expected, found, text = both(kp.rms_norm, (x, weight), (P(None, None, "data"), P()))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    assert "all-gather" in text
    expected, found, _ = both(lambda x: kp.dropout(x, 0.5, seed=jax.random.key(0)), (x,), (P("data"),))
    np.testing.assert_allclose(found[1][0], expected[1][0], rtol=1e-5)
