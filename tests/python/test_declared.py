"""Ops that the core declares by a list of fields: their schemas are a contract, and both readers of the lists agree."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from kernel_pytorch._ops._declared import declared, shapes_of  # noqa: E402

from kernel_pytorch import functional  # noqa: E402, F401 (declares the ops to torch)

NORM = "float eps, float weight_offset, ScalarType? output_dtype=None"
BIAS = "Tensor? bias, float eps, ScalarType? output_dtype=None"
GRADS = "bool input_grad, bool weight_grad"
# The order of arguments is that of a list's lines: whoever moves one breaks positional callers and exported graphs.
SCHEMAS = [
    f"rms_norm(Tensor x, Tensor? weight, {NORM}) -> Tensor",
    f"rms_norm_forward(Tensor x, Tensor? weight, {NORM}) -> (Tensor output, Tensor rstd)",
    f"add_rms_norm(Tensor x, Tensor residual, Tensor? weight, {NORM}) -> (Tensor output, Tensor sum)",
    f"add_rms_norm_forward(Tensor x, Tensor residual, Tensor? weight, {NORM}) -> "
    "(Tensor output, Tensor sum, Tensor rstd)",
    "rms_norm_backward(Tensor grad_output, Tensor value, Tensor? weight, Tensor rstd, Tensor? grad_sum, "
    f"float weight_offset, {GRADS}) -> (Tensor grad_input, Tensor grad_weight)",
    f"layer_norm(Tensor x, Tensor? weight, {BIAS}) -> Tensor",
    f"layer_norm_forward(Tensor x, Tensor? weight, {BIAS}) -> (Tensor output, Tensor mean, Tensor rstd)",
    f"add_layer_norm(Tensor x, Tensor residual, Tensor? weight, {BIAS}) -> (Tensor output, Tensor sum)",
    f"add_layer_norm_forward(Tensor x, Tensor residual, Tensor? weight, {BIAS}) -> "
    "(Tensor output, Tensor sum, Tensor mean, Tensor rstd)",
    "layer_norm_backward(Tensor grad_output, Tensor value, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, "
    f"Tensor? grad_sum, {GRADS}, bool bias_grad) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
]


def test_schemas_are_these():
    assert [declaration["schema"] for declaration in declared().values()] == SCHEMAS
    for name in declared():
        assert getattr(torch.ops.kernel_pytorch, name).default._schema.name == f"kernel_pytorch::{name}"


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 0, 4), (2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("given", [True, False])
def test_fake_outputs_are_like_real_ones(shape, dtype, given):
    x, vector = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    parameter = vector if given else None
    rows = torch.ones(shape[:-1], dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    calls = {
        "rms_norm": (x, parameter, 1e-6, 0.0, None),
        "rms_norm_forward": (x, parameter, 1e-6, 0.0, torch.bfloat16 if dtype is torch.float32 else None),
        "add_rms_norm": (x, x, parameter, 1e-6, 0.0, None),
        "add_rms_norm_forward": (x, x, parameter, 1e-6, 0.0, None),
        "rms_norm_backward": (x, x, parameter, rows, None, 0.0, given, True),
        "layer_norm": (x, parameter, parameter, 1e-5, None),
        "layer_norm_forward": (x, parameter, parameter, 1e-5, None),
        "add_layer_norm": (x, x, parameter, parameter, 1e-5, None),
        "add_layer_norm_forward": (x, x, parameter, parameter, 1e-5, None),
        "layer_norm_backward": (x, x, parameter, parameter, rows, rows, x, True, given, True),
    }
    assert list(calls) == list(declared())
    for name, arguments in calls.items():
        real, fake = getattr(torch.ops.kernel_pytorch, name)(*arguments), shapes_of(name)(*arguments)
        real, fake = [(out,) if isinstance(out, torch.Tensor) else out for out in (real, fake)]
        described = [[(one.shape, one.dtype, one.stride()) for one in outputs] for outputs in (real, fake)]
        assert described[0] == described[1], name
