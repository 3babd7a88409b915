"""The same functions in plain jnp, for platforms that the library has no kernels for (TPUs, Metal, AMD).

Chosen while tracing, by the process's default backend: with lax.platform_dependent every gradient would keep what both
ways need. A formula takes the op's arguments by name and returns its outputs by name; sums are fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..utils.rehearsal import call_on_cpu

Array = Any
Values = Mapping[str, Any]
_FORMULAS: dict[str, Callable[[Values], dict[str, Array]]] = {}


@functools.cache
def is_needed() -> bool:
    """Whether this process's devices are neither CPUs nor NVIDIA's."""
    device = jax.local_devices()[0]
    return device.platform != "cpu" and "cuda" not in device.client.platform_version.lower()


class NoFormula(Exception):
    """Raised by a formula that has not the option it is asked for."""


def computed(op: str, values: Values) -> dict[str, Array] | None:
    """The outputs by name; None on CPUs and NVIDIA GPUs, and where no formula has the op and its options: there the
    host computes it (hosted)."""
    if not is_needed() or op not in _FORMULAS:
        return None
    try:
        return _FORMULAS[op](values)
    except NoFormula:
        return None


def hosted(
    op: str,
    operands: Sequence[Any],
    results: Sequence[Any],
    structs: Sequence[jax.ShapeDtypeStruct],
    attributes: Mapping[str, Any],
    updated: Sequence[int],
) -> Any:
    """A call by the CPU's kernels on copies: for what there is no formula for. XLA hands the arrays to this process.

    As `_call.emit`, whose buffers `operands` and `results` are; `structs` are the results', then the updated's.
    """
    options = tuple(attributes.items())

    def compute(*given: Any) -> tuple[np.ndarray[Any, Any], ...]:
        arrays = [np.array(one) if i in updated else np.ascontiguousarray(one) for i, one in enumerate(given)]
        made = [np.empty(struct.shape, struct.dtype) for struct in structs[: len(results)]]
        tensors = []
        for (parts, _), array in zip((*operands, *results), (*arrays, *made), strict=True):
            for part in parts:
                described = part.described(array)
                offset = part.begin * array.shape[-1] * array.itemsize if part.size >= 0 else 0
                strides = described[3] if len(described) > 3 else None
                tensors.append((*described[:3], strides, array.ctypes.data + offset))
        call_on_cpu(op, tuple(tensors), options)
        return (*made, *(arrays[place] for place in updated))

    return jax.pure_callback(compute, tuple(structs), *(array for _, array in operands), vmap_method="sequential")


def formula(*ops: str) -> Callable[[Any], Any]:
    def add(function: Any) -> Any:
        _FORMULAS.update(dict.fromkeys(ops, function))
        return function

    return add


def widened(x: Array) -> Array:
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def _integers(words: Array) -> Array:
    """Pairs of 32-bit words as integers."""
    return words[..., 0].astype(jnp.int32) if words.dtype == jnp.uint32 else words


def _dropped(x: Array, probability: float, seed: Array) -> Array:
    if not probability:
        return x
    words = jnp.ravel(seed).view(jnp.uint32)[:2]
    kept = jax.random.bernoulli(jax.random.wrap_key_data(words), 1.0 - probability, x.shape)
    return jnp.where(kept, x / (1.0 - probability), 0)


_KINDS: dict[str, Callable[[Array], Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "identity": lambda x: x,
}


def activated(kind: str, x: Array) -> Array:
    if kind not in _KINDS:
        raise ValueError(f"activation: kind is {kind!r}; known are {', '.join(_KINDS)}")
    return _KINDS[kind](x)


@formula("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm")
def _norm(values: Values) -> dict[str, Array]:
    x = values["x"]
    total = x if values.get("residual") is None else x + values["residual"]
    wide = widened(total)
    if values["op"].endswith("layer_norm"):
        wide = wide - wide.mean(-1, keepdims=True)
    normed = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + values["eps"])
    if values.get("weight") is not None:
        normed = normed * (widened(values["weight"]) + values.get("weight_offset", 0.0))
    elif values.get("weight_offset"):
        normed = normed * (1.0 + values["weight_offset"])
    if values.get("bias") is not None:
        normed = normed + widened(values["bias"])
    return {"output": normed.astype(values.get("output_dtype") or x.dtype), "sum": total}


@formula("activation", "gated_activation", "gated_activation_packed")
def _activation(values: Values) -> dict[str, Array]:
    def with_bias(x: Array, name: str) -> Array:
        bias = values.get(name)
        return widened(x) if bias is None else widened(x) + widened(bias)

    if values["op"] == "gated_activation":
        x = values["gate"]
        made = activated(values["kind"], with_bias(x, "gate_bias")) * with_bias(values["up"], "up_bias")
    elif values["op"] == "gated_activation_packed":
        x = values["x"]
        gate, up = jnp.split(with_bias(x, "bias"), 2, -1)
        made = activated(values["kind"], gate) * up
    else:
        x = values["x"]
        made = activated(values["kind"], with_bias(x, "bias"))
    made = _dropped(made, values["dropout_p"], values.get("seed"))
    residual = values.get("residual")
    return {"output": (made if residual is None else made + widened(residual)).astype(x.dtype)}


@formula("softmax")
def _softmax(values: Values) -> dict[str, Array]:
    x, mask = values["x"], values.get("mask")
    scores = widened(x) * values["scale"]
    kept = jnp.ones((), bool)
    if mask is not None and mask.dtype == jnp.bool_:
        kept = mask
    elif mask is not None:
        scores = scores + widened(mask)
    if values["causal"]:
        queries, keys = x.shape[-2:]
        kept = kept & (jnp.arange(keys)[None] <= jnp.arange(queries)[:, None] + keys - queries)
    scores = jnp.where(kept, scores, -jnp.inf)
    if values["log"]:
        return {"output": jax.nn.log_softmax(scores, -1).astype(x.dtype)}
    most = jax.lax.stop_gradient(scores.max(-1, keepdims=True, initial=-jnp.inf))
    weights = jnp.exp(scores - jnp.where(most == -jnp.inf, 0, most))
    total = weights.sum(-1, keepdims=True)
    return {"output": (weights / jnp.where(total == 0, 1, total)).astype(x.dtype)}


@formula("dropout")
def _dropout(values: Values) -> dict[str, Array]:
    return {"output": _dropped(values["x"], values["p"], values["seed"])}


def _losses(values: Values, logits: Array, class_weight: Array | None) -> tuple[Array, Array]:
    """Of each row its loss, and what it weighs."""
    target = _integers(values["target"])
    logits = widened(logits)
    if values["softcap"]:
        logits = values["softcap"] * jnp.tanh(logits / values["softcap"])
    counts = target != values["ignore_index"]
    own_class = jnp.where(counts, target, 0)
    lse = jax.nn.logsumexp(logits, -1)
    of_classes = lse[..., None] - logits
    every = jnp.ones(logits.shape[-1], logits.dtype) if class_weight is None else widened(class_weight)
    smoothing = values["label_smoothing"]
    own = jnp.take_along_axis(of_classes * every, own_class[..., None], -1)[..., 0]
    spread = (of_classes * every).mean(-1)
    loss = (1.0 - smoothing) * own + smoothing * spread + values["z_loss"] * lse**2
    return jnp.where(counts, loss, 0), jnp.where(counts, every[own_class], 0)


@formula("cross_entropy", "cross_entropy_rows")
def _cross_entropy(values: Values) -> dict[str, Array]:
    loss, weights = _losses(values, values["logits"], values.get("weight"))
    if values["op"] == "cross_entropy_rows":
        return {"output": loss}
    return {"output": loss.sum() / weights.sum() if values["mean"] else loss.sum()}


@formula("linear_cross_entropy")
def _linear_cross_entropy(values: Values) -> dict[str, Array]:
    logits = _product(values["hidden"], values["weight"])
    return {"output": _losses(values, logits, values.get("class_weight"))[0].mean()}


@formula("embedding")
def _embedding(values: Values) -> dict[str, Array]:
    weight, padding = values["weight"], values["padding_index"]
    if padding >= 0:
        weight = weight.at[padding].set(jax.lax.stop_gradient(weight[padding]))
    return {"output": weight[values["indices"]]}


@formula("mean_pool", "chunk_mean_pool")
def _pool(values: Values) -> dict[str, Array]:
    x, offsets = values["x"], values.get("offsets")
    wide = widened(x)
    if values["op"] == "mean_pool" and offsets is None:
        return {"output": wide.mean(1).astype(x.dtype)}
    if offsets is not None:
        token = jnp.arange(x.shape[0])
        owner = (token[:, None] >= offsets[None, :-1]) & (token[:, None] < offsets[None, 1:])
        lengths = jnp.maximum(jnp.diff(offsets), 1).reshape(-1, *(1,) * (x.ndim - 1))
        return {"output": (jnp.einsum("ts,t...->s...", owner.astype(wide.dtype), wide) / lengths).astype(x.dtype)}
    size, tokens = values["chunk_size"], x.shape[1]
    chunks = -(-tokens // size)
    padded = jnp.pad(wide, [(0, 0), (0, chunks * size - tokens), *[(0, 0)] * (x.ndim - 2)])
    lengths = jnp.minimum(size, tokens - size * jnp.arange(chunks)).reshape(1, -1, *(1,) * (x.ndim - 2))
    return {"output": (padded.reshape(x.shape[0], chunks, size, *x.shape[2:]).sum(2) / lengths).astype(x.dtype)}


@formula("rope")
def _rope(values: Values) -> dict[str, Array]:
    if "cos" not in values:
        raise NoFormula  # tables of frequencies
    cos, sin, positions = values["cos"], values["sin"], values.get("positions")
    outputs = {}
    for name in ("query", "key"):
        x = values.get(name)
        if x is None:
            continue
        sequence = x.ndim - 2 if values["heads_first"] else x.ndim - 3
        length = x.shape[sequence]
        tables = []
        for table in (cos, sin):
            if table.ndim == 2:
                table = table[:length] if positions is None else table[positions]
            tables.append(widened(jnp.expand_dims(table, -3 if values["heads_first"] else -2)))
        rotary = values["rotary_dim"] or (2 * cos.shape[-1] if 2 * cos.shape[-1] <= x.shape[-1] else cos.shape[-1])
        c, s = (table[..., : rotary // 2] for table in tables)
        turned, rest = widened(x[..., :rotary]), x[..., rotary:]
        if values["interleaved"]:
            if cos.shape[-1] == rotary:
                c, s = (table[..., 0::2] for table in tables)
            first, second = turned[..., 0::2], turned[..., 1::2]
            made = jnp.stack([first * c - second * s, second * c + first * s], -1).reshape(turned.shape)
        else:
            first, second = jnp.split(turned, 2, -1)
            made = jnp.concatenate([first * c - second * s, second * c + first * s], -1)
        outputs[f"rotated_{name}"] = jnp.concatenate([made.astype(x.dtype), rest], -1)
    return outputs


@formula("norm_rope")
def _norm_rope(values: Values) -> dict[str, Array]:
    normed = _norm(values)["output"]
    turned = _rope({**values, "query": normed, "interleaved": False})["rotated_query"]
    return {"output": turned}


def _product(x: Array, weight: Array) -> Array:
    """x @ weight.T, in fp32."""
    return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=widened(x[..., :0]).dtype)


def _layer(x: Array, weight: Array, bias: Array | None, activation: str, gated: bool) -> Array:
    made = _product(x, weight)
    made = made if bias is None else made + widened(bias)
    if gated:
        return activated(activation, made[..., 0::2]) * made[..., 1::2]
    return activated(activation, made)


@formula("linear", "mlp")
def _linear(values: Values) -> dict[str, Array]:
    x, residual = values["x"], values.get("residual")
    how = (values["activation"], values["gated"])
    if values["op"] == "linear":
        made = _layer(x, values["weight"], values.get("bias"), *how)
    else:
        hidden = _layer(x, values["weight_in"], values.get("bias_in"), *how).astype(x.dtype)
        made = _layer(hidden, values["weight_out"], values.get("bias_out"), "identity", False)
    return {"output": (made if residual is None else made + widened(residual)).astype(x.dtype)}


@formula("matmul")
def _matmul(values: Values) -> dict[str, Array]:
    a, b = values["a"], values["b"]
    return {"output": jnp.matmul(a, b, preferred_element_type=widened(a[..., :0]).dtype).astype(a.dtype)}


@formula("attention")
def _attention(values: Values) -> dict[str, Array]:
    for name in ("score_mod", "mask_mod", "cu_seqlens_q", "blocks"):
        value = values.get(name)
        if value is not None and not (isinstance(value, str | list | tuple) and not value):
            raise NoFormula
    query, key, value = (values[name] for name in ("query", "key", "value"))
    if not values["heads_first"]:
        query, key, value = (jnp.swapaxes(one, 1, 2) for one in (query, key, value))
    group = query.shape[1] // key.shape[1]
    key, value = jnp.repeat(key, group, 1), jnp.repeat(value, group, 1)
    scale = query.shape[-1] ** -0.5 if values.get("scale") is None else values["scale"]
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, key, preferred_element_type=widened(query[..., :0]).dtype) * scale
    scores = _changed(values, scores)
    scores = jnp.where(_kept(values, *scores.shape[2:]), scores, -jnp.inf)
    sinks = values.get("sinks")
    extra = jnp.full((1, 1, 1, 1), -jnp.inf) if sinks is None else sinks[None, :, None, None]
    most = jnp.maximum(scores.max(-1, keepdims=True, initial=-jnp.inf), extra)
    most = jax.lax.stop_gradient(jnp.where(most == -jnp.inf, 0, most))
    weights = jnp.exp(scores - most)
    total = weights.sum(-1, keepdims=True) + jnp.exp(extra - most)
    lse = jnp.where(total[..., 0] == 0, -jnp.inf, jnp.log(jnp.where(total == 0, 1, total))[..., 0] + most[..., 0])
    weights = _dropped(weights / jnp.where(total == 0, 1, total), values["dropout_p"], values.get("seed"))
    output = jnp.einsum("bhqk,bhkd->bhqd", weights, widened(value)).astype(query.dtype)
    return {"output": output if values["heads_first"] else jnp.swapaxes(output, 1, 2), "lse": lse}


def _distance(values: Values, queries: int, keys: int) -> Array:
    """k - (q + offset): [batch or 1, 1, queries, keys]."""
    if values.get("causal_offset") is not None:
        offset = jnp.full((1,), values["causal_offset"])
    elif values.get("key_lengths") is not None:
        lengths = jnp.clip(values["key_lengths"], 0, keys)
        offset = jnp.maximum(lengths - queries, min(0, keys - queries))
    else:
        offset = jnp.full((1,), keys - queries)
    return (jnp.arange(keys)[None] - jnp.arange(queries)[:, None])[None, None] - offset[:, None, None, None]


def _changed(values: Values, scores: Array) -> Array:
    cap, bias, slopes = values["softcap"], values.get("bias"), values.get("alibi_slopes")
    if cap and not values["softcap_after_bias"]:
        scores = cap * jnp.tanh(scores / cap)
    if bias is not None:
        scores = scores + widened(bias)
    if cap and values["softcap_after_bias"]:
        scores = cap * jnp.tanh(scores / cap)
    if slopes is not None:
        slopes = slopes[:, :, None, None] if slopes.ndim == 2 else slopes[None, :, None, None]
        scores = scores - slopes * jnp.abs(_distance(values, *scores.shape[2:]))
    return scores


def _kept(values: Values, queries: int, keys: int) -> Array:
    distance = _distance(values, queries, keys)
    kept = jnp.ones((1, 1, queries, keys), bool)
    if values["causal"]:
        kept = kept & (distance <= 0)
    if values["window_left"] >= 0:
        kept = kept & (distance >= -values["window_left"])
    if values["window_right"] >= 0:
        kept = kept & (distance <= values["window_right"])
    if values.get("mask") is not None:
        kept = kept & values["mask"]
    if values.get("key_lengths") is not None:
        kept = kept & (jnp.arange(keys) < values["key_lengths"][:, None, None, None])
    first, second = values.get("query_segment_ids"), values.get("key_segment_ids")
    if first is not None:
        second = first if second is None else second
        first, second = (one[None] if one.ndim == 1 else one for one in (first, second))
        kept = kept & (first[:, None, :, None] == second[:, None, None]) & (first[:, None, :, None] != -1)
    return kept
