"""Every op under jax's transforms, against the same in jax.numpy."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Case
from checks import (
    close,
    expected,
    expected_of_samples,
    gradients_of,
    loss_of,
    results_and_gradients_of,
    weighted_sum,
)
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
    "moe_mlp",
)
some_ops = pytest.mark.parametrize("case", [case for case in CASES if case.name in KINDS], ids=lambda case: case.name)


@every_op
def test_values_and_gradients(case: Case) -> None:
    """Without jit forward alone runs; in the other programs the call that keeps what backward needs."""
    arrays = case.arrays()
    results, gradients = expected(case, *arrays)
    close(case.ours(*arrays, *case.constants), results)
    close(jax.jit(case.ours)(*arrays, *case.constants), results)
    both = jax.jit(results_and_gradients_of(case.ours, len(arrays)))(*arrays, *case.constants)
    close(both[0], results)
    close(both[1], gradients)


@every_op
def test_bf16(case: Case) -> None:
    check_narrow(case, jnp.bfloat16)


@some_ops
def test_fp16(case: Case) -> None:
    check_narrow(case, jnp.float16)


def check_narrow(case: Case, dtype: Any) -> None:
    arrays = case.arrays(dtype)
    ours = jax.jit(results_and_gradients_of(case.ours, len(arrays)))(*arrays, *case.constants)
    assert all(gradient.dtype == array.dtype for gradient, array in zip(ours[1], arrays))
    results, gradients = expected(case, *arrays)
    close(ours[0], results, TOLERANCE[jnp.dtype(dtype)])
    close(ours[1], gradients, 4 * TOLERANCE[jnp.dtype(dtype)])


@some_ops
def test_a_gradient_of_one_argument_alone(case: Case) -> None:
    arrays = case.arrays()

    def alone(*arrays: Any) -> Any:
        return [jax.grad(loss_of(case.ours), argnums=i)(*arrays) for i in range(len(case.shapes))]

    close(jax.jit(alone)(*arrays, *case.constants), expected(case, *arrays)[1])


# Samples whose parameters differ, or whose parameters' gradients are asked for, need a call each. So do losses that
# are one number, packed offsets, groups of rows and tables of embeddings. Of the others vmap makes one call.
GROUPED = {"grouped_matmul", "quantized_grouped_matmul", "ragged_dot", "moe_mlp"}
LOOPS = {
    "forward": {"cross_entropy", "linear_cross_entropy", "embedding", "mean_pool of packed sequences"} | GROUPED,
    "all forward": {
        *("rms_norm", "rms_norm with an offset", "rms_norm with a residual", "rms_norm that returns its input"),
        *("layer_norm that returns its input", "layer_norm", "layer_norm with a residual"),
        *("rms_norm with an activation", "layer_norm with an activation", "linear of two matrices"),
        *("gelu, bias, residual", "gated_activation with biases", "norm_rope", "linear"),
        *("linear with gelu and a residual", "mlp", "gated mlp", "attention with bias and sinks"),
        *("quantized_matmul", "int8_matmul", "linear_attention", "causal_conv1d"),
    },
    "backward": {"matmul"} | GROUPED - {"quantized_grouped_matmul"},
}


@every_op
def test_vmap(case: Case) -> None:
    """Of all arrays, of the first alone, of gradients, and gradients of it: one program, each sample as if alone."""
    count = len(case.shapes)
    arrays = case.arrays(front=(3,))
    constants = (None,) * len(case.constants)
    everything = (*(0,) * count, *constants)
    first = (-1, *(None,) * (count - 1), *constants)

    def transformed(arrays: Any, mapped: Any) -> Any:
        together = jax.vmap(loss_of(case.ours), everything)
        return (
            jax.vmap(case.ours, everything)(*arrays, *case.constants),
            jax.vmap(gradients_of(case.ours, count), everything)(*arrays, *case.constants),
            jax.grad(lambda *one: together(*one, *case.constants).sum(), argnums=tuple(range(count)))(*arrays),
            jax.vmap(case.ours, first)(*mapped, *case.constants),
        )

    rest = case.arrays()[1:]
    mapped = (np.moveaxis(np.asarray(arrays[0]), 0, -1), *rest)
    values, of_samples, of_all, of_first = jax.jit(transformed)(arrays, mapped)
    results, gradients = expected_of_samples(case, *arrays)
    close(values, results)
    close(of_samples, gradients, 5e-5)
    close(of_all, gradients, 5e-5)
    repeated = (np.stack([np.asarray(one)] * 3) for one in rest)
    close(of_first, expected_of_samples(case, arrays[0], *repeated)[0])


@every_op
def test_vmap_makes_one_call_of_what_it_can(case: Case) -> None:
    arrays, alone = case.arrays(front=(3,)), case.arrays()
    constants = (None,) * len(case.constants)

    def loops(function: Any, axes: Any, arrays: Any) -> bool:
        return (
            "stablehlo.while"
            in jax.jit(jax.vmap(function, (*axes, *constants))).lower(*arrays, *case.constants).as_text()
        )

    of_first = (0, *(None,) * (len(alone) - 1))
    forward, parameters = case.name in LOOPS["forward"], case.name in LOOPS["all forward"]
    assert loops(case.ours, of_first, (arrays[0], *alone[1:])) == forward
    assert loops(case.ours, (0,) * len(arrays), arrays) == (forward or parameters)
    gradient = gradients_of(case.ours, len(arrays))
    backward = parameters or case.name in {"cross_entropy", "linear_cross_entropy"} | LOOPS["backward"]
    assert loops(gradient, (0,) * len(arrays), arrays) == backward


@some_ops
def test_scan_and_remat(case: Case) -> None:
    arrays = case.arrays()

    def steps(policy: Any) -> Any:
        @partial(jax.checkpoint, policy=policy)
        def once(first: Any) -> Any:
            return loss_of(case.ours)(first, *arrays[1:], *case.constants)

        def total(first: Any) -> Any:
            return jax.lax.scan(lambda sum_, factor: (sum_ + once(first * factor), None), 0.0, jnp.arange(1.0, 3.0))[0]

        return jax.grad(total)

    kinds = (None, policies.save_residuals, policies.recompute_all)
    found = jax.jit(lambda first: [steps(policy)(first) for policy in kinds])(arrays[0])
    once, twice = (expected(case, factor * np.asarray(arrays[0]), *arrays[1:])[1][0] for factor in (1, 2))
    for one in found:
        close(one, once + 2 * twice, 5e-5)


@some_ops
def test_donated_arguments_and_value_and_grad(case: Case) -> None:
    count = len(case.shapes)
    step = jax.value_and_grad(lambda *arrays: loss_of(case.ours)(*arrays, *case.constants), range(count))
    results, gradients = expected(case, *case.arrays())
    found = jax.jit(step, donate_argnums=range(count))(*case.arrays())
    close(found, (weighted_sum(results), gradients), 5e-5)


@some_ops
def test_shard_map_with_checked_axes(case: Case) -> None:
    """Each device (four of a CPU) has its own arrays; gradients are taken inside."""
    arrays = case.arrays(front=(len(jax.devices()),))
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    split, whole = PartitionSpec("devices"), PartitionSpec()
    specs = (*(split,) * len(arrays), *(whole,) * len(case.constants))

    def run(*given: Any) -> Any:
        own = [array[0] for array in given[: len(arrays)]]
        gradients = gradients_of(case.ours, len(arrays))(*own, *given[len(arrays) :])
        return jax.tree.map(lambda one: one[None], gradients)

    found = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=split))(*arrays, *case.constants)
    close(found, expected_of_samples(case, *arrays)[1], 5e-5)


@some_ops
def test_export_keeps_the_calls_of_forward_and_backward(case: Case) -> None:
    arrays = case.arrays()
    both = results_and_gradients_of(case.ours, len(arrays))
    checks = [export.DisabledSafetyCheck.custom_call(f"kernel_pytorch.{name}") for name in declared()]
    exported = export.export(jax.jit(both), disabled_checks=checks)(*arrays, *case.constants)
    calls = 1 if case.name == "cross_entropy" else 2  # its gradient comes with its loss
    assert exported.mlir_module().count("kernel_pytorch.") >= calls
    again = export.deserialize(exported.serialize())
    close(again.call(*arrays, *case.constants), expected(case, *arrays))


REFUSED = r"has no derivative.*write the op in jax\.numpy"


@every_op
def test_forward_mode_raises_and_says_why(case: Case) -> None:
    """While a program is compiled; and in what jax.linearize returns, which runs alone."""
    function, arrays, ones = forward_mode_of(case)
    _, pushed = jax.linearize(function, *arrays)
    for call in (lambda: jax.jit(lambda *a: jax.jvp(function, a, ones))(*arrays), lambda: pushed(*ones)):
        with pytest.raises(NotImplementedError, match=REFUSED):
            call()


@some_ops
def test_second_derivatives_and_other_forms_of_forward_mode(case: Case) -> None:
    function, arrays, ones = forward_mode_of(case)
    for call in (
        lambda: jax.jvp(function, arrays, ones),
        lambda: jax.jvp(jax.jit(function), arrays, ones),
        lambda: jax.jacfwd(function)(*arrays),
        lambda: jax.hessian(function)(*arrays),
    ):
        with pytest.raises(NotImplementedError, match=REFUSED):
            call()


def forward_mode_of(case: Case) -> Any:
    arrays = case.arrays()

    def function(*arrays: Any) -> Any:
        return loss_of(case.ours)(*arrays, *case.constants)

    return function, arrays, tuple(np.ones(array.shape, np.float32) for array in arrays)
