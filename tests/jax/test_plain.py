"""What other devices than CPUs and NVIDIA GPUs compute, forced here: plain jnp, with the same results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Case
from checks import close, expected, results_and_gradients_of

import kernel_pytorch.jax as kp
from kernel_pytorch.jax import _plain


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plain, "is_needed", lambda: True)


# One row for each formula.
ROWS = (
    *("rms_norm with an offset", "layer_norm with a residual", "gelu, bias, residual", "gated_activation with biases"),
    *("gated_activation_packed", "softmax with an added mask", "cross_entropy of rows", "linear_cross_entropy"),
    *(
        "embedding",
        "mean_pool",
        "mean_pool of packed sequences",
        "chunk_mean_pool",
        "rope",
        "norm_rope",
        "matmul of batches",
    ),
    *("linear with gelu and a residual", "gated mlp", "attention with bias and sinks", "attention_packed with rope"),
)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ROWS], ids=lambda case: case.name)
def test_every_op(case: Case, forced: None) -> None:
    arrays = case.arrays()
    lowered = jax.jit(results_and_gradients_of(case.ours, len(arrays))).lower(*arrays, *case.constants)
    assert "kernel_pytorch." not in lowered.as_text()
    close(lowered.compile()(*arrays, *case.constants), expected(case, *arrays))


_ANGLES = jnp.arange(6.0)[:, None] * jnp.array([1.0, 0.1])
# What the table above has no row for: against our own kernels.
OTHERS = {
    "softmax": lambda x: kp.softmax(x, causal=True, mask=x > -1),
    "log_softmax": lambda x: kp.log_softmax(x, scale=2.0),
    "smoothing": lambda x: kp.cross_entropy(
        x, jnp.arange(6) % 5, label_smoothing=0.1, z_loss=0.1, softcap=3.0, weight=jnp.arange(1.0, 9.0), ignore_index=2
    ),
    "losses": lambda x: kp.linear_cross_entropy(x, x, jnp.arange(6) - 1, reduction="sum", ignore_index=-1),
    "padding": lambda x: kp.embedding(jnp.array([1, 1, 0]), x, padding_idx=1),
    "alibi": lambda x: kp.attention(*[x.reshape(1, 6, 2, 4)] * 3, alibi_slopes=jnp.array([0.5, 0.1]), causal=True),
    "lengths": lambda x: kp.attention(*[x.reshape(2, 3, 2, 4)] * 3, key_lengths=jnp.array([2, 3]), causal=True),
    "segments": lambda x: kp.attention(
        *[x.reshape(2, 3, 2, 4)] * 3,
        query_segment_ids=jnp.array([[0, 0, 1], [2, -1, 2]]),
        key_segment_ids=jnp.array([[0, 1, 1], [2, -1, 2]]),
        window=(1, 2),
        softcap=2.0,
        softcap_after_bias=True,
    ),
    "interleaved": lambda x: kp.rope(
        x.reshape(1, 6, 1, 8),
        None,
        jnp.cos(_ANGLES),
        jnp.sin(_ANGLES),
        interleaved=True,
        positions=jnp.arange(6)[::-1],
    )[0],
    "lse": lambda x: kp.attention(*[x.reshape(1, 6, 2, 4)] * 3, return_lse=True, layout="bshd"),
    "bf16": lambda x: kp.rms_norm(x, out_dtype=jnp.bfloat16).astype(jnp.float32),
}


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(1).standard_normal((6, 8)).astype(np.float32)

    def all_of_them() -> Any:
        def one(function: Any) -> Any:
            def loss(x: Any) -> Any:
                return sum((leaf**2).sum() for leaf in jax.tree.leaves(function(x)))

            return jax.value_and_grad(loss)

        return jax.jit(lambda x: {name: one(function)(x) for name, function in OTHERS.items()})(x)

    expected = all_of_them()
    monkeypatch.setattr(_plain, "is_needed", lambda: True)
    found = all_of_them()
    for name in OTHERS:
        for mine, other in zip(found[name], expected[name], strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-4, rtol=1e-3, err_msg=name)


def test_dropout_and_what_is_missing(forced: None) -> None:
    dropped = kp.dropout(jnp.ones((64, 64)), 0.25, seed=jax.random.key(0))
    assert abs(float((dropped == 0).mean()) - 0.25) < 0.04 and abs(float(dropped.mean()) - 1) < 0.06
    x = jnp.ones((1, 4, 1, 4))
    with pytest.raises(NotImplementedError, match="score_mod"):
        kp.attention(x, x, x, score_mod=lambda score, b, h, q, k: score)
