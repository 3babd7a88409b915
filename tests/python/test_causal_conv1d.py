"""causal_conv1d against torch's convolution in fp64: values, gradients, states, packed sequences, steps."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch.functional import causal_conv1d, causal_conv1d_step_  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def convolve(x, weight, bias=None, initial_state=None, activation=None):
    width = weight.shape[1]
    start = x.new_zeros(x.shape[0], width - 1, x.shape[2]) if initial_state is None else initial_state
    inputs = torch.cat([start, x], 1)
    if x.shape[1] == 0:
        return x, inputs
    output = torch.nn.functional.conv1d(inputs.mT, weight[:, None], bias, groups=x.shape[2]).mT
    return torch.nn.functional.silu(output) if activation else output, inputs[:, inputs.shape[1] - width + 1 :]


def error(ours, theirs):
    theirs = theirs.detach()
    return float((ours.detach().cpu().double() - theirs).norm() / theirs.norm().clamp_min(1e-30))


def inputs(batch, tokens, channels, width, dtype=torch.float32):
    make = torch.Generator().manual_seed(0)
    shapes = {
        "x": (batch, tokens, channels),
        "weight": (channels, width),
        "bias": (channels,),
        "initial_state": (batch, width - 1, channels),
    }
    return {name: torch.randn(shape, generator=make).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_against_torch(device, dtype, activation):
    if dtype is torch.float64 and device == "cuda":
        pytest.skip("fp64 runs on the CPU")
    for batch, tokens, channels, width in ((2, 40, 70, 4), (1, 1100, 5, 3), (3, 1, 16, 2), (2, 2, 33, 4)):
        tensors = inputs(batch, tokens, channels, width, dtype)
        leaves = {name: x.to(device).requires_grad_() for name, x in tensors.items()}
        exact = {name: x.double().requires_grad_() for name, x in tensors.items()}
        results = causal_conv1d(**leaves, activation=activation, return_state=True)
        expected = convolve(**exact, activation=activation)
        upstream = [torch.randn_like(x) for x in expected]
        given = [x.to(device, dtype) for x in upstream]
        found = torch.autograd.grad(results, list(leaves.values()), given)
        wanted = torch.autograd.grad(expected, list(exact.values()), [x.cpu().double() for x in given])
        for ours, theirs in zip((*results, *found), (*expected, *wanted), strict=True):
            assert ours.dtype == dtype and error(ours, theirs) < TOLERANCES[dtype], (tokens, width)


def test_packed_sequences_and_segments():
    ends = [0, 30, 30, 31, 55]
    tensors = inputs(1, 60, 9, 4) | {"initial_state": torch.randn(4, 3, 9)}
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    output, states = causal_conv1d(**leaves, cu_seqlens=torch.tensor(ends), activation="silu", return_state=True)
    found = torch.autograd.grad(output.square().sum() + states.square().sum(), list(leaves.values()))
    exact = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    total = torch.zeros((), dtype=torch.float64)
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        part = exact | {"x": exact["x"][:, begin:end], "initial_state": exact["initial_state"][i : i + 1]}
        expected, state = convolve(**part, activation="silu")
        assert error(output[:, begin:end], expected) < 1e-5 and error(states[i : i + 1], state) < 1e-6
        total = total + expected.square().sum() + state.square().sum()
    assert output[:, 55:].eq(0).all()
    for ours, theirs in zip(found, torch.autograd.grad(total, list(exact.values()))):
        assert error(ours, theirs) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_steps_write_the_state(device):
    tensors = {name: x.to(device) for name, x in inputs(2, 7, 20, 4).items()}
    expected, last = causal_conv1d(**tensors, activation="silu", return_state=True)
    x, state = tensors.pop("x"), tensors.pop("initial_state").clone()
    weight, bias = tensors.values()
    steps = [x[:, :1], x[:, 1:3], x[:, 3:]]
    outputs = [causal_conv1d_step_(one, weight, state, bias, activation="silu") for one in steps]
    torch.testing.assert_close(torch.cat(outputs, 1), expected)
    assert state.equal(last)


def test_without_states_and_bad_input():
    x, weight = torch.randn(2, 6, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    torch.autograd.gradcheck(lambda x, w: causal_conv1d(x, w, activation="silu"), (x.double(), weight.double()))
    with pytest.raises(RuntimeError, match="width 5"):
        causal_conv1d(x, torch.randn(4, 5))
    with pytest.raises(RuntimeError, match="weight has shape"):
        causal_conv1d(x, torch.randn(3, 4))
    with pytest.raises(RuntimeError, match="bias is bf16"):
        causal_conv1d(x, weight, torch.zeros(4, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="activation"):
        causal_conv1d(x, weight, activation="gelu")
