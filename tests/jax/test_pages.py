"""A cache in pages from JAX: the same values as from torch, under jit, with donated caches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernel_pytorch.jax as kp


def _batch():
    random = np.random.default_rng(0)
    caches = [jnp.asarray(random.standard_normal((12, 4, 2, 16)), jnp.float32) for _ in range(2)]
    tables = jnp.asarray(random.permutation(12).reshape(3, 4), jnp.int32)
    return (
        jnp.asarray(random.standard_normal((3, 4, 16)), jnp.float32),
        *caches,
        tables,
        jnp.array([5, 0, 16], jnp.int32),
    )


def _dense(query, keys, values, tables, lengths):
    output = np.zeros((3, 4, 16))
    for r, length in enumerate(np.asarray(lengths)):
        k, v = (np.asarray(c)[np.asarray(tables)[r]].reshape(16, 2, 16)[:length].repeat(2, 1) for c in (keys, values))
        if length:
            scores = np.einsum("hd,khd->hk", query[r], k) / 4
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            output[r] = np.einsum("hk,khd->hd", weights / weights.sum(-1, keepdims=True), v)
    return output


def test_paged_attention_under_jit():
    arguments = _batch()
    output, lse = jax.jit(lambda *a: kp.paged_attention(*a, return_lse=True))(*arguments)
    np.testing.assert_allclose(output, _dense(*arguments), atol=1e-5)
    assert np.isneginf(lse[:, 1]).all()
    first = [jnp.swapaxes(cache, 1, 2) for cache in arguments[1:3]]
    np.testing.assert_allclose(
        kp.paged_attention(arguments[0], *first, *arguments[3:], cache_layout="hnd"), output, atol=1e-6
    )


def test_append_kv_writes_donated_caches():
    _, keys, values, _, _ = _batch()
    new, slots = jnp.ones((3, 2, 16)), jnp.array([7, -1, 40], jnp.int32)
    expected = np.asarray(keys).reshape(48, 2, 16).copy()
    expected[[7, 40]] = 1
    append = jax.jit(kp.append_kv, donate_argnums=(2, 3))
    hlo = append.lower(new, new, keys, values, slots).compile().as_text()
    assert "copy(" not in hlo.replace("copy-", "")
    made, _ = append(new, new, keys, values, slots)
    np.testing.assert_array_equal(np.asarray(made).reshape(48, 2, 16), expected)


def test_mla_decode_is_paged_attention_with_one_key_head():
    random = np.random.default_rng(1)
    cache = jnp.asarray(random.standard_normal((12, 4, 24)), jnp.float32)
    query = jnp.asarray(random.standard_normal((3, 5, 24)), jnp.float32)
    _, _, _, tables, lengths = _batch()
    keys = cache[:, :, None]
    expected, lse = kp.paged_attention(query, keys, keys[..., :16], tables, lengths, return_lse=True)
    attend = jax.jit(lambda *a: kp.mla_decode(*a, head_size_v=16, return_lse=True))
    for given in (cache, (cache[..., :16], cache[..., 16:])):
        found = attend(query, given, tables, lengths)
        np.testing.assert_allclose(found[0], expected, atol=1e-6)
        np.testing.assert_allclose(found[1], lse, atol=1e-6)
    slots = tables[:, :, None] * 4 + jnp.arange(4)
    slots = jnp.where(jnp.arange(16) < lengths[:, None], slots.reshape(3, 16), -1)
    np.testing.assert_allclose(kp.mla_decode(query, cache, indices=slots, head_size_v=16), expected, atol=1e-6)


def test_refusals():
    query, keys, values, tables, lengths = _batch()
    with pytest.raises(ValueError, match="cache_layout"):
        kp.paged_attention(query, keys, values, tables, lengths, cache_layout="x")
    with pytest.raises(Exception, match="paged_attention: query has size 8, key_cache has 16"):
        kp.paged_attention(query[..., :8], keys, values, tables, lengths)


def test_append_kv_turns_keys_and_writes_codes_as_two_steps_do():
    random = np.random.default_rng(2)
    key, value = (jnp.asarray(random.standard_normal((5, 2, 16)), jnp.float32) for _ in range(2))
    angles = random.standard_normal((30, 8))
    cos, sin = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    slots, positions = jnp.array([3, 9, -1, 20, 11], jnp.int32), jnp.array([0, 7, 3, 29, 12], jnp.int32)
    empty = jnp.zeros((6, 4, 2, 16), jnp.int8)
    options = {"key_scale": 0.03, "value_scale": 0.02}
    append = jax.jit(
        lambda k, v, a, b: kp.append_kv(k, v, a, b, slots, cos=cos, sin=sin, positions=positions, **options)
    )
    made, _ = append(key, value, empty, empty)
    first, second = key[..., :8], key[..., 8:]
    c, s = cos[positions][:, None], sin[positions][:, None]
    turned = jnp.concatenate([first * c - second * s, second * c + first * s], -1)
    expected = np.zeros((24, 2, 16), np.int8)
    codes = np.clip(np.rint(np.asarray(turned) / np.float32(0.03)), -128, 127)
    for token, slot in enumerate(np.asarray(slots)):
        if slot >= 0:
            expected[slot] = codes[token]
    assert np.abs(np.asarray(made).reshape(24, 2, 16).astype(int) - expected).max() <= 1  # a tie may round either way
    assert (np.asarray(made).reshape(24, 2, 16) != expected).mean() < 0.01
