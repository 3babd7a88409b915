"""Every op of kernel_pytorch.jax with arguments, and the same in jax.numpy: one row serves all tests of transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kernel_pytorch.jax as kp


class Case(NamedTuple):
    name: str
    ours: Callable[..., Any]
    reference: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]  # of the arrays that have gradients
    constants: tuple[Any, ...] = ()  # arrays without, behind them

    def arrays(self, dtype: Any = jnp.float32, front: tuple[int, ...] = ()) -> tuple[Any, ...]:
        """By numpy: each operation of jax outside jit is a program to compile."""
        random = np.random.default_rng(len(self.name))
        return tuple(jnp.asarray(random.standard_normal((*front, *shape)).astype(dtype)) for shape in self.shapes)


def rms_norm(x: Any, weight: Any = 1.0, eps: float = 1e-6, offset: float = 0.0) -> Any:
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps) * (weight + offset)


def layer_norm(x: Any, weight: Any, bias: Any, eps: float = 1e-5) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred * centred).mean(-1, keepdims=True) + eps) * weight + bias


def cross_entropy(logits: Any, target: Any, ignore_index: int = -100, smoothing: float = 0.0, z: float = 0.0) -> Any:
    """(losses of the rows, which of them count)"""
    counts = target != ignore_index
    lse = jax.nn.logsumexp(logits, -1)
    own = jnp.take_along_axis(logits, jnp.where(counts, target, 0)[..., None], -1)[..., 0]
    loss = (1 - smoothing) * (lse - own) + smoothing * (lse - logits.mean(-1)) + z * lse**2
    return jnp.where(counts, loss, 0), counts


def mean_cross_entropy(logits: Any, target: Any, **options: Any) -> Any:
    loss, counts = cross_entropy(logits, target, **options)
    return loss.sum() / counts.sum()


def native_sparse_attention(query: Any, key: Any, value: Any, gates: Any) -> Any:
    """Blocks of two keys: means of each, all of them listed, a window of three."""
    tokens, group = query.shape[1], query.shape[2] // key.shape[2]
    place, means = jnp.arange(tokens)[:, None], tokens // 2

    def attend(k: Any, v: Any, keep: Any) -> Any:
        k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, k) * query.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(keep, scores, -1e30), -1) * keep
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    k, v = (x[:, : 2 * means].reshape(x.shape[0], means, 2, *x.shape[2:]).mean(2) for x in (key, value))
    keys = jnp.arange(tokens)
    branches = (
        attend(k, v, jnp.arange(means) * 2 + 1 <= place),
        attend(key, value, keys <= place),
        attend(key, value, (keys <= place) & (keys > place - 3)),
    )
    return sum(gates[..., i, None] * one for i, one in enumerate(branches))


def linear_attention(query: Any, key: Any, value: Any, gate: Any, decay: Any, start: Any) -> Any:
    """(output, final state), all pairs of tokens at once: e^(G_t - G_s) of the gates' sums between them."""
    tokens, columns = query.shape[1], query.shape[3]
    sums = jnp.cumsum(gate + decay[:, None], 1)
    within = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool))[None, :, :, None, None], 0.0, -jnp.inf)
    kept = jnp.exp(sums[:, :, None] - sums[:, None] + within)
    scores = jnp.einsum("bthi,bshi,btshi->bths", query, key, kept)
    output = jnp.einsum("bths,bshj->bthj", scores, value)
    output += jnp.einsum("bthi,bhij->bthj", query * jnp.exp(sums), start)
    last = sums[:, -1]
    state = jnp.exp(last)[..., None] * start
    state += jnp.einsum("bshi,bshj->bhij", key * jnp.exp(last[:, None] - sums), value)
    return output * columns**-0.5, state


def causal_conv1d(x: Any, weight: Any, bias: Any, state: Any) -> Any:
    """(silu of the convolution, the last inputs)"""
    width = weight.shape[1]
    inputs = jnp.concatenate([state, x], 1)
    total = sum(weight[:, i] * inputs[:, i : i + x.shape[1]] for i in range(width)) + bias
    return jax.nn.silu(total), inputs[:, inputs.shape[1] - width + 1 :]


def delta_rule(query: Any, key: Any, value: Any, beta: Any, gate: Any, state: Any) -> Any:
    """(output, final state), token by token, of queries and keys that it normalises."""
    query, key = (x / jnp.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (query, key))
    query = jnp.repeat(query, key.shape[2] // query.shape[2], 2)
    outputs = []
    for t in range(query.shape[1]):
        state = state * jnp.exp(gate[:, t])[..., None]
        error = value[:, t] - jnp.einsum("bhi,bhij->bhj", key[:, t], state)
        state = state + jnp.einsum("bhi,bhj->bhij", key[:, t], beta[:, t, :, None] * error)
        outputs.append(jnp.einsum("bhi,bhij->bhj", query[:, t], state))
    return jnp.stack(outputs, 1) * query.shape[-1] ** -0.5, state


def attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    sinks: Any = None,
    *,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    keep: Any = None,
) -> Any:
    """[batch, sequence, heads, size]"""
    group = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key, group, 2), jnp.repeat(value, group, 2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    distance = jnp.arange(key.shape[1])[None] - jnp.arange(query.shape[1])[:, None] - (key.shape[1] - query.shape[1])
    seen = jnp.ones(distance.shape, bool)
    if causal:
        seen &= distance <= 0
    if window is not None:
        seen &= (distance <= window) & (distance >= -window)
    if keep is not None:
        seen = seen & keep
    scores = jnp.where(seen, scores, -jnp.inf)
    if sinks is not None:
        extra = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, extra], -1), -1)[..., :-1]
    else:
        weights = jax.nn.softmax(scores, -1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def rope(query: Any, key: Any, cos: Any, sin: Any) -> Any:
    def turned(x: Any) -> Any:
        first, second = jnp.split(x, 2, -1)
        c, s = cos[: x.shape[1], None], sin[: x.shape[1], None]
        return jnp.concatenate([first * c - second * s, second * c + first * s], -1)

    return turned(query), turned(key)


def grouped_matmul(x: Any, weight: Any, ends: Any) -> Any:
    """Rows up to an end are those of its group; rows behind the last are 0."""
    group = (jnp.arange(x.shape[0])[:, None] >= ends).sum(1)
    return jnp.einsum("rk,rg,gkn->rn", x, jax.nn.one_hot(group, weight.shape[0]), weight)


def moe_mlp(x: Any, logits: Any, gate_up: Any, down: Any) -> Any:
    """Every expert of every token, of which the two with the largest scores count."""
    weights, chosen = jax.lax.top_k(jax.nn.softmax(logits), 2)
    weights = weights / weights.sum(-1, keepdims=True)
    gate, up = jnp.split(jnp.einsum("td,edn->etn", x, gate_up), 2, -1)
    y = jnp.einsum("etn,end->etd", jax.nn.silu(gate) * up, down)
    return jnp.einsum("tk,tke,etd->td", weights, jax.nn.one_hot(chosen, logits.shape[-1]), y)


_TARGET = jnp.array([3, 0, -100, 7, 9])
_WEIGHT = kp.quantize_weight(np.random.default_rng(0).standard_normal((12, 64), np.float32), "int4", group=32)
_VALUES = np.asarray(kp.dequantize_weight(_WEIGHT, jnp.float32))
_CODES = jnp.asarray(np.random.default_rng(1).integers(-127, 128, (12, 64)), jnp.int8)
_SCALES = jnp.linspace(0.01, 0.02, 12, dtype=jnp.float32)


@jax.custom_jvp
def _rounded(x: Any) -> Any:
    """Rows as int8_matmul rounds them; the gradient passes the rounding."""
    scales = jnp.abs(x).max(-1, keepdims=True) / 127
    return jnp.round(x / scales) * scales


_rounded.defjvps(lambda tangent, _, x: tangent)
_ANGLES = jnp.arange(6.0)[:, None] * jnp.array([1.0, 0.1, 0.01, 0.001])
_QUERY, _KEY = (2, 6, 4, 8), (2, 6, 2, 8)
_KEEP = jax.random.bernoulli(jax.random.key(5), 0.7, (2, 1, 6, 6)).at[..., 0].set(True)

CASES = [
    Case("rms_norm", kp.rms_norm, rms_norm, ((3, 5, 16), (16,))),
    Case(
        "rms_norm with an offset",
        lambda x, w: kp.rms_norm(x, w, 1e-3, weight_offset=1.0),
        lambda x, w: rms_norm(x, w, 1e-3, 1.0),
        ((3, 16), (16,)),
    ),
    Case("rms_norm without a weight", kp.rms_norm, rms_norm, ((3, 5, 16),)),
    Case(
        "rms_norm with a residual",
        lambda x, r, w: kp.rms_norm(x, w, residual=r),
        lambda x, r, w: (rms_norm(x + r, w), x + r),
        ((3, 16), (3, 16), (16,)),
    ),
    Case(
        "rms_norm that returns its input",
        lambda x, w: kp.rms_norm(x, w, return_input=True),
        lambda x, w: (rms_norm(x, w), x),
        ((3, 16), (16,)),
    ),
    Case(
        "layer_norm that returns its input",
        lambda x, w, b: kp.layer_norm(x, w, b, return_input=True),
        lambda x, w, b: (layer_norm(x, w, b), x),
        ((3, 16), (16,), (16,)),
    ),
    Case("layer_norm", kp.layer_norm, layer_norm, ((3, 5, 16), (16,), (16,))),
    Case(
        "layer_norm with a residual",
        lambda x, r, w, b: kp.layer_norm(x, w, b, residual=r),
        lambda x, r, w, b: (layer_norm(x + r, w, b), x + r),
        ((3, 16), (3, 16), (16,), (16,)),
    ),
    Case(
        "rms_norm with an activation",
        lambda x, w: kp.rms_norm(x, w, activation="silu"),
        lambda x, w: jax.nn.silu(rms_norm(x, w)),
        ((3, 16), (16,)),
    ),
    Case(
        "layer_norm with an activation",
        lambda x, w, b: kp.layer_norm(x, w, b, activation="gelu"),
        lambda x, w, b: jax.nn.gelu(layer_norm(x, w, b), approximate=False),
        ((3, 16), (16,), (16,)),
    ),
    Case(
        "linear of two matrices",
        lambda x, g, u, b, r: kp.linear(x, g, b, activation="silu", residual=r, weight_up=u),
        lambda x, g, u, b, r: jax.nn.silu(x @ g.T + b) * (x @ u.T) + r,
        ((3, 16), (8, 16), (8, 16), (8,), (3, 8)),
    ),
    Case(
        "rope_from_frequencies",
        lambda q, k: kp.rope_from_frequencies(q, k, jnp.array([1.0, 0.1, 0.01, 0.001])),
        lambda q, k: rope(q, k, jnp.cos(_ANGLES), jnp.sin(_ANGLES)),
        (_QUERY, _KEY),
    ),
    Case("silu", kp.silu, jax.nn.silu, ((3, 16),)),
    Case(
        "gelu, bias, residual",
        lambda x, b, r: kp.activation(x, "gelu", bias=b, residual=r),
        lambda x, b, r: jax.nn.gelu(x + b, approximate=False) + r,
        ((3, 16), (16,), (3, 16)),
    ),
    Case("swiglu", kp.swiglu, lambda gate, up: jax.nn.silu(gate) * up, ((3, 16), (3, 16))),
    Case(
        "gated_activation with biases",
        lambda g, u, a, b: kp.gated_activation(g, u, "gelu_tanh", gate_bias=a, up_bias=b),
        lambda g, u, a, b: jax.nn.gelu(g + a) * (u + b),
        ((3, 16), (3, 16), (16,), (16,)),
    ),
    Case(
        "gated_activation_packed",
        lambda x: kp.gated_activation_packed(x, "relu"),
        lambda x: jax.nn.relu(x[..., :8]) * x[..., 8:],
        ((3, 16),),
    ),
    Case("softmax", lambda x: kp.softmax(x, scale=0.5), lambda x: jax.nn.softmax(0.5 * x, -1), ((3, 16),)),
    Case("log_softmax", kp.log_softmax, lambda x: jax.nn.log_softmax(x, -1), ((3, 16),)),
    Case(
        "softmax with an added mask",
        lambda x, m: kp.softmax(x, mask=m, scale=2.0),
        lambda x, m: jax.nn.softmax(2.0 * x + m, -1),
        ((3, 5, 16), (5, 16)),
    ),
    Case("cross_entropy", kp.cross_entropy, mean_cross_entropy, ((5, 11),), (_TARGET,)),
    Case(
        "cross_entropy of rows",
        lambda x, t: kp.cross_entropy(x, t, label_smoothing=0.1, z_loss=0.01, reduction="none"),
        lambda x, t: cross_entropy(x, t, smoothing=0.1, z=0.01)[0],
        ((5, 11),),
        (_TARGET,),
    ),
    Case(
        "linear_cross_entropy",
        kp.linear_cross_entropy,
        lambda h, w, t: mean_cross_entropy(h @ w.T, t),
        ((5, 16), (11, 16)),
        (_TARGET,),
    ),
    Case("embedding", lambda w, i: kp.embedding(i, w), lambda w, i: w[i], ((11, 8),), (jnp.array([[1, 2], [1, 0]]),)),
    Case("mean_pool", kp.mean_pool, lambda x: x.mean(1), ((2, 5, 8),)),
    Case(
        "mean_pool of packed sequences",
        kp.mean_pool,
        lambda x, ends: jnp.stack([x[:3].mean(0), x[3:].mean(0)]),
        ((5, 8),),
        (jnp.array([0, 3, 5]),),
    ),
    Case(
        "chunk_mean_pool",
        lambda x: kp.chunk_mean_pool(x, 2),
        lambda x: jnp.stack([x[:, :2].mean(1), x[:, 2:4].mean(1), x[:, 4]], 1),
        ((2, 5, 8),),
    ),
    Case("rope", kp.rope, rope, (_QUERY, _KEY), (jnp.cos(_ANGLES), jnp.sin(_ANGLES))),
    Case(
        "norm_rope",
        lambda x, w, cos, sin: kp.norm_rope(x, w, cos, sin, weight_offset=1.0),
        lambda x, w, cos, sin: rope(rms_norm(x, w, offset=1.0), x, cos, sin)[0],
        (_QUERY, (8,)),
        (jnp.cos(_ANGLES), jnp.sin(_ANGLES)),
    ),
    Case("matmul", kp.matmul, jnp.matmul, ((3, 5, 16), (16, 8))),
    Case("matmul of batches", kp.matmul, jnp.matmul, ((3, 5, 16), (3, 16, 8))),
    Case("linear", kp.linear, lambda x, w, b: x @ w.T + b, ((3, 5, 16), (8, 16), (8,))),
    Case(
        "linear with gelu and a residual",
        lambda x, w, b, r: kp.linear(x, w, b, activation="gelu", residual=r),
        lambda x, w, b, r: jax.nn.gelu(x @ w.T + b, approximate=False) + r,
        ((3, 16), (8, 16), (8,), (3, 8)),
    ),
    Case(
        "mlp",
        lambda x, a, b, c, d: kp.mlp(x, a, c, b, d),
        lambda x, a, b, c, d: jax.nn.gelu(x @ a.T + b, approximate=False) @ c.T + d,
        ((3, 16), (24, 16), (24,), (16, 24), (16,)),
    ),
    Case(
        "gated mlp",
        lambda x, g, u, d: kp.mlp(x, kp.interleave_gate_up(g, u), d, activation="swiglu"),
        lambda x, g, u, d: (jax.nn.silu(x @ g.T) * (x @ u.T)) @ d.T,
        ((3, 16), (24, 16), (24, 16), (16, 24)),
    ),
    Case("grouped_matmul", kp.grouped_matmul, grouped_matmul, ((7, 8), (3, 8, 4)), (jnp.array([2, 2, 6]),)),
    Case("ragged_dot", kp.ragged_dot, jax.lax.ragged_dot, ((7, 8), (3, 8, 4)), (jnp.array([2, 0, 5]),)),
    Case(
        "moe_mlp",
        lambda x, logits, gate_up, down: kp.moe_mlp(x, kp.route(logits, 2), gate_up, down),
        moe_mlp,
        ((5, 8), (5, 4), (4, 8, 12), (4, 6, 8)),
    ),
    Case(
        "quantized_matmul",
        lambda x, b, weight: kp.quantized_matmul(x, weight, bias=b, activation="silu"),
        lambda x, b, weight: jax.nn.silu(x @ _VALUES.T + b),
        ((3, 64), (12,)),
        (_WEIGHT,),
    ),
    Case(
        "int8_matmul",
        lambda x, b, codes, scales: kp.int8_matmul(x, codes, scales, bias=b, activation="silu"),
        lambda x, b, codes, scales: jax.nn.silu(_rounded(x) @ (codes * scales[:, None]).T + b),
        ((3, 64), (12,)),
        (_CODES, _SCALES),
    ),
    Case(
        "quantized_grouped_matmul",
        lambda x, weight, offsets: kp.quantized_grouped_matmul(x, weight, offsets),
        lambda x, weight, offsets: jnp.concatenate([x[:1] @ _VALUES[:4].T, x[1:] @ _VALUES[8:].T]),
        ((3, 64),),
        (_WEIGHT, jnp.array([1, 1, 3], jnp.int32)),
    ),
    Case("attention", kp.attention, attention, (_QUERY, _KEY, _KEY)),
    Case(
        "attention, causal, window, softcap",
        lambda q, k, v: kp.attention(q, k, v, causal=True, window=(3, 3), softcap=5.0),
        lambda q, k, v: attention(q, k, v, causal=True, window=3, softcap=5.0),
        ((2, 5, 4, 8), _KEY, _KEY),
    ),
    Case(
        "attention_packed",
        lambda p: kp.attention_packed(p, heads=4, key_heads=2, causal=True, window=3, softcap=5.0),
        lambda p: attention(p[:, :, :4], p[:, :, 4:6], p[:, :, 6:], causal=True, window=3, softcap=5.0),
        ((2, 6, 8, 8),),
    ),
    Case(
        "attention_packed with rope",
        lambda p, cos, sin: kp.attention_packed(p, cos, sin, heads=4, key_heads=2, causal=True),
        lambda p, cos, sin: attention(*rope(p[:, :, :4], p[:, :, 4:6], cos, sin), p[:, :, 6:], causal=True),
        ((2, 6, 8, 8),),
        (jnp.cos(_ANGLES), jnp.sin(_ANGLES)),
    ),
    Case(
        "attention with bias and sinks",
        lambda q, k, v, b, s: kp.attention(q, k, v, bias=b, sinks=s),
        attention,
        (_QUERY, _KEY, _KEY, (2, 1, 6, 6), (4,)),
    ),
    Case(
        "attention with a mask",
        lambda q, k, v, m: kp.attention(q, k, v, mask=m),
        lambda q, k, v, m: attention(q, k, v, keep=m),
        (_QUERY, _KEY, _KEY),
        (_KEEP,),
    ),
    Case(
        "linear_attention",
        lambda q, k, v, g, d, s: kp.linear_attention(
            q, k, v, gate=-(g**2), decay=-(d**2), initial_state=s, return_state=True
        ),
        lambda q, k, v, g, d, s: linear_attention(q, k, v, -(g**2), -(d**2), s),
        ((2, 5, 2, 4), (2, 5, 2, 4), (2, 5, 2, 3), (2, 5, 2, 4), (2,), (2, 2, 4, 3)),
    ),
    Case(
        "causal_conv1d",
        lambda x, w, b, s: kp.causal_conv1d(x, w, b, activation="silu", initial_state=s, return_state=True),
        lambda x, w, b, s: causal_conv1d(x, w, b, s),
        ((2, 5, 4), (4, 3), (4,), (2, 2, 4)),
    ),
    Case(
        "delta_rule",
        lambda q, k, v, b, g, s: kp.delta_rule(
            q, k, v, b**2 / (1 + b**2), gate=-(g**2), normalize_qk=True, initial_state=s, return_state=True
        ),
        lambda q, k, v, b, g, s: delta_rule(q, k, v, b**2 / (1 + b**2), -(g**2), s),
        ((2, 5, 1, 4), (2, 5, 2, 4), (2, 5, 2, 3), (2, 5, 2), (2, 5, 2, 4), (2, 2, 4, 3)),
    ),
    Case(
        "native_sparse_attention",
        lambda q, k, v, g: kp.native_sparse_attention(
            q, k, v, gates=g, block_size=2, blocks=9, window=3, form="ejkernel"
        ),
        native_sparse_attention,
        ((2, 7, 4, 4), (2, 7, 2, 4), (2, 7, 2, 3), (2, 7, 4, 3)),
    ),
]
