"""Ops on devices without kernels: their formulas and the host's way, forced on the CPU and on a device of Python's."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import op_samples
import pytest
import torch
from kernel_pytorch._ops import portable
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_pytorch import functional, tuning

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fuzz.generators import GENERATORS, draw_case, run_case

# What only a CPU can refuse: a device would have to wait for the values. There the row is NaN.
OF_VALUES = (
    "an index is outside the table", "a position is outside the table", "a target is no class",
    "the ends leave the tokens",
)  # fmt: skip


class Forced(TorchDispatchMode):
    """Every op of the library as on a device without kernels."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return portable.run(func, *args) if func.namespace == "kernel_pytorch" else func(*args, **(kwargs or {}))


def same(found: Any, expected: Any) -> None:
    if expected is None:
        assert found is None
    elif not isinstance(expected, Tensor):
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            same(one, other)
    else:
        assert found.dtype is expected.dtype
        if expected.element_size() == 1:  # codes: torch compares none of them within bounds
            found, expected = found.float(), expected.float()
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("op", op_samples.op_names())
def test_every_op_is_the_cpus(op: str) -> None:
    for sample in op_samples.samples()[op]:
        ours, theirs = (op_samples.map_tensors(sample, op_samples.clone) for _ in range(2))
        overload = getattr(torch.ops.kernel_pytorch, op).default
        same(portable.run(overload, *theirs), overload(*ours))
        for path in op_samples.tensor_paths(ours):  # what is written too
            same(op_samples.tensor_at(theirs, path), op_samples.tensor_at(ours, path))


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_random_calls(name: str) -> None:
    for call in range(4):
        case = draw_case(name, 11, call)
        with Forced():
            outcome, text = run_case(name, case, lambda _: None)
        accepted = outcome == "finding" and case.refused in OF_VALUES
        assert accepted or outcome != "finding", f"{text}; called with {case.text()}"


def test_what_a_formula_has_not_is_the_hosts() -> None:
    query = torch.randn(1, 2, 4, 8, requires_grad=True)
    seed = torch.tensor([1, 2])
    options = dict(dropout_p=0.5, seed=seed)
    expected = functional.attention(query, query, query, **options)
    with Forced():
        found = functional.attention(query, query, query, **options)
    same(found, expected)


def test_refusals_are_the_ops_own() -> None:
    with Forced(), pytest.raises(RuntimeError, match=r"rms_norm: .*weight"):
        functional.rms_norm(torch.randn(2, 8), torch.randn(4))


def test_dropout_draws_the_same_bits() -> None:
    x, seed = torch.randn(37, 11), torch.tensor([-5, 2**40 + 3])
    with Forced():
        found = functional.dropout(x, 0.3, seed=seed)
    assert torch.equal(found, functional.dropout(x, 0.3, seed=seed))


def test_every_device_has_every_op() -> None:
    for op in op_samples.op_names():
        for overload in getattr(torch.ops.kernel_pytorch, op).overloads():
            name = f"kernel_pytorch::{op}" + ("" if overload == "default" else f".{overload}")
            for key in portable.DISPATCH_KEYS:
                assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key), (name, key)


def test_explain_says_so() -> None:
    text = str(tuning.explain("rms_norm_forward", (4, 8), device="mps"))
    assert "→ portable" in text and "✗ cpu" in text and "no kernels for mps" in text


@pytest.mark.parametrize("asked", [False, True])
def test_a_torch_for_rocm_gets_it_for_cuda_unless_kernels_are_asked_for(asked: bool) -> None:
    """Of such a torch there is only the name here: what is registered, not that it runs."""
    script = (
        "import torch; torch.version.hip = '6.0'\n"
        "from kernel_pytorch._ops import portable, rms_norm\n"
        "print(torch._C._dispatch_dump_table('kernel_pytorch::rms_norm_forward').split('CUDA: ')[1].split(chr(10))[0])"
    )
    environment = {**os.environ, "KERNEL_PYTORCH_AMD": "1" if asked else "0"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    is_portable = "portable" in done.stdout or ".py:" in done.stdout
    assert is_portable != asked, done.stdout + done.stderr


def test_a_device_of_its_own() -> None:
    """torch.ops on tensors of a device that Python makes of the CPU; in a process of its own: a device is for good."""
    script = Path(__file__).with_name("portable_device.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def compiled(*arguments: str) -> None:
    script = Path(__file__).with_name("portable_compiled.py")
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


@pytest.mark.parametrize("first", range(2))
def test_every_function_compiled(first: int) -> None:
    """Traced whole by torch.compile with gradients; what runs are the formulas and the host's way."""
    compiled("aot_eager", str(first), "2")


def test_inductor_runs_one_too() -> None:
    compiled("inductor", "0", "1", "rms_norm")


# parallel_cross_entropy's cases hold the other ranks' tensors inside a function.
@pytest.mark.parametrize("name", sorted(set(GENERATORS) - {"parallel_cross_entropy"}))
def test_shapes_on_the_meta_device(name: str) -> None:
    """The same shapes, types and gradients without values."""
    case = next(case for call in range(60) if (case := draw_case(name, 7, call)).refused == "")
    expected = getattr(functional, name)(*case.args, **case.options)

    def meta(value: Any) -> Any:
        if isinstance(value, list | tuple):
            parts = [meta(one) for one in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = {one.name: meta(getattr(value, one.name)) for one in dataclasses.fields(value) if one.init}
            return dataclasses.replace(value, **parts)
        if not isinstance(value, Tensor):
            return value
        moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return moved.requires_grad_(value.requires_grad)

    found = getattr(functional, name)(*meta(case.args), **{key: meta(value) for key, value in case.options.items()})
    leaves = [one for one in torch.utils._pytree.tree_leaves(found) if isinstance(one, Tensor)]
    wanted = [one for one in torch.utils._pytree.tree_leaves(expected) if isinstance(one, Tensor)]
    for one, other in zip(leaves, wanted, strict=True):
        assert (one.shape, one.dtype, one.requires_grad) == (other.shape, other.dtype, other.requires_grad)
        assert one.is_meta or not case.tensors()  # tables are made of numbers
