"""Every op under jax's transforms, against the same in jax.numpy."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Case
from jax import export
from jax.sharding import Mesh, PartitionSpec
from kernel_pytorch._shape_rules import declared

from kernel_pytorch.jax import policies

TOLERANCE = {jnp.dtype("float32"): 2e-5, jnp.dtype("bfloat16"): 3e-2, jnp.dtype("float16"): 4e-3}
every_op = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
# Transforms that an op has no part in but by the calls of its forward and backward: one op of each kind shows them.
KINDS = (
    "rms_norm with a residual",
    "cross_entropy",
    "rope",
    "linear",
    "attention with bias and sinks",
    "mean_pool",
    "attention_packed with rope",
)
some_ops = pytest.mark.parametrize("case", [case for case in CASES if case.name in KINDS], ids=lambda case: case.name)


def close(ours: Any, reference: Any, tolerance: float = 2e-5) -> None:
    ours, reference = jax.tree.leaves(ours), jax.tree.leaves(reference)
    assert len(ours) == len(reference)
    for one, other in zip(ours, reference):
        assert one.shape == other.shape
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, atol=tolerance * max(1.0, np.abs(other).max(initial=0)), rtol=0)


def loss_of(function: Any) -> Any:
    """A number that depends on every element of every result, differently on each."""

    def loss(*arrays: Any) -> Any:
        results = [one.astype(jnp.float32) for one in jax.tree.leaves(function(*arrays))]
        return sum((one * jnp.cos(jnp.arange(one.size) + i).reshape(one.shape)).sum() for i, one in enumerate(results))

    return loss


def gradients_of(function: Any, count: int) -> Any:
    return jax.grad(loss_of(function), argnums=tuple(range(count)))


def results_and_gradients_of(function: Any, count: int) -> Any:
    return lambda *arrays: (function(*arrays), gradients_of(function, count)(*arrays))


@every_op
def test_values_with_and_without_jit(case: Case) -> None:
    arrays = (*case.arrays(), *case.constants)
    expected = jax.jit(case.reference)(*arrays)
    close(case.ours(*arrays), expected)
    close(jax.jit(case.ours)(*arrays), expected)


@every_op
def test_bf16(case: Case) -> None:
    check_narrow(case, jnp.bfloat16)


@some_ops
def test_fp16(case: Case) -> None:
    check_narrow(case, jnp.float16)


def check_narrow(case: Case, dtype: Any) -> None:
    arrays = case.arrays(dtype)
    wide = [array.astype(jnp.float32) for array in arrays]
    ours, expected = (
        jax.jit(results_and_gradients_of(one, len(arrays)))(*given, *case.constants)
        for one, given in ((case.ours, arrays), (case.reference, wide))
    )
    assert all(gradient.dtype == array.dtype for gradient, array in zip(ours[1], arrays))
    close(ours[0], expected[0], TOLERANCE[jnp.dtype(dtype)])
    close(ours[1], expected[1], 4 * TOLERANCE[jnp.dtype(dtype)])


@every_op
def test_gradients(case: Case) -> None:
    arrays = case.arrays()
    ours, expected = (
        jax.jit(gradients_of(one, len(arrays)))(*arrays, *case.constants) for one in (case.ours, case.reference)
    )
    close(ours, expected)


@some_ops
def test_a_gradient_of_one_argument_alone(case: Case) -> None:
    arrays = (*case.arrays(), *case.constants)
    together = jax.jit(gradients_of(case.ours, len(case.shapes)))(*arrays)
    for i in range(len(case.shapes)):
        close(jax.jit(jax.grad(loss_of(case.ours), argnums=i))(*arrays), together[i])


@every_op
def test_vmap_of_everything_and_of_the_first(case: Case) -> None:
    arrays = case.arrays(front=(3,))
    constants = (None,) * len(case.constants)
    axes = (*(0,) * len(arrays), *constants)
    close(
        jax.jit(jax.vmap(case.ours, axes))(*arrays, *case.constants),
        jax.jit(jax.vmap(case.reference, axes))(*arrays, *case.constants),
    )
    first = (0, *(None,) * (len(arrays) - 1), *constants)
    rest = [array[0] for array in arrays[1:]]
    mapped = (jnp.moveaxis(arrays[0], 0, -1), *rest, *case.constants)
    first = (-1, *first[1:])
    close(jax.jit(jax.vmap(case.ours, first))(*mapped), jax.jit(jax.vmap(case.reference, first))(*mapped))


@every_op
def test_vmap_of_grad_and_grad_of_vmap(case: Case) -> None:
    arrays = case.arrays(front=(3,))
    axes = (*(0,) * len(arrays), *(None,) * len(case.constants))
    for transform in (
        lambda one: jax.vmap(gradients_of(one, len(arrays)), axes),
        lambda one: gradients_of(jax.vmap(one, axes), len(arrays)),
    ):
        ours, reference = (jax.jit(transform(one))(*arrays, *case.constants) for one in (case.ours, case.reference))
        close(ours, reference, 5e-5)


@some_ops
def test_scan_and_remat(case: Case) -> None:
    arrays = case.arrays()

    def steps(function: Any, policy: Any = None) -> Any:
        @partial(jax.checkpoint, policy=policy)
        def once(first: Any) -> Any:
            return loss_of(function)(first, *arrays[1:], *case.constants)

        def total(first: Any) -> Any:
            return jax.lax.scan(lambda sum_, factor: (sum_ + once(first * factor), None), 0.0, jnp.arange(1.0, 3.0))[0]

        return jax.grad(total)

    expected = jax.jit(steps(case.reference))(arrays[0])
    for policy in (None, policies.save_residuals, policies.recompute_all):
        close(jax.jit(steps(case.ours, policy))(arrays[0]), expected, 5e-5)


@some_ops
def test_donated_arguments_and_value_and_grad(case: Case) -> None:
    def step(function: Any) -> Any:
        return jax.value_and_grad(lambda *arrays: loss_of(function)(*arrays, *case.constants), range(len(case.shapes)))

    expected = jax.jit(step(case.reference))(*case.arrays())
    close(jax.jit(step(case.ours), donate_argnums=range(len(case.shapes)))(*case.arrays()), expected, 5e-5)


@some_ops
def test_shard_map_with_checked_axes(case: Case) -> None:
    """Each device (four of a CPU) has its own arrays; gradients are taken inside."""
    arrays = case.arrays(front=(len(jax.devices()),))
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    split, whole = PartitionSpec("devices"), PartitionSpec()
    specs = (*(split,) * len(arrays), *(whole,) * len(case.constants))

    def inside(function: Any) -> Any:
        def run(*given: Any) -> Any:
            own = [array[0] for array in given[: len(arrays)]]
            gradients = gradients_of(function, len(arrays))(*own, *given[len(arrays) :])
            return jax.tree.map(lambda one: one[None], gradients)

        return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=split))

    close(inside(case.ours)(*arrays, *case.constants), inside(case.reference)(*arrays, *case.constants), 5e-5)


@some_ops
def test_export_keeps_the_calls_of_forward_and_backward(case: Case) -> None:
    arrays = (*case.arrays(), *case.constants)
    both = results_and_gradients_of(case.ours, len(case.shapes))
    checks = [export.DisabledSafetyCheck.custom_call(f"kernel_pytorch.{name}") for name in declared()]
    exported = export.export(jax.jit(both), disabled_checks=checks)(*arrays)
    assert exported.mlir_module().count("kernel_pytorch.") >= 2
    again = export.deserialize(exported.serialize())
    close(again.call(*arrays), jax.jit(both)(*arrays))


@every_op
def test_forward_mode_raises_and_says_why(case: Case) -> None:
    def function(*arrays: Any) -> Any:
        return loss_of(case.ours)(*arrays, *case.constants)

    arrays = case.arrays()
    ones = tuple(jnp.ones_like(array) for array in arrays)
    _, pushed = jax.linearize(function, *arrays)
    for call in (
        lambda: jax.jvp(function, arrays, ones),
        lambda: jax.jit(lambda *a: jax.jvp(function, a, ones))(*arrays),
        lambda: jax.jvp(jax.jit(function), arrays, ones),
        lambda: pushed(*ones),
        lambda: jax.jacfwd(function)(*arrays),
        lambda: jax.hessian(function)(*arrays),
    ):
        with pytest.raises(NotImplementedError, match=r"has no derivative.*write the op in jax\.numpy"):
            call()
