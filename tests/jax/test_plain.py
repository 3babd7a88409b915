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
    *("grouped_matmul", "ragged_dot", "moe_mlp", "linear_attention", "delta_rule", "causal_conv1d"),
    "native_sparse_attention",
)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ROWS], ids=lambda case: case.name)
def test_every_op(case: Case, forced: None) -> None:
    arrays = case.arrays()
    lowered = jax.jit(results_and_gradients_of(case.ours, len(arrays))).lower(*arrays, *case.constants)
    assert "kernel_pytorch." not in lowered.as_text()
    close(lowered.compile()(*arrays, *case.constants), expected(case, *arrays))


def routed(x: Any, **options: Any) -> Any:
    """What has gradients, and the rest as numbers that have none."""
    routing = kp.route(x, **options)
    numbers = [getattr(routing, name) for name in ("experts", "offsets", "counts", "token_of_row", "row_of_token")]
    return [routing.weights, routing.aux_loss, routing.z_loss, *(one.astype(jnp.float32) for one in numbers)]


def sparse(x: Any) -> Any:
    q = x[None, :, None]
    options = dict(block_size=2, blocks=2, window=2, compress_block=2, compress_stride=1, local_blocks=1)
    output, lists = kp.native_sparse_attention(q, 2 * q, q + 1, gates=(0.5, 1.0, 0.25), return_indices=True, **options)
    return output, lists.astype(jnp.float32)


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
    "groups": lambda x: routed(x, k=3, score="sigmoid", groups=4, group_k=2, bias=jnp.arange(8.0) / 9, scale=2.0),
    "capacity": lambda x: routed(x, k=2, capacity=1, renormalize=False),
    "chosen": lambda x: kp.moe_combine(
        x, kp.route_chosen(jnp.array([[0, 2], [1, 1], [5, 2]]), jnp.ones((3, 2)), 4, capacity=2), weighted=False
    ),
    "clamped": lambda x: kp.moe_mlp(
        x,
        kp.route(x[:, :3], 2),
        jnp.sin(jnp.arange(96.0)).reshape(3, 8, 4),
        jnp.cos(jnp.arange(48.0)).reshape(3, 2, 8),
        activation="swiglu_clamped_interleaved",
        limit=1.0,
        down_bias=jnp.ones((3, 8)),
    ),
    "chosen blocks": lambda x: sparse(x),
    "chosen keys": lambda x: kp.lightning_indexer(
        jnp.round(x[None, :, None]), jnp.round(x[None]), jnp.ones((1, 6, 1)), top_k=2
    ).astype(jnp.float32),
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


def test_dropout(forced: None) -> None:
    dropped = kp.dropout(jnp.ones((64, 64)), 0.25, seed=jax.random.key(0))
    assert abs(float((dropped == 0).mean()) - 0.25) < 0.04 and abs(float(dropped.mean()) - 1) < 0.06


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adamw", {"max_norm": 1.0, "amsgrad": True}),
        ("adamw", {"master_weights": True, "maximize": True}),
        ("lion", {"weight_decay": 0.1}),
        ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ("sgd", {}),
    ],
)
def test_optimizers(name: str, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(2)
    start = {"a": jnp.asarray(random.standard_normal((5, 3)), jnp.float32), "b": jnp.ones(7, jnp.bfloat16)}
    gradients = [jax.tree.map(lambda one, i=i: jnp.cos(one * i), start) for i in (1, 2, 3)]

    def trained() -> Any:
        optimizer = getattr(kp.optim, name)(lambda count: 0.1 / (1 + count), **options)
        parameters, state = start, optimizer.init(start)
        for one in gradients:
            parameters, state = optimizer.step(parameters, one, state)
        return parameters, state

    expected = trained()
    monkeypatch.setattr(_plain, "is_needed", lambda: True)
    close(trained(), expected, 1e-2)
    close(trained()[0]["a"], expected[0]["a"], 1e-5)


# Cases whose op has no formula, or not their option: the CPU's kernels compute them on copies.
HOSTED = ("rms_norm with an activation", "rope_from_frequencies", "quantized_matmul")


@pytest.mark.parametrize("case", [case for case in CASES if case.name in HOSTED], ids=lambda case: case.name)
def test_gradients_on_the_host(case: Case, forced: None) -> None:
    arrays = case.arrays()
    found = jax.jit(results_and_gradients_of(case.ours, len(arrays)))(*arrays, *case.constants)
    close(found, expected(case, *arrays))


# What there is no formula for, of x [6, 32].
ON_HOST: dict[str, Any] = {
    "score_mod": lambda x: kp.attention(
        *[x.reshape(1, 6, 2, 16)] * 3, score_mod=lambda score, b, h, q, k: score + 0.1 * (q - k)
    ),
    "few bits": lambda x: kp.quantize_weight(x).dequantize(jnp.float32),
}


@pytest.mark.parametrize("name", sorted(ON_HOST))
def test_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = jnp.asarray(np.random.default_rng(3).standard_normal((6, 32)), jnp.float32)
    want = ON_HOST[name](x)
    monkeypatch.setattr(_plain, "is_needed", lambda: True)
    lowered = jax.jit(ON_HOST[name]).lower(x)
    assert "kernel_pytorch." not in lowered.as_text()
    np.testing.assert_allclose(lowered.compile()(x), want, rtol=1e-6, atol=1e-6)


def test_compact_states_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> Any:
        parameters = {"w": jnp.linspace(-1.0, 1.0, 512, dtype=jnp.float32).reshape(2, 256)}
        optimizer = kp.optim.adamw(0.1, state="compact")
        state = optimizer.init(parameters)
        for _ in range(3):
            parameters, state = jax.jit(optimizer.step)(parameters, jax.tree.map(jnp.cos, parameters), state)
        return parameters

    want = trained()
    monkeypatch.setattr(_plain, "is_needed", lambda: True)
    np.testing.assert_array_equal(trained()["w"], want["w"])
