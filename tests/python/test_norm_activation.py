"""Norms that end with an activation, against the composition of the two: values, gradients, compilers, transforms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as torch_functional
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_pytorch import core, functional

FUNCTIONS: dict[str, Any] = {
    "gelu": torch_functional.gelu,
    "gelu_tanh": lambda x: torch_functional.gelu(x, approximate="tanh"),
    "silu": torch_functional.silu,
    "relu": torch.relu,
    "relu_squared": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": lambda x: x,
}
# Of the composition in fp64, relative to the largest value: half a last place of the output, and what fp32 sums lose.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
NORMS = ("rms_norm", "layer_norm")


def inputs(norm: str, rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    shapes = [(rows, columns), (columns,), (columns,)][: 2 if norm == "rms_norm" else 3]
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def ours(norm: str, tensors: list[torch.Tensor], kind: str | None, **options: Any) -> Any:
    return getattr(functional, norm)(*tensors, 1e-3, activation=kind, **options)


def expected(norm: str, tensors: list[torch.Tensor], kind: str) -> torch.Tensor:
    wide = [tensor.double() for tensor in tensors]
    columns = (tensors[0].shape[-1],)
    if norm == "rms_norm":
        return FUNCTIONS[kind](torch_functional.rms_norm(wide[0], columns, wide[1], 1e-3))
    return FUNCTIONS[kind](torch_functional.layer_norm(wide[0], columns, wide[1], wide[2], 1e-3))


def assert_near(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    found, wanted = found.detach(), wanted.detach()
    assert (found.double() - wanted).abs().max() <= tolerance * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("norm", NORMS)
def test_values_and_gradients(norm: str, kind: str, dtype: torch.dtype) -> None:
    for columns in (5, 64, 1000):
        tensors = [tensor.requires_grad_() for tensor in inputs(norm, 9, columns, dtype)]
        output = ours(norm, tensors, kind)
        assert output.dtype is dtype and output.is_contiguous()
        wanted = expected(norm, tensors, kind)
        assert_near(output, wanted, TOLERANCES[dtype])
        with torch.no_grad():
            assert torch.equal(ours(norm, tensors, kind), output)
        grad = torch.randn(9, columns, dtype=torch.float64).to(dtype)
        found = torch.autograd.grad(output, tensors, grad)
        for one, other in zip(found, torch.autograd.grad(wanted, tensors, grad.double()), strict=True):
            # relu's slope jumps where rounding moves a value across zero: there the whole gradient may differ.
            jumps = kind == "relu" and dtype in (torch.bfloat16, torch.float16)
            assert_near(one, other.double(), TOLERANCES[dtype] * (200 if jumps else 8))


@pytest.mark.parametrize("norm", NORMS)
def test_gradcheck(norm: str) -> None:
    tensors = [tensor.requires_grad_() for tensor in inputs(norm, 3, 6, torch.float64)]
    for kind in ("gelu", "gelu_tanh", "silu", "tanh"):
        assert torch.autograd.gradcheck(lambda *t, kind=kind: ours(norm, list(t), kind), tensors)


@settings(max_examples=40, deadline=None)
@given(
    norm=st.sampled_from(NORMS),
    kind=st.sampled_from(sorted(FUNCTIONS)),
    dtype=st.sampled_from(list(TOLERANCES)),
    rows=st.integers(0, 7),
    columns=st.integers(1, 300),
    step=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
def test_random_calls(norm: str, kind: str, dtype: torch.dtype, rows: int, columns: int, step: int, seed: int) -> None:
    tensors = inputs(norm, rows, columns, dtype, seed)
    strided = torch.empty(rows, columns * step, dtype=dtype)[:, ::step]
    tensors[0] = strided.copy_(tensors[0])
    output = ours(norm, tensors, kind)
    assert output.shape == (rows, columns)
    if rows:
        assert_near(output, expected(norm, tensors, kind), TOLERANCES[dtype])


@pytest.mark.parametrize("norm", NORMS)
def test_narrow_output_and_residual(norm: str) -> None:
    tensors = [tensor.requires_grad_() for tensor in inputs(norm, 4, 32, torch.float32)]
    output = ours(norm, tensors, "silu", out_dtype=torch.bfloat16)
    assert output.dtype is torch.bfloat16
    wanted = expected(norm, tensors, "silu")
    assert_near(output, wanted, TOLERANCES[torch.bfloat16])
    grad = torch.randn(4, 32).bfloat16()
    for one, other in zip(
        torch.autograd.grad(output, tensors, grad), torch.autograd.grad(wanted, tensors, grad.double()), strict=True
    ):
        assert one.dtype is torch.float32
        assert_near(one, other.double(), 8 * TOLERANCES[torch.bfloat16])
    residual = torch.randn(4, 32)
    output, total = ours(norm, tensors, "silu", residual=residual)
    assert torch.equal(total, tensors[0] + residual)
    assert_near(output, expected(norm, [total, *tensors[1:]], "silu"), TOLERANCES[torch.float32])


@pytest.mark.parametrize("norm", NORMS)
def test_compile_checks_and_transforms(norm: str) -> None:
    tensors = [tensor.requires_grad_() for tensor in inputs(norm, 4, 32, torch.float32)]
    compiled = torch.compile(lambda *t: ours(norm, list(t), "gelu"), fullgraph=True, backend="aot_eager")
    eager = ours(norm, tensors, "gelu")
    assert torch.equal(compiled(*tensors), eager)
    grad = torch.randn(4, 32)
    for one, other in zip(
        torch.autograd.grad(compiled(*tensors), tensors, grad), torch.autograd.grad(eager, tensors, grad), strict=True
    ):
        assert torch.equal(one, other)
    op = getattr(torch.ops.kernel_pytorch, f"{norm}_activation_forward").default
    numbers = (1e-3, 0.0) if norm == "rms_norm" else (1e-3,)
    torch.library.opcheck(op, (*tensors, *numbers, "gelu", None))
    batch = torch.randn(3, 4, 32)
    mapped = torch.func.vmap(lambda x: ours(norm, [x, *tensors[1:]], "gelu"))(batch)
    assert torch.equal(mapped, ours(norm, [batch, *tensors[1:]], "gelu"))
    per_sample = torch.func.vmap(torch.func.grad(lambda x: ours(norm, [x, *tensors[1:]], "gelu").square().sum()))(batch)
    leaf = batch.clone().requires_grad_()
    (whole,) = torch.autograd.grad(ours(norm, [leaf, *tensors[1:]], "gelu").square().sum(), leaf)
    torch.testing.assert_close(per_sample, whole)


@pytest.mark.parametrize("norm", NORMS)
def test_errors(norm: str) -> None:
    tensors = [tensor.requires_grad_() for tensor in inputs(norm, 4, 32, torch.float32)]
    with pytest.raises(RuntimeError, match='activation is "mish"; known are gelu, gelu_tanh'):
        ours(norm, tensors, "mish")
    output = ours(norm, tensors, "gelu")
    (grad,) = torch.autograd.grad(output.sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(grad.sum(), tensors[0])


def test_module_is_one_pass() -> None:
    module = core.FusedLayerNormActivation(16, "silu")
    x = torch.randn(3, 16)
    calls: list[str] = []

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Names():
        output = module(x)
    assert [name for name in calls if "kernel_pytorch" in name] == ["kernel_pytorch.layer_norm_activation.default"]
    torch.testing.assert_close(output, torch_functional.silu(torch_functional.layer_norm(x, (16,))))
