"""Sampling, merging and ejKernel's functions over pages, against plain formulas."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernel_pytorch.jax as kp
from kernel_pytorch.jax import ej


def random(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


def dense(query: Any, key: Any, value: Any, keep: Any, scale: float) -> Any:
    """[heads, size] over [keys, key heads, size]."""
    groups = query.shape[0] // key.shape[1]
    scores = jnp.einsum("hd,khd->hk", query, jnp.repeat(key, groups, 1)) * scale
    weights = jax.nn.softmax(jnp.where(keep, scores, -jnp.inf), -1)
    return jnp.einsum("hk,khd->hd", weights, jnp.repeat(value, groups, 1))


def test_sample_is_torchs_and_depends_on_its_own_row() -> None:
    logits = random(4, 300) * 3
    draw = jax.jit(lambda x: kp.sample(x, temperature=0.8, top_k=50, top_p=0.9, seeds=[1, 2, 3, 4], positions=9))
    tokens = draw(logits)
    assert tokens.dtype == jnp.int32
    np.testing.assert_array_equal(kp.sample(logits, temperature=0), jnp.argmax(logits, -1))
    torch = pytest.importorskip("torch")
    from kernel_pytorch import functional

    theirs = functional.sample(
        torch.from_numpy(np.array(logits)), temperature=0.8, top_k=50, top_p=0.9, seeds=torch.arange(1, 5), positions=9
    )
    np.testing.assert_array_equal(tokens, theirs.numpy())
    with pytest.raises(ValueError, match="seeds are missing"):
        kp.sample(logits)


def test_merged_parts_of_pages_are_the_whole() -> None:
    cache = [random(6, 4, 2, 16), random(6, 4, 2, 17)[..., :16]]
    query, tables = random(2, 4, 16), jnp.array([[0, 1, 2], [0, 1, 3]], jnp.int32)
    whole = kp.paged_attention(query, *cache, tables, jnp.array([11, 9], jnp.int32))
    prefix = kp.paged_attention(
        query, *cache, tables[:, :2], jnp.array([8, 8], jnp.int32), causal=False, return_lse=True
    )
    own = kp.paged_attention(query, *cache, tables[:, 2:], jnp.array([3, 1], jnp.int32), return_lse=True)
    np.testing.assert_allclose(kp.merge_attention(*prefix, *own, return_lse=False), whole, atol=1e-5)


def test_page_attention() -> None:
    keys, values = random(5, 2, 4, 16), random(5, 2, 4, 16) + 1  # [pages, heads, rows, size]
    query, tables = random(2, 4, 16), jnp.array([[3, 1], [0, -1]], jnp.int32)
    lengths = jnp.array([7, 2], jnp.int32)
    made = jax.jit(ej.page_attention)(query, keys, values, lengths, tables)
    for row in range(2):
        flat = [jnp.swapaxes(cache, 1, 2)[jnp.maximum(tables[row], 0)].reshape(8, 2, 16) for cache in (keys, values)]
        expected = dense(query[row], *flat, jnp.arange(8) < lengths[row], 0.25)
        np.testing.assert_allclose(made[row], expected, atol=1e-5)


def test_ragged_decode_attention() -> None:
    query, keys, values = random(3, 4, 8), random(3, 10, 2, 8), random(3, 10, 2, 8) + 1
    start, end = jnp.array([0, 3, 2]), jnp.array([10, 7, 4])
    made = ej.ragged_decode_attention(query[:, None], keys, values, start, end, sliding_window=(3, 0))
    place = jnp.arange(10)
    for row in range(3):
        keep = (place >= start[row]) & (place < end[row]) & (end[row] - 1 - place <= 3)
        expected = dense(query[row], keys[row], values[row], keep, 8**-0.5)
        np.testing.assert_allclose(made[row, 0], expected, atol=1e-5)


def _ragged() -> Any:
    queries, tables = random(6, 4, 16), jnp.array([[2, 0, 4], [1, 3, 5], [0, 0, 0]], jnp.int32)
    return queries, tables, jnp.array([9, 6, 4], jnp.int32), jnp.array([0, 1, 5, 6], jnp.int32)


def _expected(queries: Any, rows: Any, tables: Any, lengths: Any, window: int, scale: float) -> Any:
    """`rows`: [pages, 4, 4, 16], keys and values in turns; of the first two sequences."""
    made, starts = [], [0, 1, 5]
    for sequence in range(2):
        flat = rows[tables[sequence]].reshape(12, 4, 16)
        count = starts[sequence + 1] - starts[sequence]
        for i in range(count):
            position = int(lengths[sequence]) - count + i
            place = jnp.arange(12)
            keep = (place <= position) & (place > position - window)
            made.append(dense(queries[starts[sequence] + i], flat[:, 0::2], flat[:, 1::2], keep, scale))
    return jnp.stack([*made, jnp.zeros_like(made[0])])  # the last token belongs to a sequence that does not count


def test_ragged_page_attention() -> None:
    queries, tables, lengths, starts = _ragged()
    pages = random(6, 4, 4, 16)
    made = ej.ragged_page_attention(queries, pages, lengths, tables, starts, jnp.array([2]), sliding_window=5)
    np.testing.assert_allclose(made, _expected(queries, pages, tables, lengths, 5, 0.25), atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_ragged_page_attention_v3_writes_a_donated_cache(dtype: Any) -> None:
    queries, tables, lengths, starts = _ragged()
    keys, values, cache = random(6, 2, 16), random(6, 2, 16) + 1, random(6, 4, 4, 16)
    queries, keys, values, cache = (array.astype(dtype) for array in (queries, keys, values, cache))
    written = np.array(cache)
    for token, (page, row) in enumerate([(4, 0), (1, 2), (1, 3), (3, 0), (3, 1)]):
        written[page, row, 0::2], written[page, row, 1::2] = keys[token], values[token]
    packing = 32 // (8 * cache.dtype.itemsize)
    packed = cache.reshape(6, 4, 4 // packing, packing, 16)
    arguments = (queries, keys, values, packed, lengths, tables.reshape(-1), starts, jnp.array([1, 1, 2]))
    call = jax.jit(lambda *a: ej.ragged_page_attention_v3(*a, softmax_scale=0.25), donate_argnums=3)
    hlo = call.lower(*arguments).compile().as_text()
    whole = f"[6,4,{4 // packing},{packing},16]"
    assert not [line for line in hlo.splitlines() if whole in line and (" copy(" in line or " convert(" in line)]
    output, after = call(*arguments)
    np.testing.assert_array_equal(np.asarray(after).reshape(6, 4, 4, 16), written)
    wide = [jnp.asarray(array, jnp.float32) for array in (queries, written)]
    expected = _expected(wide[0], wide[1], tables, lengths, 100, 0.25)
    np.testing.assert_allclose(np.asarray(output, np.float32), expected, atol=1e-5 if dtype == jnp.float32 else 0.02)


def _mla_dense(query: Any, latent: Any, w_kc: Any, w_vc: Any, b_q: Any, b_k: Any, starts: Any, causal: bool) -> Any:
    key, value = (jnp.repeat(jnp.einsum("btr,rhd->bthd", latent, w), 2, 2) for w in (w_kc, w_vc))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) + jnp.einsum("bqd,bkd->bqk", b_q, b_k)[:, None]
    place = jnp.arange(query.shape[1])
    owner = jnp.searchsorted(starts[1:], place, side="right")
    keep = (owner[:, None] == owner[None]) & ((place[:, None] >= place[None]) | (not causal))
    weights = jax.nn.softmax(jnp.where(keep, scores * query.shape[-1] ** -0.5, -jnp.inf), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def test_mla_attention_is_attention_of_products_of_latent_rows() -> None:
    arguments = random(2, 7, 4, 16), random(2, 7, 12), random(12, 2, 16), random(12, 2, 17)[..., :16]
    rope = random(2, 7, 8), random(2, 7, 9)[..., :8]
    whole = jnp.array([0, 7])
    made = jax.jit(lambda *a: ej.mla_attention(*a, causal=True))(*arguments, *rope)
    np.testing.assert_allclose(made, _mla_dense(*arguments, *rope, whole, True), atol=2e-5)
    first = [array[:1] for array in (arguments[0], arguments[1])]
    packed, starts = [*first, *arguments[2:], rope[0][:1], rope[1][:1]], jnp.array([0, 3, 7])
    np.testing.assert_allclose(ej.flash_mla(*packed, starts), _mla_dense(*packed, starts, False), atol=2e-5)
    loss = lambda f: lambda latent, w: (f(arguments[0], latent, w) ** 2).sum()  # noqa: E731
    found = jax.grad(loss(lambda q, x, w: ej.mla_attention(q, x, w, arguments[3], *rope, causal=True)), (0, 1))
    wanted = jax.grad(loss(lambda q, x, w: _mla_dense(q, x, w, arguments[3], *rope, whole, True)), (0, 1))
    for one, other in zip(found(*arguments[1:3]), wanted(*arguments[1:3])):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-3)
    assert ej.kernel_registry.get("flash_mla") is ej.kernel_registry.get("mla_attention")
    with pytest.raises(ValueError, match="batch of one"):
        ej.mla_attention(*arguments, *rope, starts)
