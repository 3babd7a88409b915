"""Cross entropy where each device has some columns of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ._call import Array, call, int64_words


def cross_entropy_partials(
    logits: Array,
    target: Array,
    *,
    vocabulary: int,
    first_column: Any,
    ignore_index: int = -100,
    softcap: float | None = None,
) -> Array:
    """What the columns [first_column, first_column + logits.shape[-1]) of a vocabulary add to its cross entropy.

    Args:
        logits: [..., columns], this part of the logits; target: [...], columns of the whole vocabulary.
        vocabulary: the number of columns of all parts together.
        first_column: where this part begins; under shard_map jax.lax.axis_index(axis) * columns.

    Returns:
        [..., 4] in fp32: the largest logit, the sum of exponentials around it, the target's logit (0 where it is in
        another part) and the sum of the logits. `combine_cross_entropy_partials` takes them from all parts.
    """
    logits = jnp.asarray(logits)
    own = _own_target(logits, target, vocabulary, first_column, ignore_index)
    return _partials(logits, own, vocabulary, ignore_index, float(softcap or 0.0))


def combine_cross_entropy_partials(
    partials: Array,
    target: Array,
    *,
    vocabulary: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Array, Array]:
    """The rows' losses and logarithms of the sum of exponentials, from [parts, ..., 4] of `cross_entropy_partials`."""
    is_ignored = jnp.asarray(target) == ignore_index
    largest = jnp.where(is_ignored, 0.0, partials[..., 0].max(0))
    log_sum = jnp.log(jnp.where(is_ignored, 1.0, (partials[..., 1] * jnp.exp(partials[..., 0] - largest)).sum(0)))
    own, logit_sum = partials[..., 2].sum(0), partials[..., 3].sum(0)
    lse = largest + log_sum
    loss = (1.0 - label_smoothing) * ((largest - own) + log_sum)
    loss = loss + label_smoothing * (lse - logit_sum / vocabulary) + z_loss * lse * lse
    return jnp.where(is_ignored, 0.0, loss), lse


def parallel_cross_entropy(
    logits: Array,
    target: Array,
    *,
    vocabulary: int,
    first_column: Any,
    gather: Callable[[Array], Array],
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Array:
    """The rows' losses where each device has some columns of the vocabulary, inside shard_map; backward gives each
    device the gradient of its own logits.

    Args:
        logits: [..., columns], this device's: columns first_column, first_column + 1, ... of the vocabulary.
        target: [...], indices in the whole vocabulary, the same on all devices.
        gather: [..., 4] -> [devices, ..., 4], everybody's partials: lambda x: jax.lax.all_gather(x, axis).
    """
    cap = float(softcap or 0.0)
    options: dict[str, Any] = {
        "ignore_index": int(ignore_index),
        "label_smoothing": float(label_smoothing),
        "z_loss": float(z_loss),
    }

    @jax.custom_vjp
    def loss(logits: Any, own: Any, target: Any) -> Any:
        return run(logits, own, target)[0]

    def run(logits: Any, own: Any, target: Any) -> Any:
        partials = gather(_partials(logits, own, vocabulary, ignore_index, cap))
        return combine_cross_entropy_partials(partials, target, vocabulary=vocabulary, **options)

    def forward(logits: Any, own: Any, target: Any) -> Any:
        losses, lse = run(logits, own, target)
        return losses, (logits, own, lse)

    def backward(saved: Any, grad: Any) -> Any:
        logits, own, lse = saved
        tensors = {"grad_output": grad.astype(lse.dtype), "logits": logits, "target": own, "lse": lse}
        more = {"softcap": cap, "vocabulary": vocabulary, "first_column": 0}
        return call("cross_entropy_rows_backward", tensors, {**options, **more})["grad_logits"], None, None

    loss.defvjp(forward, backward)
    logits = jnp.asarray(logits)
    own = _own_target(logits, target, vocabulary, first_column, ignore_index)
    made: Array = loss(logits, own, jnp.asarray(target))
    return made


def _own_target(logits: Array, target: Any, vocabulary: int, first_column: Any, ignore_index: int) -> Array:
    """Targets as columns of this part; those of other parts stand behind its last column."""
    target, columns = jnp.asarray(target), logits.shape[-1]
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"cross_entropy_partials: target has shape {list(target.shape)}, logits have {list(logits.shape)}; target "
            f"must be {list(logits.shape[:-1])}"
        )
    own = target - first_column
    if vocabulary > columns:
        own = jnp.where((own >= 0) & (own < columns), own, columns)
    return int64_words(jnp.where(target == ignore_index, ignore_index, own))


def _partials(logits: Array, own: Array, vocabulary: int, ignore_index: int, softcap: float) -> Array:
    options: dict[str, Any] = {
        "ignore_index": int(ignore_index),
        "softcap": softcap,
        "vocabulary": vocabulary,
        "first_column": 0,
    }
    made: Array = call("cross_entropy_partials", {"logits": logits, "target": own}, options)["partials"]
    return made
