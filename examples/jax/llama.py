"""Trains a small Llama on the text of this file, in pure JAX: parameters are a dictionary, a model is a function.

    python examples/jax/llama.py [--steps 60] [--plain]

--plain runs the same model with jax.numpy in place of kernel_pytorch.jax: the same losses, for comparison.
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

LAYERS, DIM, HEADS, KEY_HEADS, HIDDEN = 2, 128, 4, 2, 256
HEAD = DIM // HEADS
BATCH, LENGTH, BYTES = 8, 64, 256


class Functions(NamedTuple):
    """What a block is made of: ours, or the same in jax.numpy."""

    norm: Callable[..., Any]
    rope: Callable[..., Any]
    attention: Callable[..., Any]
    mlp: Callable[..., Any]
    loss: Callable[..., Any]


def plain_norm(x: Any, weight: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def plain_rope(query: Any, key: Any, cos: Any, sin: Any) -> Any:
    def turned(x: Any) -> Any:
        first, second = jnp.split(x, 2, -1)
        c, s = cos[:, None], sin[:, None]
        return jnp.concatenate([first * c - second * s, second * c + first * s], -1)

    return turned(query), turned(key)


def plain_mlp(x: Any, gate_up: Any, down: Any) -> Any:
    both = x @ gate_up.T
    return (jax.nn.silu(both[..., 0::2]) * both[..., 1::2]) @ down.T


def plain_loss(hidden: Any, weight: Any, target: Any) -> Any:
    logits = hidden @ weight.T
    return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, target[..., None], -1)[..., 0]).mean()


PLAIN = Functions(plain_norm, plain_rope, partial(jax.nn.dot_product_attention, is_causal=True), plain_mlp, plain_loss)
OURS = Functions(
    kp.rms_norm,
    kp.rope,
    partial(kp.attention, causal=True),
    partial(kp.mlp, activation="swiglu"),
    kp.linear_cross_entropy,
)


def make_parameters(seed: int = 0) -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(seed), 4 * LAYERS + 1))

    def weight(rows: int, columns: int) -> Any:
        return jax.random.normal(next(keys), (rows, columns)) * columns**-0.5

    def layer() -> dict[str, Any]:
        return {
            "norm": jnp.ones(DIM),
            "qkv": weight((HEADS + 2 * KEY_HEADS) * HEAD, DIM),
            "out": weight(DIM, DIM),
            "mlp_norm": jnp.ones(DIM),
            "gate_up": weight(2 * HIDDEN, DIM),  # rows in pairs (gate, up)
            "down": weight(DIM, HIDDEN),
        }

    return {"table": weight(BYTES, DIM), "layers": [layer() for _ in range(LAYERS)], "norm": jnp.ones(DIM)}


def loss_of(functions: Functions, parameters: dict[str, Any], tokens: Any) -> Any:
    """The mean cross entropy of each next byte."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    angles = jnp.arange(inputs.shape[1])[:, None] * 10000.0 ** (-jnp.arange(HEAD // 2) / (HEAD // 2))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    x = parameters["table"][inputs]
    for layer in parameters["layers"]:
        packed = (functions.norm(x, layer["norm"]) @ layer["qkv"].T).reshape(*x.shape[:2], -1, HEAD)
        query, key, value = jnp.split(packed, (HEADS, HEADS + KEY_HEADS), 2)
        query, key = functions.rope(query, key, cos, sin)
        x = x + functions.attention(query, key, value).reshape(x.shape) @ layer["out"].T
        x = x + functions.mlp(functions.norm(x, layer["mlp_norm"]), layer["gate_up"], layer["down"])
    return functions.loss(functions.norm(x, parameters["norm"]), parameters["table"], targets)


def train(functions: Functions, steps: int) -> list[float]:
    """Losses of the steps."""
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)
    draw = np.random.default_rng(0)
    optimizer = kp.optim.adamw(2e-3, max_norm=1.0)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(parameters: Any, state: Any, tokens: Any) -> Any:
        loss, gradients = jax.value_and_grad(partial(loss_of, functions))(parameters, tokens)
        return *optimizer.step(parameters, gradients, state), loss

    parameters = make_parameters()
    state = optimizer.init(parameters)
    losses = []
    for _ in range(steps):
        places = draw.integers(0, len(text) - LENGTH - 1, BATCH)
        tokens = np.stack([text[place : place + LENGTH + 1] for place in places])
        parameters, state, loss = step(parameters, state, tokens)
        losses.append(loss)
    return [float(loss) for loss in losses]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--plain", action="store_true", help="jax.numpy in place of our ops")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    losses = train(PLAIN if arguments.plain else OURS, arguments.steps)
    for number in range(0, arguments.steps, max(1, arguments.steps // 6)):
        print(f"step {number:4}: {losses[number]:.3f}")
    print(f"step {arguments.steps - 1:4}: {losses[-1]:.3f}, {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
