"""What only a GPU shows: calls inside XLA's command buffers, with scratch memory that XLA planned."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, mean_cross_entropy, rms_norm

import kernel_pytorch.jax as kp
from kernel_pytorch.jax import _workspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="jax has no GPU here"),
]
_TARGET = jnp.arange(64) % 48


def step(norm: Any, loss: Any, x: Any, weight: Any) -> Any:
    """Enough calls in a row for one graph; the loss needs scratch memory."""
    losses = []
    for _ in range(6):
        x = jnp.tanh(norm(x, weight)) + x
        losses.append(loss(x, _TARGET))
    return jnp.stack(losses)


def test_replays_of_captured_calls_are_right() -> None:
    ours = jax.jit(jax.value_and_grad(lambda x, w: step(kp.rms_norm, kp.cross_entropy, x, w).sum(), argnums=(0, 1)))
    reference = jax.jit(jax.value_and_grad(lambda x, w: step(rms_norm, mean_cross_entropy, x, w).sum(), argnums=(0, 1)))
    kept = []  # so that buffers move and graphs are updated
    for seed in range(6):
        x, weight = (jax.random.normal(jax.random.key(seed + i), shape) for i, shape in enumerate(((64, 48), (48,))))
        kept.append(ours(x, weight))
        other = jax.jit(lambda x: kp.cross_entropy(x, _TARGET))(x + 1)  # uses scratch memory of its own in between
        for one, expected in zip(jax.tree.leaves(kept[-1]), jax.tree.leaves(reference(x, weight))):
            np.testing.assert_allclose(one, expected, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(other, mean_cross_entropy(x + 1, _TARGET), rtol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_call_finds_the_workspace_it_needs(case: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """No call allocates: the library warns where a captured one had to."""
    arrays = case.arrays()

    def loss(*arrays: Any) -> Any:
        return sum(leaf.sum() for leaf in jax.tree.leaves(case.ours(*arrays, *case.constants)))

    chain = jax.jit(lambda *arrays: [jax.grad(loss)(arrays[0] + i, *arrays[1:]) for i in range(8)])
    jax.block_until_ready(chain(*arrays))
    assert "too few" not in capfd.readouterr().err


def test_some_op_needs_a_workspace() -> None:
    tensors = ("logits", "fp32", (64, 48)), ("target", "int64", (64,)), ("output", "fp32", ())
    assert _workspace.bytes_for("cross_entropy", tensors, ()) > 0
