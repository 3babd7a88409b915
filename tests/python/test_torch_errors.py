"""What is wrong is said by the core: the op first, both values, and no trace of C++ around the message."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch import functional  # noqa: E402

X = torch.zeros(4, 8)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(x=X, weight=torch.ones(7)), ["weight", "[7]", "8"]),
        (dict(x=X, weight=torch.ones(1, 8)), ["weight", "[1, 8]", "8"]),
        (dict(x=X, weight=torch.ones(8, dtype=torch.float64)), ["weight", "fp64", "fp32"]),
        (dict(x=X.half(), weight=torch.ones(8).bfloat16()), ["weight", "bf16", "fp16"]),
        (dict(x=X.int()), ["x", "int32", "fp32"]),
        (dict(x=X.to(torch.complex64)), ["x", "element type"]),
        (dict(x=torch.zeros(())), ["x", "dimension"]),
        (dict(x=X, residual=torch.zeros(4, 7)), ["residual", "[4, 7]", "[4, 8]"]),
        (dict(x=X, residual=torch.zeros(8)), ["residual", "[8]", "[4, 8]"]),
        (dict(x=X, eps=-1.0), ["eps", "-1"]),
        (dict(x=X, eps=float("nan")), ["eps", "nan"]),
        (dict(x=torch.zeros([1] * 8 + [4])), ["x", "9 dimensions", "8", "flatten"]),
    ],
)
@pytest.mark.parametrize("with_gradient", [False, True])
def test_wrong_arguments(op, arguments, words, with_gradient):
    if with_gradient and arguments["x"].is_floating_point():
        arguments = arguments | {"x": arguments["x"].clone().requires_grad_()}
    with pytest.raises(RuntimeError) as raised:
        getattr(functional, op)(**arguments)
    message = str(raised.value)
    assert message.startswith(f"{op}: ")
    assert all(word in message for word in words), message
    assert "\n" not in message and ".cpp" not in message and ".h:" not in message


def test_the_bias_that_is_wrong_is_the_one_named():
    with pytest.raises(RuntimeError, match="layer_norm: bias is fp64, x is fp32"):
        functional.layer_norm(X, torch.ones(8), torch.zeros(8, dtype=torch.float64))


def test_meta_and_sparse_tensors():
    assert functional.rms_norm(X.to("meta"), torch.ones(8, device="meta")).device.type == "meta"
    with pytest.raises(NotImplementedError):
        functional.rms_norm(X.to_sparse())


@pytest.mark.gpu
def test_mixed_devices():
    with pytest.raises(RuntimeError, match="rms_norm: weight is on cpu, the call runs on cuda:0; move"):
        functional.rms_norm(X.cuda(), torch.ones(8))
