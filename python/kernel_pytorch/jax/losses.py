"""Cross entropy of logits, of logits that are never stored, and where each device has some columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ._call import Array, call, parameter_for
from ._forward_mode import guarded
from ._gradients import differentiable
from ._sharding import has_mesh

_REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    logits: Array,
    target: Array,
    *,
    weight: Array | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> Array:
    """The cross entropy of softmax(logits) against target, over the last dimension.

    Args:
        logits: [..., classes].
        target: [...], integers; rows with ignore_index count for nothing.
        weight: [classes], of each class.
        z_loss: z_loss * lse^2 is added to a row's loss.
        softcap: logits become softcap * tanh(logits / softcap) first.
        reduction: "mean" (over what the rows' targets weigh), "sum" or "none".
    """
    logits = jnp.asarray(logits)
    tensors = {
        "logits": logits,
        "target": _target_for("cross_entropy", logits, target),
        "weight": parameter_for(logits, weight),
    }
    options = _options("cross_entropy", ignore_index, label_smoothing, z_loss, softcap)
    if _is_reduced("cross_entropy", reduction):
        # On several devices the mean is a sum, which the devices add up, by what all targets weigh.
        is_divided_here = reduction == "mean" and has_mesh()
        options["mean"] = reduction == "mean" and not is_divided_here
        loss = differentiable("cross_entropy", tensors, options, _reduced_gradient, saves=("grad_logits",))[0]
        return loss / _weights(target, weight, ignore_index, loss.dtype) if is_divided_here else loss  # type: ignore[no-any-return]
    saves = ("logits", "target", "weight", "lse")
    return differentiable("cross_entropy_rows", tensors, options, _rows_gradient, saves=saves)[0]  # type: ignore[no-any-return]


def linear_cross_entropy(
    hidden: Array,
    weight: Array,
    target: Array,
    *,
    class_weight: Array | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    accumulate_dtype: Any = None,
    chunk_bytes: int | None = None,
) -> Array:
    """`cross_entropy` of hidden @ weight.T, whose logits are never stored as a whole.

    Args:
        hidden: [..., columns]; weight: [classes, columns]; target: [...]; class_weight: [classes].
        reduction: "mean" or "sum".
        accumulate_dtype: what the weight's gradient is added up in over the chunks: None is its own type, or fp32.
        chunk_bytes: the most that a chunk of logits may take.
    """
    if accumulate_dtype not in (None, jnp.float32) and jnp.dtype(accumulate_dtype) != jnp.asarray(weight).dtype:
        raise ValueError(
            f"linear_cross_entropy: accumulate_dtype is {jnp.dtype(accumulate_dtype)}; it is None, the weight's type "
            "or float32"
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(f'linear_cross_entropy: reduction is "{reduction}"; it is "mean" or "sum"')
    hidden, weight = jnp.asarray(hidden), jnp.asarray(weight)
    target = jnp.asarray(target)
    tensors = {
        "hidden": hidden,
        "weight": weight.astype(hidden.dtype),
        "target": _target_for("linear_cross_entropy", hidden, target),
        "class_weight": parameter_for(hidden, class_weight),
    }
    options = _options("linear_cross_entropy", ignore_index, label_smoothing, z_loss, softcap)
    is_wide = accumulate_dtype is not None and jnp.dtype(accumulate_dtype) == jnp.float32
    options |= {"chunk_bytes": chunk_bytes, "wide": is_wide}
    loss: Array = differentiable(
        "linear_cross_entropy",
        tensors,
        options,
        _linear_gradient,
        saves=("grad_hidden", "grad_weight"),
        forward_flags=("hidden_grad", "weight_grad"),
    )[0]
    if reduction == "sum":  # the op returns the mean over all rows
        return loss * target.size
    return loss * (target.size / _weights(target, class_weight, ignore_index, loss.dtype))


def _weights(target: Any, class_weight: Any, ignore_index: int, dtype: Any) -> Array:
    """What the targets weigh in a mean."""
    target = jnp.asarray(target)
    counts = target != ignore_index
    weights = counts.astype(dtype)
    if class_weight is not None:
        weights = jnp.where(counts, jnp.asarray(class_weight, dtype)[jnp.where(counts, target, 0)], 0)
    total: Array = jax.lax.stop_gradient(weights.sum())
    return total


def _options(
    op: str, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None
) -> dict[str, Any]:
    if softcap is not None and softcap <= 0.0:
        raise ValueError(f"{op}: softcap is {softcap}; it must be positive, or None for none")
    return {
        "ignore_index": int(ignore_index),
        "label_smoothing": float(label_smoothing),
        "z_loss": float(z_loss),
        "softcap": float(softcap or 0.0),
    }


def _is_reduced(op: str, reduction: str) -> bool:
    if reduction not in _REDUCTIONS:
        raise ValueError(f'{op}: reduction is "{reduction}"; it is one of {", ".join(_REDUCTIONS)}')
    return reduction != "none"


def _target_for(op: str, logits: Array, target: Any) -> Array:
    target = jnp.asarray(target)
    if not jnp.issubdtype(target.dtype, jnp.integer):
        raise TypeError(f"{op}: target has the type {target.dtype}; it must be integers")
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"{op}: target has shape {list(target.shape)}, the first argument {list(logits.shape)}; "
            f"target must be {list(logits.shape[:-1])}"
        )
    return _indices(target)


def _indices(target: Array) -> Array:
    """As the op takes them: 32 or 64 bits with a sign."""
    return target if target.dtype in (jnp.int32, jnp.int64) else target.astype(jnp.int32)


def _reduced_gradient(values: Any, grads: Any, wanted: Any) -> Any:
    return {"logits": values["grad_logits"] * grads["output"]}


def _rows_gradient(values: Any, grads: Any, wanted: Any) -> Any:
    tensors = {name: values.get(name) for name in ("logits", "target", "weight", "lse")}
    options = {name: values[name] for name in ("ignore_index", "label_smoothing", "z_loss", "softcap")}
    options |= {"vocabulary": values["logits"].shape[-1], "first_column": 0}
    outputs = call("cross_entropy_rows_backward", {"grad_output": grads["output"], **tensors}, options)
    return {"logits": next(iter(outputs.values()))}


def _linear_gradient(values: Any, grads: Any, wanted: Any) -> Any:
    return {name: values[f"grad_{name}"] * grads["output"] for name in ("hidden", "weight") if name in wanted}


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
    made: Array = loss(guarded("parallel_cross_entropy", logits), own, jnp.asarray(target))
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
    return _indices(jnp.where(target == ignore_index, ignore_index, own))


def _partials(logits: Array, own: Array, vocabulary: int, ignore_index: int, softcap: float) -> Array:
    options: dict[str, Any] = {
        "ignore_index": int(ignore_index),
        "softcap": softcap,
        "vocabulary": vocabulary,
        "first_column": 0,
    }
    made: Array = call("cross_entropy_partials", {"logits": logits, "target": own}, options)["partials"]
    return made
