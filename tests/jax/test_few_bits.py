"""Weights in few bits: the same codes as torch's front end, products and gradients of what they stand for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernel_pytorch.jax as kp

torch = pytest.importorskip("torch", reason="it compares with torch's front end")
from kernel_pytorch import functional  # noqa: E402

CASES: list[tuple[str, dict[str, Any]]] = [
    ("nvfp4", {}),
    ("mxfp4", {}),
    ("mxfp8", {}),
    ("int4", {"group": 32, "asymmetric": True}),
    ("int8", {"group": 64}),
    ("int2", {"group": 32, "asymmetric": True}),
    ("int3", {"group": 64}),
    ("int6", {}),
]


@pytest.mark.parametrize(("format", "options"), CASES)
def test_codes_products_and_gradients(format: str, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    weight, x, bias = (rng.standard_normal(shape, np.float32) for shape in ((12, 61), (2, 3, 61), (12,)))
    made = kp.quantize_weight(weight, format, **options)
    theirs = functional.quantize_weight(torch.from_numpy(weight), format, **options)
    np.testing.assert_array_equal(np.asarray(made.codes).view(np.uint8), theirs.codes.numpy())
    values = kp.dequantize_weight(made, jnp.float32)
    np.testing.assert_array_equal(values, theirs.dequantize(torch.float32).numpy())

    def loss(product: Any, x: Any, bias: Any) -> Any:
        return jnp.sin(product(x, bias)).sum()

    mine = jax.jit(jax.grad(loss, (1, 2)), static_argnums=0)(
        lambda x, bias: kp.quantized_matmul(x, made, bias=bias, activation="silu"), x, bias
    )
    plain = jax.grad(loss, (1, 2))(lambda x, bias: jax.nn.silu(x @ values.T + bias), x, bias)
    for one, other in zip(mine, plain):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)


def test_integers_multiply_as_in_torch() -> None:
    rng = np.random.default_rng(0)
    weight, x, bias = (rng.standard_normal(shape, np.float32) for shape in ((12, 96), (2, 3, 96), (12,)))
    for group in (96, 32):
        scales = np.abs(weight).reshape(12, -1, group).max(-1) / 127
        codes = np.rint(weight / scales.repeat(group, 1)).astype(np.int8)
        mine = jax.jit(
            lambda x, codes=codes, scales=scales: kp.int8_matmul(x, codes, scales, bias=bias, activation="silu")
        )(x)
        theirs = functional.int8_matmul(
            *(torch.from_numpy(one) for one in (x, codes, scales)), bias=torch.from_numpy(bias), activation="silu"
        )
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-5, atol=1e-5)
        values = codes * scales.repeat(group, 1)
        grad = jax.grad(lambda x, codes=codes, scales=scales: kp.int8_matmul(x, codes, scales).sum())(x)
        np.testing.assert_allclose(grad, np.broadcast_to(values.sum(0), x.shape), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="scale_x is missing"):
        kp.int8_matmul(jnp.ones((2, 96), jnp.int8), codes, scales)


@pytest.mark.parametrize(("format", "options"), CASES)
def test_experts_in_few_bits(format: str, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    weight, x, bias = (rng.standard_normal(shape, np.float32) for shape in ((3 * 8, 61), (5, 61), (3, 8)))
    made = kp.quantize_weight(weight, format, **options)
    values = kp.dequantize_weight(made, jnp.float32).reshape(3, 8, 61)
    offsets, gather = jnp.array([2, 2, 6], jnp.int32), jnp.array([4, 0, 1, 1, 3, 2, 0], jnp.int32)

    def few(x: Any, bias: Any) -> Any:
        return kp.quantized_grouped_matmul(x, made, offsets, bias=bias, gather=gather, activation="swiglu")

    def plain(x: Any, bias: Any) -> Any:
        return kp.grouped_matmul(
            x, values, offsets, bias=bias, gather=gather, activation="swiglu", transpose_weight=True
        )

    np.testing.assert_allclose(few(x, bias), plain(x, bias), rtol=2e-4, atol=2e-4)
    both = [jax.grad(lambda *a, f=f: jnp.sin(0.05 * f(*a)).sum(), (0, 1))(x, bias) for f in (few, plain)]
    for mine, theirs in zip(*both):
        np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-4)


def test_a_weight_is_a_pytree() -> None:
    weight = kp.quantize_weight(jnp.ones((4, 32)), "mxfp4")
    product = jax.jit(lambda x, weight: kp.quantized_matmul(x, weight))(jnp.ones((2, 32)), weight)
    np.testing.assert_array_equal(product, 32.0)
    with pytest.raises(ValueError, match="last sizes must be equal"):
        kp.quantized_matmul(jnp.ones((2, 30)), weight)


def test_places_products_and_gradients() -> None:
    rng = np.random.default_rng(0)
    weight, x, bias = (rng.standard_normal(shape, np.float32) for shape in ((12, 72), (2, 3, 72), (12,)))
    made = kp.sparse_compress(weight)
    theirs = functional.sparse_compress(torch.from_numpy(weight))
    np.testing.assert_array_equal(made.values, theirs.values.numpy())
    np.testing.assert_array_equal(made.metadata, theirs.metadata.numpy())
    values = made.to_dense()
    np.testing.assert_array_equal(values, theirs.to_dense().numpy())

    def loss(product: Any, x: Any, bias: Any) -> Any:
        return jnp.sin(product(x, bias)).sum()

    mine = jax.jit(jax.grad(loss, (1, 2)), static_argnums=0)(
        lambda x, bias: kp.sparse_matmul(x, made, bias=bias, activation="silu"), x, bias
    )
    plain = jax.grad(loss, (1, 2))(lambda x, bias: jax.nn.silu(x @ values.T + bias), x, bias)
    for one, other in zip(mine, plain):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)


def test_a_sparse_weight_is_a_pytree() -> None:
    weight = kp.sparse_compress(jnp.ones((4, 32)))
    product = jax.jit(lambda x, weight: kp.sparse_matmul(x, weight))(jnp.ones((2, 32)), weight)
    np.testing.assert_array_equal(product, 16.0)
    with pytest.raises(ValueError, match="last sizes must be equal"):
        kp.sparse_matmul(jnp.ones((2, 28)), weight)
    with pytest.raises(ValueError, match="multiple of 4"):
        kp.sparse_compress(jnp.ones((2, 6)))
