"""What compilers ask of an op: opcheck, torch.compile without a graph break and with dynamic shapes, torch.export."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from norm_reference import assert_near, reference_norm  # noqa: E402

from kernel_pytorch import core, functional  # noqa: E402

ops = torch.ops.kernel_pytorch


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def opcheck_samples():
    def leaf(*shape, dtype=torch.float32, grad=True):
        return torch.randn(*shape).to(dtype).requires_grad_(grad)

    def fixed(*shape, dtype=torch.float32):
        return leaf(*shape, dtype=dtype, grad=False)

    for dtype in (torch.float32, torch.bfloat16):
        x, residual = leaf(2, 3, 8, dtype=dtype), leaf(2, 3, 8, dtype=dtype)
        weight, bias = leaf(8), leaf(8)
        plain = [t.detach() for t in (x, residual, weight, bias)]
        yield ops.rms_norm, (plain[0], plain[2], 1e-6, 0.0)
        yield ops.rms_norm_forward, (x, weight, 1e-6, 1.0)
        yield ops.rms_norm_forward, (x, None, 1e-6, 0.0)
        yield ops.add_rms_norm, (plain[0], plain[1], plain[2], 1e-6, 0.0)
        yield ops.add_rms_norm_forward, (x, residual, weight, 1e-6, 0.0)
        yield ops.rms_norm_activation, (plain[0], plain[2], 1e-6, 0.0, "gelu")
        yield ops.rms_norm_activation_forward, (x, weight, 1e-6, 1.0, "silu")
        yield ops.layer_norm, (plain[0], plain[2], plain[3], 1e-5)
        yield ops.layer_norm_activation, (plain[0], plain[2], plain[3], 1e-5, "gelu_tanh")
        yield ops.layer_norm_activation_forward, (x, weight, bias, 1e-5, "relu")
        yield ops.layer_norm_forward, (x, weight, bias, 1e-5)
        yield ops.layer_norm_forward, (x, None, None, 1e-5)
        yield ops.add_layer_norm, (plain[0], plain[1], None, plain[3], 1e-5)
        yield ops.add_layer_norm_forward, (x, residual, weight, bias, 1e-5)
        value, grad, rows = fixed(2, 3, 8, dtype=dtype), fixed(2, 3, 8, dtype=dtype), fixed(2, 3).abs()
        for flags in ((True, True), (True, False), (False, True)):
            yield ops.rms_norm_backward, (grad, value, fixed(8), rows, grad, 0.0, *flags)
        yield ops.rms_norm_backward, (grad[:1, :1].expand(2, 3, 8), value, None, rows, None, 0.0, True, False)
        for flags in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
            yield ops.layer_norm_backward, (grad, value, fixed(8), fixed(8), rows, rows, None, *flags)
        yield ops.layer_norm_backward, (grad, value, None, fixed(8), rows, rows, grad, True, False, True)
    narrow = torch.bfloat16  # beside fp32
    yield ops.rms_norm, (fixed(2, 8), None, 1e-6, 0.0, narrow)
    yield ops.add_rms_norm_forward, (leaf(2, 8), leaf(2, 8, dtype=narrow), leaf(8), 1e-6, 0.0, narrow)
    yield ops.layer_norm_forward, (leaf(2, 8), leaf(8), leaf(8), 1e-5, narrow)
    yield ops.add_layer_norm_forward, (leaf(2, 8), leaf(2, 8, dtype=narrow), None, leaf(8), 1e-5, None)
    rows = fixed(2).abs()
    yield ops.rms_norm_backward, (fixed(2, 8, dtype=narrow), fixed(2, 8), fixed(8), rows, None, 0.0, True, True)
    strided = torch.randn(3, 8, 2).transpose(1, 2)
    yield ops.rms_norm, (strided, None, 1e-6, 0.0)
    yield ops.rms_norm_forward, (strided.requires_grad_(), None, 1e-6, 0.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op, args", list(opcheck_samples()), ids=lambda v: getattr(v, "__name__", ""))
def test_opcheck(op, args):
    torch.library.opcheck(op.default, args)


def test_every_op_is_checked():
    checked = {op._qualified_op_name.split("::")[1] for op, _ in opcheck_samples()}
    assert checked == {name for name in dir(ops) if "rms_norm" in name or "layer_norm" in name}


class Block(torch.nn.Module):
    """All the ops in one graph, between operations that a compiler may fuse around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = core.OptimizedRMSNorm(16, weight_offset=1.0)
        self.second = core.OptimizedLayerNorm(16)

    def forward(self, x, residual):
        x, residual = self.first(torch.nn.functional.silu(x), residual)
        x = functional.rms_norm(x * 2) + residual
        output, total = self.second(x, residual)
        return functional.layer_norm(output.transpose(0, 1)), total


def reference_block(block, x, residual):
    x, residual = reference_norm(
        "rms_norm", torch.nn.functional.silu(x), block.first.weight, residual=residual, weight_offset=1.0
    )
    x = reference_norm("rms_norm", x * 2)[0] + residual
    output, total = reference_norm("layer_norm", x, block.second.weight, block.second.bias, residual, eps=1e-5)
    return reference_norm("layer_norm", output.transpose(0, 1), eps=1e-5)[0], total


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_forward_and_backward(backend):
    block = Block()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    for rows in (3, 5, 8):
        x, residual = (torch.randn(rows, 4, 16, requires_grad=True) for _ in range(2))
        results = {}
        for name, run in (("ours", compiled), ("formula", lambda x, r: reference_block(block, x.double(), r.double()))):
            leaves = [x, residual, *block.parameters()]
            output, total = run(x, residual)
            grads = torch.autograd.grad(output.double().square().sum() + total.double().sin().sum(), leaves)
            results[name] = [output.detach(), total.detach(), *grads]
        for ours, formula in zip(results["ours"], results["formula"], strict=True):
            assert_near(ours, formula.double(), factor=32.0)


def test_graphs_hold_the_ops_alone():
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    weight = torch.randn(8)
    run = torch.compile(lambda x: functional.rms_norm(x, weight), fullgraph=True, backend=backend)
    x = torch.randn(4, 8)
    torch.testing.assert_close(run(x), functional.rms_norm(x, weight))
    assert seen == ["kernel_pytorch.rms_norm.default"]
    seen.clear()
    x.requires_grad_()  # and nothing but the op in the graph: anything else would keep it out of caches
    torch.testing.assert_close(run(x), functional.rms_norm(x, weight))
    assert [name for name in seen if "getitem" not in name] == ["kernel_pytorch.rms_norm_forward.default"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_transforms_inside_a_compiled_function(op):
    """Right with a graph break, or an error with fullgraph: never the zeros that a registered op would give."""
    weight, x = torch.randn(8), torch.randn(3, 4, 8)
    ours, grad, vmap = getattr(functional, op), torch.func.grad, torch.func.vmap
    loss = lambda w, x: ours(x, w).square().sum() + ours(x, w, residual=x)[0].sin().sum()  # noqa: E731
    cases = {
        "grad": grad(loss),
        "grad of both": grad(loss, (0, 1)),
        "vmap": vmap(loss, (None, 0)),
        "vmap(grad)": vmap(grad(loss), (None, 0)),
        "vmap(grad of x)": vmap(grad(loss, 1), (None, 0)),
    }
    for run in cases.values():
        torch._dynamo.reset()
        expected = run(weight, x)
        torch.testing.assert_close(torch.compile(run, backend="aot_eager")(weight, x), expected)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(run, backend="aot_eager", fullgraph=True)(weight, x)
    torch._dynamo.reset()
    leaf = x.clone().requires_grad_()
    torch.compile(cases["vmap"], backend="aot_eager")(weight, leaf).sum().backward()
    compiled, leaf.grad = leaf.grad, None
    cases["vmap"](weight, leaf).sum().backward()
    torch.testing.assert_close(compiled, leaf.grad)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.compile(lambda x: torch.func.jvp(lambda x: loss(weight, x), (x,), (x,)), backend="aot_eager")(x)


def test_compile_autocast():
    linear, norm = torch.nn.Linear(16, 16), core.OptimizedRMSNorm(16)

    def run(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return norm(linear(x))

    x = torch.randn(4, 16)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert run(x).dtype == compiled(x).dtype == torch.bfloat16
    torch.testing.assert_close(compiled(x), run(x))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    block = Block()
    inputs = (torch.randn(4, 3, 16), torch.randn(4, 3, 16))
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(block, inputs, dynamic_shapes=({0: rows}, {0: rows}), strict=strict)
    other = (torch.randn(7, 3, 16), torch.randn(7, 3, 16))
    torch.testing.assert_close(program.module()(*other), block(*other))
    targets = [str(node.target) for node in program.graph.nodes]
    assert sum(target.startswith("kernel_pytorch.") for target in targets) == 4


def test_fake_tensors_agree_with_real_ones():
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.randn(4, 3, 8).to(dtype).transpose(0, 1)
        weight = torch.ones(8, dtype=dtype)
        real = ops.add_layer_norm_forward(x, x, weight, None, 1e-5)
        with mode:
            fake = ops.add_layer_norm_forward(*(mode.from_tensor(t) for t in (x, x, weight)), None, 1e-5)
        assert [(t.shape, t.stride(), t.dtype) for t in real] == [(t.shape, t.stride(), t.dtype) for t in fake]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_compiled_multiplies_no_gradient_as_a_whole(reduction):
    """Its gradient is computed for the loss' gradient, and not for 1 and then multiplied."""
    from functorch.compile import aot_module, make_boxed_func

    graphs = []

    def compiler(module, inputs):
        graphs.append(module)
        return make_boxed_func(module)

    class Loss(torch.nn.Module):
        def forward(self, logits, target):
            return functional.cross_entropy(logits, target, reduction=reduction)

    logits, target = torch.randn(6, 11, requires_grad=True), torch.tensor([1, 2, -100, 4, 5, 10])
    expected = torch.nn.functional.cross_entropy(logits, target, reduction=reduction)
    (gradient,) = torch.autograd.grad(expected * 3.0, logits)
    run = torch.compile(Loss(), backend=lambda module, _: aot_module(module, fw_compiler=compiler), fullgraph=True)
    found = run(logits, target)
    (ours,) = torch.autograd.grad(found * 3.0, logits)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours, gradient)
    whole = [node for graph in graphs for node in graph.graph.nodes if "mul" in str(node.target)]
    assert all(node.meta["val"].shape != logits.shape for node in whole) and len(graphs) == 2
