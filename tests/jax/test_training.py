"""What training needs besides ops: AdamW, FP8, policies of checkpointing, and what has no derivative."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernel_pytorch.jax as kp


def adamw_in_numpy(parameter: Any, gradients: list[Any], rates: list[float], decay: float = 0.01) -> Any:
    value, average, square = np.asarray(parameter, np.float64), 0.0, 0.0
    for number, (gradient, rate) in enumerate(zip(gradients, rates), 1):
        gradient = np.asarray(gradient, np.float64)
        average = 0.9 * average + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        corrected = np.sqrt(square / (1 - 0.999**number)) + 1e-8
        value = value - rate * (average / (1 - 0.9**number) / corrected + decay * value)
    return value


def some_parameters() -> dict[str, Any]:
    normal = jax.random.normal
    key = jax.random.key
    return {"a": normal(key(0), (30, 26)), "b": [normal(key(1), (14,)).astype(jnp.bfloat16), jnp.ones(())]}


@pytest.mark.parametrize("rate", [1e-2, lambda count: 1e-2 / (1 + count)])
@pytest.mark.parametrize("largest", [None, 1.0])
def test_adamw_is_adamw(rate: Any, largest: float | None) -> None:
    parameters = some_parameters()
    gradients = jax.tree.map(lambda one: (0.3 * one + 1).astype(one.dtype), parameters)
    norm = np.sqrt(sum(np.square(np.asarray(one, np.float64)).sum() for one in jax.tree.leaves(gradients)))
    factor = 1.0 if largest is None else min(1.0, largest / (norm + 1e-6))
    optimizer = kp.optim.adamw(rate, max_norm=largest)
    state, changed = optimizer.init(parameters), parameters
    for _ in range(3):
        changed, state = jax.jit(optimizer.step)(changed, gradients, state)
    rates = [rate(count) if callable(rate) else rate for count in range(3)]
    for first, gradient, last in zip(*map(jax.tree.leaves, (parameters, gradients, changed))):
        expected = adamw_in_numpy(first, [np.asarray(gradient, np.float64) * factor] * 3, rates)
        tolerance = 3e-2 if last.dtype == jnp.bfloat16 else 2e-6
        np.testing.assert_allclose(np.asarray(last, np.float64), expected, atol=tolerance)
    assert int(state.count) == 3


def test_adamw_updates_are_differences() -> None:
    parameters = some_parameters()
    gradients = jax.tree.map(jnp.ones_like, parameters)
    optimizer = kp.optim.adamw(1e-2)
    state = optimizer.init(parameters)
    updates, _ = optimizer.update(gradients, state, parameters)
    changed, _ = optimizer.step(parameters, gradients, state)
    for old, update, new in zip(*map(jax.tree.leaves, (parameters, updates, changed))):
        np.testing.assert_allclose(
            np.float32(old + update), np.float32(new), atol=1e-6 if new.dtype != jnp.bfloat16 else 2e-2
        )
    with pytest.raises(ValueError, match="parameters"):
        optimizer.update(gradients, state)
    with pytest.raises(ValueError, match="alike"):
        optimizer.step(parameters, {"a": gradients["a"]}, state)


def test_a_donated_step_of_adamw_copies_nothing() -> None:
    parameters = {"a": jnp.ones((300, 260)), "b": jnp.ones((300, 260))}
    optimizer = kp.optim.adamw(1e-2)
    step = jax.jit(optimizer.step, donate_argnums=(0, 2))
    text = step.lower(parameters, parameters, optimizer.init(parameters)).compile().as_text()
    assert "optimizer_step_" in text and not re.search(r"= f32\[300,260\]\S* copy", text)


@pytest.mark.parametrize("granularity", ["tensor", "row", "1x128", "128x128"])
def test_products_of_fp8(granularity: str) -> None:
    x, weight = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((300, 256), (140, 256))))
    quantized = kp.quantize(x, granularity=granularity, transposed=True)
    weights = kp.quantize(weight, granularity="128x128" if granularity == "1x128" else granularity)
    product = kp.scaled_matmul(quantized.codes, weights.codes, quantized.scales, weights.scales, dtype=jnp.float32)
    reference = x @ weight.T
    assert 1e-3 < float(jnp.linalg.norm(product - reference) / jnp.linalg.norm(reference)) < 0.06
    if granularity == "tensor":
        values = quantized.codes.astype(jnp.float32) * quantized.scales
        np.testing.assert_array_equal(quantized.transposed.T.astype(jnp.float32), quantized.codes.astype(jnp.float32))
        assert float(jnp.abs(values - x).max() / jnp.abs(x).max()) < 0.07


def test_quantize_says_what_is_wrong() -> None:
    x = jnp.ones((4, 4))
    for call, words in [
        (lambda: kp.quantize(x[0]), "rows, columns"),
        (lambda: kp.quantize(x, dtype=jnp.float16), "float16"),
        (lambda: kp.quantize(x, granularity="column"), "column"),
        (lambda: kp.scaled_matmul(x, x, jnp.ones(1), jnp.ones(1)), "fp32"),
    ]:
        with pytest.raises(Exception, match=words):
            jax.eval_shape(call)


def test_policies_keep_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    query = jax.random.normal(jax.random.key(0), (1, 8, 2, 8))

    def loss(query: Any) -> Any:
        return kp.attention(jnp.sin(query), query, query).sum()

    def kept(policy: Any) -> int:
        jax.ad_checkpoint.print_saved_residuals(jax.checkpoint(loss, policy=policy), query)
        return capsys.readouterr().out.count(kp.policies.RESIDUALS)

    assert kept(kp.policies.recompute_all) == 0
    assert kept(kp.policies.save_residuals) == 2  # output and lse
    gradient = jax.grad(jax.checkpoint(loss, policy=kp.policies.save_residuals))(query)
    np.testing.assert_allclose(gradient, jax.grad(loss)(query), atol=1e-6)


def test_second_derivatives() -> None:
    a, b = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((3, 5, 8), (8, 4))))

    def second(product: Any) -> Any:
        first = jax.grad(lambda a, b: jnp.sin(product(a, b)).sum())
        return jax.grad(lambda a, b: (first(a, b) ** 2).sum(), argnums=(0, 1))(a, b)

    for one, other in zip(second(kp.matmul), second(jnp.matmul)):
        np.testing.assert_allclose(one, other, atol=2e-4)
    for call in (kp.silu, lambda x: kp.attention(x[None], x[None], x[None])):
        with pytest.raises(NotImplementedError, match="first derivatives in reverse mode"):
            jax.grad(lambda x, call=call: jax.grad(lambda x: call(x).sum())(x).sum())(a)
