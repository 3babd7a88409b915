"""ejKernel's functions and registry, ring attention and merged parts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import attention
from jax.sharding import Mesh, PartitionSpec

import kernel_pytorch.jax as kp
from kernel_pytorch.jax import ej

reference = jax.jit(attention, static_argnames=("causal", "window", "softcap"))
BATCH, LENGTH, HEADS, KEY_HEADS, SIZE = 2, 16, 4, 2, 8


def inputs(first: bool = False) -> list[Any]:
    shapes = [(BATCH, LENGTH, heads, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    arrays = [
        jnp.asarray(np.random.default_rng(i).standard_normal(shape), jnp.float32) for i, shape in enumerate(shapes)
    ]
    return [jnp.swapaxes(one, 1, 2) for one in arrays] if first else arrays


def same(one: Any, other: Any, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(one, other, atol=tolerance)


def test_flash_attention_has_ejkernels_meaning() -> None:
    arrays = inputs()
    bias = jax.random.normal(jax.random.key(5), (BATCH, HEADS, LENGTH, LENGTH))
    same(ej.flash_attention(*arrays, causal=True), reference(*arrays, causal=True))
    same(ej.flash_attention(*arrays, sliding_window=3), reference(*arrays, window=3))
    sinks = jax.random.normal(jax.random.key(6), (HEADS, 3))
    expected = reference(*arrays, None, jax.nn.logsumexp(sinks, -1))
    same(ej.flash_attention(*arrays, None, None, None, sinks), expected)
    capped = 4 * jnp.tanh(
        (jnp.einsum("bqhd,bkhd->bhqk", arrays[0], jnp.repeat(arrays[1], 2, 2)) / SIZE**0.5 + bias) / 4
    )
    weights = jax.nn.softmax(capped, -1)
    after = jnp.einsum("bhqk,bkhd->bqhd", weights, jnp.repeat(arrays[2], 2, 2))
    same(ej.flash_attention(*arrays, bias, logits_soft_cap=4.0), after)
    lengths = jnp.array([0, 5, 5 + LENGTH])
    padded = ej.flash_attention(*arrays, None, lengths, lengths, causal=True)
    same(padded[0, :5], reference(*(one[:1, :5] for one in arrays), causal=True)[0])
    same(padded[1], reference(*(one[1:] for one in arrays), causal=True)[0])
    assert (padded[0, 5:] == 0).all()
    ids = jnp.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) // 5
    keep = (ids[:, None, :, None] == ids[:, None, None]).reshape(BATCH, 1, LENGTH, LENGTH)
    for info in (ej.MaskInfo.from_segments(ids), ej.MaskInfo.from_attention_mask(keep)):
        same(ej.flash_attention(*arrays, mask_info=info), reference(*arrays, keep=keep))


def test_the_other_attentions() -> None:
    arrays = inputs()
    output, weights = ej.attention(*arrays, causal=True, dtype=jnp.float32)
    same(output, reference(*arrays, causal=True))
    same(weights.sum(-1), jnp.ones(weights.shape[:-1]))
    same(ej.scaled_dot_product_attention(*arrays, causal=True), reference(*arrays, causal=True))
    ends = jnp.array([4, LENGTH])
    padded = ej.scaled_dot_product_attention(*arrays, None, None, ends)
    same(padded[0], reference(arrays[0][:1], *(one[:1, :4] for one in arrays[1:]))[0])
    first = inputs(first=True)
    same(jnp.swapaxes(ej.block_sparse_attention(*first), 1, 2), reference(*arrays, causal=True))
    place = jnp.arange(LENGTH)
    keep = (place[:, None] // 6 == place[None] // 6)[None, None]
    chunked = ej.blocksparse_attention(*first, chunk_size=6, block_size=4)
    same(jnp.swapaxes(chunked, 1, 2), reference(*arrays, causal=True, keep=keep))


def test_mean_pooling_is_both() -> None:
    x = np.random.default_rng(0).standard_normal((2, 6, 3, 4)).astype(np.float32)
    same(ej.mean_pooling(x, chunk_size=3), x.reshape(2, 2, 3, 3, 4).mean(2))
    same(ej.mean_pooling(x[:, :, 0]), x[:, :, 0].mean(1))


def test_grouped_matmul_and_its_gradients() -> None:
    lhs, rhs = (
        np.random.default_rng(i).standard_normal(shape, np.float32) for i, shape in enumerate(((9, 6), (3, 6, 5)))
    )
    sizes = jnp.array([4, 0, 3])

    def reference(lhs: Any, rhs: Any) -> Any:
        return jnp.concatenate([lhs[:4] @ rhs[0], lhs[4:7] @ rhs[2], jnp.zeros((2, 5))])

    same(ej.grouped_matmul(lhs, rhs, sizes), reference(lhs, rhs))
    same(ej.grouped_matmulv2(lhs, jnp.swapaxes(rhs, 1, 2), sizes, transpose_rhs=True), reference(lhs, rhs))
    same(ej.grouped_matmul(lhs, rhs, sizes, None, jnp.ones((9, 5))), reference(lhs, rhs) + 1)
    ours, expected = (
        jax.jit(jax.grad(lambda lhs, rhs, f=f: (f(lhs, rhs) ** 2).sum(), (0, 1)))(lhs, rhs)
        for f in (lambda lhs, rhs: ej.grouped_matmul(lhs, rhs, sizes), reference)
    )
    for one, other in zip(ours, expected, strict=True):
        same(one, other, 1e-4)


def test_registry() -> None:
    assert {"flash_attention", "ring_attention", "mean_pooling"} <= set(ej.kernel_registry.list_algorithms())
    assert ej.kernel_registry.get("flash_attention") is ej.flash_attention
    assert ej.kernel_registry.get("Flash_Attention", platform="cuda", backend="gpu") is ej.flash_attention
    for wrong in ({"platform": "triton"}, {"backend": "tpu"}):
        with pytest.raises(ValueError, match="cuda/gpu, xla/cpu"):
            ej.kernel_registry.get("flash_attention", **wrong)
    registry = ej.KernelRegistry()
    for priority in (1, 5, 5):
        registry.register("twice", "xla", "any", priority)(lambda priority=priority: priority)
    assert registry.get("twice")() == 5 and len(registry.list_implementations("twice")) == 3
    with pytest.raises(ValueError, match="twice"):
        registry.get("thrice")


def test_what_has_no_effect_is_refused() -> None:
    for options, words in [
        ({"platform": "triton"}, "triton"),
        ({"cfg": {}}, "cfg"),
        ({"normalize_output": False}, "normal"),
    ]:
        with pytest.raises((TypeError, ValueError), match=words):
            ej.flash_attention(*inputs(), **options)


def test_parts_merge_to_the_whole() -> None:
    query, key, value = inputs()
    parts = [kp.attention(query, key[:, a:b], value[:, a:b], return_lse=True) for a, b in ((0, 5), (5, LENGTH))]
    output, lse = kp.merge_attention(*parts[0], *parts[1])
    whole = kp.attention(query, key, value, return_lse=True)
    same(output, whole[0])
    same(lse, whole[1])
    nothing = jnp.zeros_like(output), jnp.full_like(lse, -jnp.inf)
    same(kp.merge_attention(output, lse, *nothing)[0], output)
    assert not jnp.isnan(kp.merge_attention(*nothing, *nothing)[0]).any()


@pytest.mark.skipif(len(jax.devices()) < 4, reason="it takes four devices")
@pytest.mark.parametrize("causal", [False, True])
def test_ring_attention(causal: bool) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("ring",))
    spec = PartitionSpec(None, "ring")

    def ring(*arrays: Any) -> Any:
        def function(*parts):
            return ej.ring_attention(*parts, axis_name="ring", causal=causal)

        return jax.shard_map(function, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)(*arrays)

    arrays = inputs()
    same(jax.jit(ring)(*arrays), reference(*arrays, causal=causal))
    losses = (ring, lambda *arrays: reference(*arrays, causal=causal))
    gradients = [jax.jit(jax.grad(lambda *a, f=f: (f(*a) ** 2).sum(), argnums=(0, 1, 2)))(*arrays) for f in losses]
    for one, other in zip(*gradients, strict=True):
        same(one, other, 1e-4)
    same(ej.ring_attention(*arrays, causal=causal), reference(*arrays, causal=causal))


def test_recurrent_attentions_are_the_recurrence() -> None:
    """Values of both directions, and the gradient of a decay, which upstream has not."""
    random = np.random.default_rng(0)
    query, key, value = (jnp.asarray(random.standard_normal((1, 6, 2, 3)), jnp.float32) for _ in range(3))
    gate = -jnp.abs(jnp.asarray(random.standard_normal((1, 6, 2, 3)), jnp.float32))

    def scan(query: Any, key: Any, value: Any, gates: Any) -> Any:
        state, outputs = jnp.zeros((1, 2, 3, 3)), []
        for t in range(6):
            state = state * jnp.exp(gates[:, t])[..., None] + key[:, t, :, :, None] * value[:, t, :, None, :]
            outputs.append(jnp.einsum("bhi,bhij->bhj", query[:, t], state) * 3**-0.5)
        return jnp.stack(outputs, 1)

    same(ej.gla_attention(query, key, value, gate), scan(query, key, value, gate))
    flipped = scan(*(jnp.flip(x, 1) for x in (query, key, value, gate)))
    same(ej.recurrent_attention(query, key, value, gate, reverse=True), jnp.flip(flipped, 1))
    decay = -(8 / 2) * (1 - 1 / 4) * jnp.arange(2.0)
    steady = jnp.broadcast_to(decay[:, None], gate.shape)
    same(ej.lightning_attention(query, key, value, 1, 4), scan(query, key, value, steady))

    def ours(decay: Any) -> Any:
        return ej.recurrent_attention(query, key, value, None, decay).sum()

    def theirs(decay: Any) -> Any:
        return scan(query, key, value, jnp.broadcast_to(decay[:, None], gate.shape)).sum()

    same(jax.grad(ours)(decay - 0.1), jax.grad(theirs)(decay - 0.1))

    def of_state(key: Any) -> Any:
        return ej.recurrent_attention(query, key, value, return_state=True)[1].sum()

    same(jax.grad(of_state)(key), jnp.broadcast_to(value.sum(-1, keepdims=True), key.shape))
    with pytest.raises(ValueError, match="gv is not supported"):
        ej.recurrent_attention(query, key, value, None, None, None, gate)


def test_native_sparse_attention_reads_the_named_blocks_once() -> None:
    query, key, value = inputs()
    cfg = ej.NativeSparseAttentionConfig(block_size=4)
    lists = jnp.broadcast_to(jnp.array([3, 0, 1, 2]), (BATCH, LENGTH, KEY_HEADS, 4))
    same(ej.apply_native_sparse_attention(query, key, value, lists, cfg=cfg), reference(query, key, value, causal=True))
    counts = jnp.full((BATCH, LENGTH, KEY_HEADS), 2)  # blocks 3 and 0
    keep = (jnp.arange(LENGTH) // 4 == 0) | (jnp.arange(LENGTH) // 4 == 3)
    keep = (keep & (jnp.arange(LENGTH) <= jnp.arange(LENGTH)[:, None]))[None, None]
    same(
        ej.apply_native_sparse_attention(query, key, value, lists, counts, cfg=cfg),
        reference(query, key, value, keep=keep),
    )
    # As many blocks as there are: short prefixes miss some, which are skipped.
    gate = jnp.full((BATCH, LENGTH, HEADS), 0.5)
    means = [x.reshape(BATCH, LENGTH // 4, 4, KEY_HEADS, SIZE).mean(2) for x in (key, value)]
    keep = (jnp.arange(4) * 4 + 3 <= jnp.arange(LENGTH)[:, None])[None, None]
    of_means = jnp.where(keep.any(-1)[0, 0][:, None, None], reference(query, *means, keep=keep), 0)
    same(
        ej.native_sparse_attention(query, key, value, gate, None, None, 4, cfg=cfg),
        reference(query, key, value, causal=True) + 0.5 * of_means,
    )
    with pytest.raises(ValueError, match="block_counts is an array"):
        ej.native_sparse_attention(query, key, value, gate, None, None, counts)
