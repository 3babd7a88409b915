"""The rows of jax_ops.py: our functions of arrays, and what a JAX user would write instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import kernel_pytorch.jax as kp

Array = Any
EPS = 1e-6
HEAD = 128


@dataclass(frozen=True)
class Case:
    name: str
    ours: Callable[..., Any]
    peer: Callable[..., Any]
    peer_name: str
    inputs: tuple[Array, ...]
    torch_op: str = ""  # jax_torch.py's name of the same call
    dtype: str = "bf16"
    tolerance: float = 3e-2  # of bf16 sums in two orders, by the largest value


def random(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def rms_norm(x: Array, weight: Array) -> Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + EPS)).astype(x.dtype) * weight


def swiglu(gate: Array, up: Array) -> Array:
    return jax.nn.silu(gate) * up


def cross_entropy(logits: Array, target: Array) -> Array:
    wide = logits.astype(jnp.float32)
    own = jnp.take_along_axis(wide, target[:, None], 1)[:, 0]
    return (jax.nn.logsumexp(wide, -1) - own).mean()


def softmax(x: Array) -> Array:
    return jax.nn.softmax(x.astype(jnp.float32), -1).astype(x.dtype)


def with_gradients(function: Callable[..., Array], arrays: int) -> Callable[..., Any]:
    """Forward, then the gradients of the first `arrays` arguments; the cotangent is the last one. It comes after the
    output, as in a training step: without the barrier XLA would make one kernel of forward and backward."""

    def both(*arguments: Array) -> Any:
        output, gradients = jax.vjp(lambda *first: function(*first, *arguments[arrays:-1]), *arguments[:arrays])
        output, cotangent = jax.lax.optimization_barrier((output, arguments[-1]))
        return output, gradients(cotangent)

    return both


def cases(device: str, only: str) -> Iterator[Case]:
    """Made one at a time: inputs of all would not fit."""
    for make in GPU if device == "gpu" else CPU:
        case = make()
        if only in case.name:
            yield case


def attention_case(batch: int, length: int, heads: int, gradients: bool, peer: str) -> Case:
    shape = (batch, length, heads, HEAD)

    def theirs(query: Array, key: Array, value: Array) -> Array:
        return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=peer)

    def ours(query: Array, key: Array, value: Array) -> Array:
        return kp.attention(query, key, value, causal=True)

    inputs = tuple(random(i, *shape) for i in range(4 if gradients else 3))
    name = f"attention {batch}x{length}x{heads}x{HEAD} causal, {'forward and backward' if gradients else 'forward'}"
    peer_name = {"cudnn": "cuDNN by jax.nn", "xla": "XLA by jax.nn"}[peer]
    if gradients:
        return Case(name, with_gradients(ours, 3), with_gradients(theirs, 3), peer_name, inputs)
    return Case(name, ours, theirs, peer_name, inputs, "attention")


def norm_case(rows: int, columns: int, gradients: bool) -> Case:
    x, weight, grad = random(0, rows, columns), random(1, columns), random(2, rows, columns)
    name = f"rms_norm {rows}x{columns}, {'forward and backward' if gradients else 'forward'}"
    if gradients:
        return Case(name, with_gradients(kp.rms_norm, 2), with_gradients(rms_norm, 2), "XLA", (x, weight, grad))
    return Case(name, kp.rms_norm, rms_norm, "XLA", (x, weight), "rms_norm")


def swiglu_case(rows: int, columns: int) -> Case:
    inputs = tuple(random(i, rows, columns) for i in range(3))
    name = f"swiglu {rows}x{columns}, forward and backward"
    return Case(name, with_gradients(kp.swiglu, 2), with_gradients(swiglu, 2), "XLA", inputs)


def loss_case(rows: int, classes: int, gradients: bool) -> Case:
    inputs = random(0, rows, classes), jnp.arange(rows) % classes
    name = f"cross_entropy {rows}x{classes}, {'forward and backward' if gradients else 'forward'}"
    if gradients:
        ours, theirs = jax.value_and_grad(kp.cross_entropy), jax.value_and_grad(cross_entropy)
        return Case(name, ours, theirs, "XLA", inputs)
    return Case(name, kp.cross_entropy, cross_entropy, "XLA", inputs, "cross_entropy")


def softmax_case(rows: int, columns: int) -> Case:
    return Case(f"softmax {rows}x{columns}, forward", kp.softmax, softmax, "XLA", (random(0, rows, columns),))


def product_case(m: int, n: int, k: int) -> Case:
    inputs = random(0, m, k), random(1, n, k)
    return Case(f"GEMM {m}x{n}x{k}, forward", kp.linear, lambda x, weight: x @ weight.T, "XLA", inputs, "linear")


class Llama:
    """A block's training step: forward and every gradient. Ours against XLA with cuDNN's attention."""

    def __init__(self, device: str) -> None:
        batch, length, dim, hidden = (4, 4096, 4096, 14336) if device == "gpu" else (1, 128, 256, 512)
        self.implementation = "cudnn" if device == "gpu" else "xla"
        self.heads, self.key_heads = dim // HEAD, max(dim // HEAD // 4, 1)
        scale = dim**-0.5

        def weight(seed: int, rows: int, columns: int) -> Array:
            return random(seed, rows, columns) * jnp.bfloat16(scale)

        parameters = {
            "norm": jnp.ones(dim, jnp.bfloat16),
            "qkv": weight(1, (self.heads + 2 * self.key_heads) * HEAD, dim),
            "out": weight(2, dim, dim),
            "mlp_norm": jnp.ones(dim, jnp.bfloat16),
            "gate_up": weight(3, 2 * hidden, dim),  # rows in pairs (gate, up)
            "down": weight(4, dim, hidden),
        }
        self.names = tuple(parameters)
        angles = jnp.arange(length)[:, None] * 10000.0 ** (-jnp.arange(HEAD // 2) / (HEAD // 2))
        x, grad = random(5, batch, length, dim), random(6, batch, length, dim)
        self.inputs = (x, *parameters.values(), jnp.cos(angles), jnp.sin(angles), grad)

    def ours(self, *arguments: Array) -> Any:
        return with_gradients(self.our_block, 1 + len(self.names))(*arguments)

    def peer(self, *arguments: Array) -> Any:
        return with_gradients(self.their_block, 1 + len(self.names))(*arguments)

    def split(self, packed: Array) -> tuple[Array, Array, Array]:
        heads, keys = self.heads, self.key_heads
        return packed[:, :, :heads], packed[:, :, heads : heads + keys], packed[:, :, heads + keys :]

    def our_block(self, x: Array, *rest: Array) -> Array:
        weights, (cos, sin) = dict(zip(self.names, rest)), rest[-2:]
        normed, x = kp.rms_norm(x, weights["norm"], EPS, return_input=True)
        packed = kp.linear(normed, weights["qkv"]).reshape(*x.shape[:2], -1, HEAD)
        heads = {"heads": self.heads, "key_heads": self.key_heads}
        attended = kp.attention_packed(packed, cos, sin, **heads, causal=True).reshape(x.shape)
        x = kp.linear(attended, weights["out"], residual=x)
        normed, x = kp.rms_norm(x, weights["mlp_norm"], EPS, return_input=True)
        return kp.mlp(normed, weights["gate_up"], weights["down"], activation="swiglu", residual=x)

    def their_block(self, x: Array, *rest: Array) -> Array:
        weights, (cos, sin) = dict(zip(self.names, rest)), rest[-2:]

        def turned(heads: Array) -> Array:
            first, second = jnp.split(heads, 2, -1)
            c, s = cos[:, None], sin[:, None]
            return jnp.concatenate([first * c - second * s, second * c + first * s], -1).astype(heads.dtype)

        packed = (rms_norm(x, weights["norm"]) @ weights["qkv"].T).reshape(*x.shape[:2], -1, HEAD)
        query, key, value = self.split(packed)
        attended = jax.nn.dot_product_attention(
            turned(query), turned(key), value, is_causal=True, implementation=self.implementation
        ).reshape(x.shape)
        x = x + attended @ weights["out"].T
        both = rms_norm(x, weights["mlp_norm"]) @ weights["gate_up"].T
        return x + swiglu(both[..., 0::2], both[..., 1::2]) @ weights["down"].T


def ragged_case(m: int, n: int, k: int, groups: int, gradients: bool) -> Case:
    sizes = jnp.full((groups,), m // groups, jnp.int32)
    x, weight = random(0, m, k), random(1, groups, k, n) * jnp.bfloat16(k**-0.5)

    def of(dot: Callable[..., Array]) -> Callable[..., Any]:
        def product(x: Array, weight: Array) -> Array:
            return dot(x, weight, sizes)

        return with_gradients(product, 2) if gradients else product

    name = f"grouped GEMM {m}x{n}x{k}, {groups} groups, forward{' and backward' if gradients else ''}"
    inputs = (x, weight, random(2, m, n)) if gradients else (x, weight)
    return Case(name, of(kp.ragged_dot), of(jax.lax.ragged_dot), "jax.lax.ragged_dot", inputs)


def llama_case(device: str) -> Case:
    llama = Llama(device)
    batch, length, dim = llama.inputs[0].shape
    name = f"Llama block B{batch} S{length} dim {dim}, forward and backward"
    peer = "XLA with cuDNN's attention" if device == "gpu" else "XLA"
    return Case(name, llama.ours, llama.peer, peer, llama.inputs, tolerance=6e-2)


GPU = [
    lambda: attention_case(2, 8192, 16, False, "cudnn"),
    lambda: attention_case(2, 8192, 16, True, "cudnn"),
    lambda: norm_case(16384, 4096, False),
    lambda: norm_case(16384, 4096, True),
    lambda: swiglu_case(16384, 8192),
    lambda: loss_case(8192, 32000, False),
    lambda: loss_case(8192, 32000, True),
    lambda: product_case(8192, 8192, 8192),
    lambda: ragged_case(16384, 4096, 4096, 8, False),
    lambda: ragged_case(16384, 4096, 4096, 8, True),
    lambda: llama_case("gpu"),
]
CPU = [
    lambda: attention_case(1, 512, 4, False, "xla"),
    lambda: attention_case(1, 512, 4, True, "xla"),
    lambda: norm_case(1024, 4096, False),
    lambda: norm_case(1024, 4096, True),
    lambda: swiglu_case(1024, 4096),
    lambda: softmax_case(1024, 4096),
    lambda: loss_case(512, 8192, False),
    lambda: loss_case(512, 8192, True),
    lambda: product_case(512, 1024, 1024),
    lambda: ragged_case(512, 1024, 1024, 4, False),
    lambda: llama_case("cpu"),
]
