"""Trains a small Llama on the text of this file, in pure JAX: parameters are a dictionary, a model is a function.

    python examples/jax/llama.py [--steps 60] [--plain] [--large]

--plain runs the same model with jax.numpy in place of kernel_pytorch.jax: the same losses, for comparison. --large is a
model for a GPU, in bf16; with --plain it has cuDNN's attention.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kernel_pytorch.jax as kp

BYTES = 256  # tokens are bytes


class Size(NamedTuple):
    layers: int
    dim: int
    heads: int
    key_heads: int
    hidden: int
    batch: int
    length: int
    dtype: Any

    @property
    def head(self) -> int:
        return self.dim // self.heads


SMALL = Size(2, 128, 4, 2, 256, batch=8, length=64, dtype=jnp.float32)
LARGE = Size(4, 2048, 16, 4, 5632, batch=8, length=2048, dtype=jnp.bfloat16)


class Functions(NamedTuple):
    """What a block is made of: ours, or the same in jax.numpy."""

    norm: Callable[..., Any]
    attention: Callable[..., Any]  # of packed heads, with the tables that turn them
    mlp: Callable[..., Any]
    loss: Callable[..., Any]


def plain_norm(x: Any, weight: Any) -> Any:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * weight


def plain_attention(packed: Any, cos: Any, sin: Any, heads: int, key_heads: int, implementation: str) -> Any:
    def turned(x: Any) -> Any:
        first, second = jnp.split(x, 2, -1)
        c, s = cos[:, None], sin[:, None]
        return jnp.concatenate([first * c - second * s, second * c + first * s], -1).astype(x.dtype)

    query, key, value = jnp.split(packed, (heads, heads + key_heads), 2)
    return jax.nn.dot_product_attention(
        turned(query), turned(key), value, is_causal=True, implementation=implementation
    )


def plain_mlp(x: Any, gate_up: Any, down: Any) -> Any:
    both = x @ gate_up.T
    return (jax.nn.silu(both[..., 0::2]) * both[..., 1::2]) @ down.T


def plain_loss(hidden: Any, weight: Any, target: Any) -> Any:
    logits = (hidden @ weight.T).astype(jnp.float32)
    return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, target[..., None], -1)[..., 0]).mean()


def ours(size: Size) -> Functions:
    attention = partial(kp.attention_packed, heads=size.heads, key_heads=size.key_heads, causal=True)
    return Functions(kp.rms_norm, attention, partial(kp.mlp, activation="swiglu"), kp.linear_cross_entropy)


def plain(size: Size) -> Functions:
    implementation = "cudnn" if jax.default_backend() == "gpu" and size.dtype == jnp.bfloat16 else "xla"
    attention = partial(plain_attention, heads=size.heads, key_heads=size.key_heads, implementation=implementation)
    return Functions(plain_norm, attention, plain_mlp, plain_loss)


def make_parameters(size: Size, seed: int = 0) -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(seed), 4 * size.layers + 1))

    def weight(rows: int, columns: int) -> Any:
        return (jax.random.normal(next(keys), (rows, columns)) * columns**-0.5).astype(size.dtype)

    def ones() -> Any:
        return jnp.ones(size.dim, size.dtype)

    def layer() -> dict[str, Any]:
        return {
            "norm": ones(),
            "qkv": weight((size.heads + 2 * size.key_heads) * size.head, size.dim),
            "out": weight(size.dim, size.dim),
            "mlp_norm": ones(),
            "gate_up": weight(2 * size.hidden, size.dim),  # rows in pairs (gate, up)
            "down": weight(size.dim, size.hidden),
        }

    return {"table": weight(BYTES, size.dim), "layers": [layer() for _ in range(size.layers)], "norm": ones()}


def loss_of(size: Size, functions: Functions, parameters: dict[str, Any], tokens: Any) -> Any:
    """The mean cross entropy of each next byte."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    angles = jnp.arange(inputs.shape[1])[:, None] * 10000.0 ** (-jnp.arange(size.head // 2) / (size.head // 2))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    x = parameters["table"][inputs]
    for layer in parameters["layers"]:
        packed = (functions.norm(x, layer["norm"]) @ layer["qkv"].T).reshape(*x.shape[:2], -1, size.head)
        x = x + functions.attention(packed, cos, sin).reshape(x.shape) @ layer["out"].T
        x = x + functions.mlp(functions.norm(x, layer["mlp_norm"]), layer["gate_up"], layer["down"])
    return functions.loss(functions.norm(x, parameters["norm"]), parameters["table"], targets)


def train(size: Size, functions: Functions, steps: int) -> tuple[list[float], float]:
    """Losses of the steps, and the seconds of one, without those that compile."""
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)
    draw = np.random.default_rng(0)
    optimizer = kp.optim.adamw(2e-3 if size == SMALL else 2e-4, max_norm=1.0)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(parameters: Any, state: Any, tokens: Any) -> Any:
        loss, gradients = jax.value_and_grad(partial(loss_of, size, functions))(parameters, tokens)
        return *optimizer.step(parameters, gradients, state), loss

    parameters = make_parameters(size)
    state = optimizer.init(parameters)
    losses = []
    warm = min(3, steps - 1)
    for number in range(steps):
        if number == warm:
            jax.block_until_ready(parameters)
            begin = time.perf_counter()
        places = draw.integers(0, len(text) - size.length - 1, size.batch)
        tokens = np.stack([text[place : place + size.length + 1] for place in places])
        parameters, state, loss = step(parameters, state, tokens)
        losses.append(loss)
    jax.block_until_ready(parameters)
    seconds = (time.perf_counter() - begin) / (steps - warm)
    return [float(loss) for loss in losses], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--plain", action="store_true", help="jax.numpy in place of our ops")
    parser.add_argument("--large", action="store_true", help="a model for a GPU")
    arguments = parser.parse_args()
    size = LARGE if arguments.large else SMALL
    losses, seconds = train(size, (plain if arguments.plain else ours)(size), arguments.steps)
    for number in range(0, arguments.steps, max(1, arguments.steps // 6)):
        print(f"step {number:4}: {losses[number]:.3f}")
    print(f"step {arguments.steps - 1:4}: {losses[-1]:.3f}, {1e3 * seconds:.1f} ms a step")


if __name__ == "__main__":
    main()
