"""Score and mask functions, and block masks, against attention on a matrix of scores in jax.numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernel_pytorch.jax as kp

BATCH, LENGTH, HEADS, SIZE = 2, 20, 2, 8
SLOPES = jnp.array([0.5, 0.25])
TABLE = jax.random.normal(jax.random.key(9), (HEADS, 2 * LENGTH))
IDS = jnp.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) // 7


def inputs() -> list[Any]:
    return [jax.random.normal(jax.random.key(i), (BATCH, LENGTH, HEADS, SIZE)) for i in range(3)]


def reference(query: Any, key: Any, value: Any, score_mod: Any = None, mask_mod: Any = None, *captured: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / SIZE**0.5
    places = jnp.meshgrid(*(jnp.arange(size) for size in scores.shape), indexing="ij")
    if score_mod is not None:

        def changed(score, *at):
            return score_mod(score, *at, *captured)

        scores = jax.vmap(changed)(scores.ravel(), *(at.ravel() for at in places)).reshape(scores.shape)
    if mask_mod is not None:
        kept = jax.vmap(lambda *at: mask_mod(*at, *captured))(*(at.ravel() for at in places)).reshape(scores.shape)
        scores = jnp.where(kept, scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), value)


SCORE_MODS = {
    "alibi": lambda score, b, h, q, k: score + SLOPES[h] * (k - q),
    "softcap": lambda score, b, h, q, k: 5 * jnp.tanh(score / 5),
    "table": lambda score, b, h, q, k: score + TABLE[h, q - k + LENGTH],
    "causal": lambda score, b, h, q, k: jnp.where(q >= k, score, -jnp.inf),
    "many": lambda score, b, h, q, k: jax.nn.relu(score) * jax.nn.sigmoid(score) + score**2 - jnp.clip(score, -1, 1)
    + jnp.abs(q - k) ** 0.5 + jnp.sign(score) * (q // 3) + jnp.minimum(q % 4, 2) + jnp.log1p(jnp.exp(-jnp.abs(score))),
}  # fmt: skip
MASK_MODS = {
    "window": lambda b, h, q, k: (q - k < 5) & (q >= k),
    "documents": lambda b, h, q, k: (IDS[b, q] == IDS[b, k]) | (k % 9 == 0),
    "not": lambda b, h, q, k: ~((k > q) | (q - k > 3 + h)),
}


def close(ours: Any, theirs: Any, arrays: Any) -> None:
    np.testing.assert_allclose(ours(*arrays), theirs(*arrays), atol=2e-5)
    which = tuple(range(len(arrays)))
    gradients = (jax.jit(jax.grad(lambda *a, f=f: (f(*a) ** 2).sum(), argnums=which))(*arrays) for f in (ours, theirs))
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=3e-4, rtol=1e-3)


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_functions(name: str) -> None:
    mod = SCORE_MODS[name]
    close(lambda *a: kp.attention(*a, score_mod=mod), lambda *a: reference(*a, mod), inputs())


@pytest.mark.parametrize("name", MASK_MODS)
def test_mask_functions_and_their_blocks(name: str) -> None:
    mod = MASK_MODS[name]
    close(lambda *a: kp.attention(*a, mask_mod=mod), lambda *a: reference(*a, None, mod), inputs())
    blocks = kp.create_block_mask(mod, BATCH, HEADS, LENGTH, LENGTH, 8)
    close(lambda *a: kp.attention(*a, block_mask=blocks), lambda *a: reference(*a, None, mod), inputs())


def test_captured_arrays_have_gradients() -> None:
    def passed(score: Any, b: Any, h: Any, q: Any, k: Any, table: Any) -> Any:
        return score + table[h, q - k + LENGTH]

    def ours(query: Any, key: Any, value: Any, table: Any) -> Any:
        return kp.attention(query, key, value, score_mod=passed, captured=(table,))

    def closed_over(query: Any, key: Any, value: Any, table: Any) -> Any:
        def mod(score, b, h, q, k):
            return score + table[h, q - k + LENGTH]

        return kp.attention(query, key, value, score_mod=mod)

    def theirs(query, key, value, table):
        return reference(query, key, value, passed, None, table)

    close(ours, theirs, [*inputs(), TABLE])
    close(closed_over, theirs, [*inputs(), TABLE])


def test_an_array_of_an_inner_function() -> None:
    inner = jax.jit(lambda h: SLOPES[h])
    ours = kp.attention(*inputs(), score_mod=lambda score, b, h, q, k: score + inner(h) * (k - q))
    np.testing.assert_allclose(ours, kp.attention(*inputs(), score_mod=SCORE_MODS["alibi"]), atol=1e-6)


def test_vmap_keeps_the_batch_of_a_function() -> None:
    mod = SCORE_MODS["alibi"]

    def by_batch(score, b, h, q, k):
        return score + b * mod(score, b, h, q, k)

    arrays = [jnp.stack([one, one + 1]) for one in inputs()]
    ours = jax.vmap(lambda *a: kp.attention(*a, score_mod=by_batch))(*arrays)
    np.testing.assert_allclose(ours, jax.vmap(lambda *a: reference(*a, by_batch))(*arrays), atol=2e-5)


def test_what_a_function_cannot_do() -> None:
    for mod, words in [
        (lambda score, b, h, q, k: jax.lax.lgamma(score), "lgamma"),
        (lambda score, b, h, q, k: score + TABLE[0], "array of shape"),
        (lambda score, b, h, q, k: score + jnp.sort(SLOPES)[h], "array of shape"),
        (lambda score, b, h, q, k: jnp.stack([score, score]), "one scalar|array"),
    ]:
        with pytest.raises(TypeError, match=words):
            kp.attention(*inputs(), score_mod=mod)
    with pytest.raises(ValueError, match="captured"):
        kp.attention(*inputs(), captured=(TABLE,))
