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
    with pytest.raises(
        RuntimeError, match="rms_norm: weight is on cpu, x is on cuda:0; move all tensors to one device"
    ):
        functional.rms_norm(X.cuda(), torch.ones(8))
    with pytest.raises(
        RuntimeError, match="rms_norm: weight is on cuda:0, x is on cpu; move all tensors to one device"
    ):
        functional.rms_norm(X, torch.ones(8, device="cuda"))
    with pytest.raises(RuntimeError, match=r"reduce_norm: tensors\[1\] is on cpu, tensors\[0\] is on cuda:0"):
        torch.ops.kernel_pytorch.reduce_norm([X.cuda(), X])


def test_a_type_is_named_once():
    wide = torch.ones(8, dtype=torch.float64)
    for call, words in (
        (lambda: functional.rms_norm(X, wide), "rms_norm: weight is fp64, x is fp32; it must be fp32"),
        (lambda: functional.rms_norm(X.half(), wide), "rms_norm: weight is fp64, x is fp16; it must be fp16 or fp32"),
        (
            lambda: functional.cross_entropy(X, torch.zeros(4, dtype=torch.long), weight=wide),
            "cross_entropy: weight is fp64, logits are fp32; it must be fp32",
        ),
        (
            lambda: functional.softmax(X, mask=torch.zeros(4, 8, dtype=torch.int32)),
            "softmax: mask is int32, x is fp32; it must be bool (true keeps) or fp32",
        ),
        (
            lambda: functional.rope(X.view(4, 1, 8), None, torch.zeros(4, 4).double(), torch.zeros(4, 4).double()),
            "rope: cos is fp64, query is fp32; it must be fp32",
        ),
    ):
        with pytest.raises(RuntimeError) as raised:
            call()
        assert str(raised.value) == words


@pytest.mark.parametrize("wrong", [1000, "bfloat16"])
def test_an_output_type_that_is_none(wrong):
    for call in (
        lambda: functional.rms_norm(X, out_dtype=wrong),
        lambda: functional.rms_norm(X, residual=X, out_dtype=wrong),
        lambda: functional.layer_norm(X, out_dtype=wrong),
        lambda: functional.layer_norm(X, residual=X, out_dtype=wrong),
    ):
        with pytest.raises(TypeError, match=f"_norm: out_dtype is {wrong!r}; it must be a torch.dtype"):
            call()


def test_an_activation_that_is_none():
    weight = torch.randn(8, 8)
    for wrong, error, words in (
        ("", RuntimeError, 'is ""; known are (identity, )?gelu'),
        (0, TypeError, "activation is 0; it must be"),
    ):
        with pytest.raises(error, match=words):
            functional.mlp(X, weight, weight, activation=wrong)
        with pytest.raises(error, match=words):
            functional.linear(X, weight, activation=wrong)


def test_a_residual_has_the_shape_of_the_output():
    weight, row = torch.randn(8, 8), torch.randn(8)
    for call in (
        lambda x, residual: functional.linear(x, weight, residual=residual),
        lambda x, residual: functional.mlp(x, weight, weight, residual=residual),
    ):
        for x, residual in ((row, row[None]), (row[None], row), (X, X[None]), (X.view(2, 2, 8), X)):
            for leaf in (x, x.clone().requires_grad_()):
                with pytest.raises(RuntimeError, match=r": residual has shape \[.*\]; it must be \["):
                    call(leaf, residual)
        assert call(row, row).shape == (8,)


def test_empty_tensors_are_contiguous_as_torch_says():
    for empty in (torch.empty(0, 21, 2)[:, :, :1], torch.empty(3, 0, 4)[:, :, :2], torch.empty(4, 4)[:, 1:1]):
        assert empty.is_contiguous()
        assert functional.softmax_(empty) is empty
        assert functional.log_softmax_(empty).shape == empty.shape


def test_weights_that_are_empty_are_no_freed_ones():
    assert functional.rms_norm(torch.empty(3, 0), torch.empty(0)).shape == (3, 0)
    assert functional.linear(torch.empty(3, 0), torch.empty(5, 0), torch.ones(5)).eq(1).all()
