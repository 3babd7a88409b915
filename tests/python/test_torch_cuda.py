"""The front end on a GPU: values, streams, CUDA graphs with a warm and a cold cubin cache, compile, several devices."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from norm_reference import assert_near, reference_norm  # noqa: E402

from kernel_pytorch import core, functional  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (7, 33), (3, 64), (2, 3, 5), (4096, 256), (33, 4096), (5, 5003), (2, 65536), (1, 262144), (0, 8)]


def tensors(shape, dtype, weight_dtype=None):
    x, residual, grad, grad_sum = (torch.randn(shape, device="cuda").to(dtype) for _ in range(4))
    weight, bias = (torch.randn(shape[-1], device="cuda").to(weight_dtype or dtype) for _ in range(2))
    return x, residual, weight, bias, grad, grad_sum


def check(kind, x, residual, weight, bias, grad, grad_sum):
    """Forward and backward of the op with a residual and without, against the formula in float64 on the CPU."""
    # A row of equal values has no variance, and 1/sqrt(eps) is what its rounding errors are multiplied with.
    varies = x.shape[-1] > 1 and x.stride(-1) != 0
    eps = 1e-6 if varies else 0.1
    for with_residual in (False, True):
        ours = {"x": x, "weight": weight} | ({"residual": residual} if with_residual else {})
        ours |= {"bias": bias} if kind == "layer_norm" else {}
        ours = {name: tensor.detach().requires_grad_() for name, tensor in ours.items()}
        theirs = {name: t.detach().cpu().double().requires_grad_() for name, t in ours.items()}
        theirs["x"] = x.detach().cpu().requires_grad_()  # in its own type: the sum is rounded to it
        outputs = getattr(functional, kind)(**ours, eps=eps)
        expected = reference_norm(kind, **theirs, eps=eps)
        outputs, grads = (outputs, [grad, grad_sum]) if with_residual else ((outputs,), [grad])
        with torch.no_grad():
            plain = getattr(functional, kind)(**ours, eps=eps)
        assert torch.equal(plain[0] if with_residual else plain, outputs[0].detach())
        assert_near(outputs[0].detach().cpu(), expected[0].detach())
        torch.autograd.backward(outputs, grads)
        torch.autograd.backward(expected[: len(grads)], [g.cpu().double() for g in grads])
        for name, tensor in ours.items():
            assert_near(tensor.grad.cpu(), theirs[name].grad, factor=8.0 if varies else 32.0)


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(kind, dtype, shape):
    check(kind, *tensors(shape, dtype))


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [64, 128, 256, 768, 4096])
def test_rows_of_several_strides(kind, dtype, columns):
    """[batch, sequence, heads, columns] in the memory order of [batch, heads, sequence, columns], and slices of it."""
    batch, sequence, heads = 3, 37, 5
    shape = (batch, sequence, heads, columns)
    x, residual, weight, bias, grad, grad_sum = tensors(shape, dtype)

    def heads_first(one):
        return one.transpose(1, 2).contiguous().transpose(1, 2)

    def within(one):
        return torch.stack([one, one], dim=3)[..., 0, :]

    check(kind, x, residual, weight, bias, heads_first(grad), grad_sum)
    check(kind, heads_first(x), residual, weight, bias, grad, heads_first(grad_sum))
    check(kind, heads_first(x), within(residual), weight, bias, within(grad), heads_first(grad_sum))
    check(kind, x[:, 1:], residual[:, 1:], weight, bias, grad[:, :-1], grad_sum[:, :-1])


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp32_parameters(kind, dtype):
    check(kind, *tensors((65, 1024), dtype, torch.float32))


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(kind, dtype):
    base = torch.randn(6, 40, 96, device="cuda").to(dtype)
    views = [base.transpose(0, 1), base.transpose(1, 2), base[..., 1:90], base[..., ::2], base[:1].expand(5, 40, 96)]
    views += [base[..., :1].expand(6, 40, 50), base[0].flatten()[1 : 1 + 39 * 96].view(39, 96)]
    for view in views:
        _, residual, weight, bias, grad, grad_sum = tensors(view.shape, dtype)
        check(kind, view, residual, weight, bias, grad.transpose(0, 1).contiguous().transpose(0, 1), grad_sum)
        check(kind, residual, view, weight, bias, grad[..., :1].expand(view.shape), grad_sum)


def test_fp64_is_the_hosts():
    x = torch.randn(6, 8, device="cuda", dtype=torch.float64)[::2].requires_grad_()
    output = functional.rms_norm(x)
    assert output.is_cuda and torch.equal(output.cpu(), functional.rms_norm(x.cpu()))
    assert torch.autograd.gradcheck(functional.rms_norm, (x,))


def test_side_stream_is_used():
    x = torch.zeros(4096, 8192, device="cuda")
    weight = torch.randn(8192, device="cuda")
    source = torch.randn(4096, 8192, device="cuda")
    expected = functional.rms_norm(source, weight)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(5):
        with torch.cuda.stream(side):
            x.zero_()
            torch.cuda._sleep(20_000_000)  # a kernel on another stream would read the zeros
            x.copy_(source)
            output = functional.rms_norm(x, weight)
        side.synchronize()
        assert torch.equal(output, expected)


def test_backward_on_a_side_stream():
    weight = torch.randn(512, device="cuda", requires_grad=True)
    x = torch.randn(64, 512, device="cuda", requires_grad=True)
    functional.rms_norm(x, weight).square().sum().backward()
    expected = x.grad.clone(), weight.grad.clone()
    x.grad = weight.grad = None
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        functional.rms_norm(x, weight).square().sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(x.grad, expected[0]) and torch.equal(weight.grad, expected[1])


GRAPH = """
import torch
from kernel_pytorch import functional

def step(x, residual, weight, bias):
    output, total = functional.add_rms_norm(x, residual, weight)
    return functional.layer_norm(output, weight, bias), total

def make(seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    r = lambda *s: torch.randn(*s, generator=generator, device="cuda", dtype=torch.bfloat16)
    return r(64, COLUMNS), r(64, COLUMNS), r(COLUMNS), r(COLUMNS)

inputs = make(0)
if WARM:
    step(*inputs)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        outputs = step(*inputs)
except RuntimeError as error:
    assert not WARM and "captur" in str(error), error  # a clear refusal is allowed where a cubin is missing
    print("refused:", error)
else:
    for seed in (1, 2, 3):
        fresh = make(seed)
        for target, source in zip(inputs, fresh):
            target.copy_(source)
        graph.replay()
        torch.cuda.synchronize()
        for captured, expected in zip(outputs, step(*fresh)):
            assert torch.equal(captured, expected)
    print("replayed")
torch.cuda.synchronize()
x, _, weight, _ = make(9)
assert functional.rms_norm(x, weight).isfinite().all()  # the device is whole after a refusal
"""


@pytest.mark.parametrize("columns", [1000, 4096, 65536])
@pytest.mark.parametrize("warm", [True, False], ids=["after a first call", "with a cold cubin cache"])
def test_graph_capture_and_replay_with_changed_contents(columns, warm, tmp_path):
    code = GRAPH.replace("COLUMNS", str(columns)).replace("WARM", str(warm))
    environment = {**os.environ, "KERNEL_PYTORCH_CACHE_DIR": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("replayed") or not warm


def test_graph_of_forward_and_backward():
    norm = core.OptimizedRMSNorm(1024, device="cuda")
    x = torch.randn(32, 1024, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            norm(x).square().sum().backward()
            x.grad = norm.weight.grad = None
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm(x).square().sum().backward()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    captured = x.grad.clone(), norm.weight.grad.clone()
    x.grad = norm.weight.grad = None
    norm(x).square().sum().backward()
    assert torch.equal(captured[0], x.grad) and torch.equal(captured[1], norm.weight.grad)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile(mode):
    norm = core.OptimizedRMSNorm(256, device="cuda", dtype=torch.bfloat16)

    def run(x, residual):
        output, total = norm(torch.nn.functional.silu(x), residual)
        return functional.layer_norm(output) + total

    compiled = torch.compile(run, fullgraph=True, dynamic=mode == "default" or None, mode=mode)
    for rows in (16, 48, 16):
        x, residual = (torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            grads = []
            for call in (compiled, run):
                leaf = x.clone().requires_grad_()
                norm.weight.grad = None  # a gradient that a CUDA graph wrote may not be added to after its next run
                output = call(leaf, residual)
                output.float().sin().sum().backward()
                grads.append((output.detach().clone(), leaf.grad.clone()))
            torch.testing.assert_close(grads[0], grads[1], rtol=2e-2, atol=2e-2)


def test_opcheck():
    ops = torch.ops.kernel_pytorch
    x = torch.randn(4, 3, 64, device="cuda", requires_grad=True)
    weight, bias = (torch.randn(64, device="cuda", requires_grad=True) for _ in range(2))
    torch.library.opcheck(ops.rms_norm_forward.default, (x, weight, 1e-6, 0.0))
    torch.library.opcheck(ops.add_layer_norm_forward.default, (x, x.detach(), weight, bias, 1e-5))
    torch.library.opcheck(ops.rms_norm.default, (x.detach(), None, 1e-6, 0.0))


def test_weight_gradient_is_repeatable():
    x, _, weight, bias, grad, _ = tensors((4096, 1024), torch.bfloat16)
    results = []
    for _ in range(3):
        leaves = [t.detach().requires_grad_() for t in (weight, bias)]
        functional.layer_norm(x, *leaves).backward(grad)
        results.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_more_than_two_billion_elements():
    columns = 4096
    rows = 2**31 // columns + 3
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    output = functional.rms_norm(x)
    for row in (0, rows // 2, rows - 1):
        assert_near(output[row].cpu(), reference_norm("rms_norm", x[row].cpu())[0])


def test_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")
    x, weight = torch.randn(8, 64), torch.randn(64)
    expected = functional.rms_norm(x.to("cuda:0"), weight.to("cuda:0")).cpu()
    assert torch.equal(functional.rms_norm(x.to("cuda:1"), weight.to("cuda:1")).cpu(), expected)
