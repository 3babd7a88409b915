"""Activations, gated activations and dropout for torch: values, gradients, compilers, errors, statistics."""

from __future__ import annotations

import itertools
import math

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as torch_functional  # noqa: E402

from kernel_pytorch import functional  # noqa: E402

ops = torch.ops.kernel_pytorch
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
FUNCTIONS = {
    "gelu": torch_functional.gelu,
    "gelu_tanh": lambda x: torch_functional.gelu(x, approximate="tanh"),
    "silu": torch_functional.silu,
    "relu": torch_functional.relu,
    "relu_squared": lambda x: torch_functional.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": lambda x: x,
}
GATES = ["gelu", "gelu_tanh", "silu", "relu", "sigmoid"]
SHAPES = [(3, 64), (7, 33), (2, 3, 40), (1, 1), (5, 4099), (0, 8), (4, 0), (9,)]


def kept(shape, p, seed):
    """What dropout multiplies with, from the op itself: the mask must be the same wherever the seed is."""
    return functional.dropout(torch.ones(shape, dtype=torch.float64), p, seed=seed.cpu())


def assert_near(actual, exact, dtype, terms=1):
    exact = exact.detach().cpu().double()
    scale = exact.abs().max().item() if exact.numel() else 0.0
    torch.testing.assert_close(
        actual.detach().cpu().double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * max(scale, 1e-3) * terms
    )


def as_exact(tensor):
    return tensor.detach().cpu().double().requires_grad_()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_activation_with_everything_and_with_nothing(kind, dtype, device):
    if device == "cuda" and dtype is torch.float64:
        pytest.skip("fp64 is the CPU's")
    generator = torch.Generator().manual_seed(1)
    seed = torch.tensor([11, 5], device=device)
    for shape, everything in itertools.product(SHAPES, (False, True)):
        x, residual, grad = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3))
        bias = torch.randn(shape[-1], generator=generator).to(device, dtype)
        leaves = [x, bias, residual] if everything else [x]
        ours, exact = [t.detach().requires_grad_() for t in leaves], [as_exact(t) for t in leaves]
        if everything:
            options = {"bias": ours[1], "residual": ours[2], "dropout_p": 0.25, "seed": seed}
            output = functional.activation(ours[0], kind, **options)
            wanted = FUNCTIONS[kind](exact[0] + exact[1]) * kept(shape, 0.25, seed) + exact[2]
        else:
            output = functional.activation(ours[0], kind)
            wanted = FUNCTIONS[kind](exact[0])
        assert output.dtype is dtype and output.is_contiguous()
        assert_near(output, wanted, dtype)
        grads = torch.autograd.grad(output, ours, grad)
        wanted_grads = torch.autograd.grad(wanted, exact, grad.cpu().double())
        for mine, theirs in zip(grads, wanted_grads, strict=True):
            assert_near(mine, theirs, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("packed", [False, True])
def test_gated_activation(kind, dtype, packed, device):
    if device == "cuda" and dtype is torch.float64:
        pytest.skip("fp64 is the CPU's")
    generator = torch.Generator().manual_seed(2)
    seed = torch.tensor([3, 9], device=device)
    for shape, everything in itertools.product(SHAPES, (False, True)):
        wide = (*shape[:-1], 2 * shape[-1])
        x, bias = (torch.randn(s, generator=generator).to(device, dtype) for s in (wide, wide[-1:]))
        residual, grad = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
        ours, exact = ([f(t) for t in (x, bias, residual)] for f in (lambda t: t.detach().requires_grad_(), as_exact))
        options = {"residual": ours[2], "dropout_p": 0.5, "seed": seed} if everything else {}
        if packed:
            options |= {"bias": ours[1]} if everything else {}
            output = functional.gated_activation_packed(ours[0], kind, **options)
        else:
            gate, up = ours[0].chunk(2, -1) if shape[-1] else (ours[0], ours[0])
            if everything:
                halves = ours[1].chunk(2) if shape[-1] else (ours[1], ours[1])
                options |= dict(zip(("gate_bias", "up_bias"), halves, strict=True))
            output = functional.gated_activation(gate, up, kind, **options)
        n = shape[-1]
        gate, up = exact[0][..., :n], exact[0][..., n:]
        if everything:
            gate, up = gate + exact[1][:n], up + exact[1][n:]
        wanted = FUNCTIONS[kind](gate) * up
        if everything:
            wanted = wanted * kept(shape, 0.5, seed) + exact[2]
        assert_near(output, wanted, dtype)
        chosen = slice(None) if everything else slice(1)
        grads = torch.autograd.grad(output, ours[chosen], grad)
        for mine, theirs in zip(grads, torch.autograd.grad(wanted, exact[chosen], grad.cpu().double()), strict=True):
            assert_near(mine, theirs, dtype, terms=2)


def test_named_functions():
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    both = torch.cat([x, y], -1)
    assert torch.equal(functional.gelu(x), functional.activation(x, "gelu"))
    assert torch.equal(functional.gelu(x, "tanh"), functional.activation(x, "gelu_tanh"))
    assert torch.equal(functional.silu(x), functional.activation(x, "silu"))
    assert torch.equal(functional.relu(x), torch.relu(x))
    assert torch.equal(functional.relu_squared(x), torch.relu(x).square())
    for name, gate in (("swiglu", "silu"), ("geglu", "gelu"), ("reglu", "relu")):
        wanted = functional.gated_activation(x, y, gate)
        assert torch.equal(getattr(functional, name)(x, y), wanted)
        assert torch.equal(getattr(functional, f"{name}_packed")(both), wanted)
    assert torch.equal(functional.geglu(x, y, "tanh"), functional.gated_activation(x, y, "gelu_tanh"))
    assert functional.gelu(torch.tensor(1.0)).shape == ()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides(dtype, device):
    base = torch.randn(6, 10, 48, device=device).to(dtype)
    seed = torch.tensor([1, 2], device=device)
    views = {
        "transposed": base.transpose(0, 1),
        "columns": base.transpose(1, 2),
        "sliced": base[:, 1:, 3:40],
        "steps": base[..., ::2],
        "expanded": base[:1].expand(6, 10, 48),
        "misaligned": base.reshape(-1)[1:].unflatten(0, (-1,))[: 7 * 31].view(7, 31),
    }
    for name, x in views.items():
        dense = x.contiguous()
        for run in (
            lambda t: functional.activation(t, "gelu"),
            lambda t: functional.activation(t, "silu", residual=t, dropout_p=0.5, seed=seed),
            lambda t: functional.dropout(t, 0.3, seed=seed),
            lambda t: functional.swiglu(t, t),
        ):
            tolerance = TOLERANCE[dtype]  # another kernel may round the other way
            torch.testing.assert_close(run(x), run(dense), msg=name, rtol=tolerance, atol=tolerance)


def test_infinity_and_nan_are_torchs():
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e30, -1e30] * 40)
    for kind, function in FUNCTIONS.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            leaf, other = (x.to(dtype).requires_grad_() for _ in range(2))
            ours, theirs = functional.activation(leaf, kind), function(other)
            if kind == "gelu":  # torch's vectorised erf makes a NaN of infinity; the formula does not
                assert ours[0] == math.inf
                ours, theirs = ours[7 * torch.arange(40)[:, None] + torch.arange(1, 7)], theirs.view(40, 7)[:, 1:]
            torch.testing.assert_close(ours, theirs, equal_nan=True, msg=f"{kind} {dtype}")


def test_half_precision_stays_near_in_the_tails():
    x = torch.linspace(-12, 12, 100_001)
    for kind, dtype in itertools.product(
        ("gelu", "gelu_tanh", "silu", "tanh", "sigmoid"), (torch.bfloat16, torch.float16)
    ):
        values = x.to(dtype)
        exact = FUNCTIONS[kind](values.double())
        error = (functional.activation(values, kind).double() - exact).abs()
        step = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]  # half of a last place, relative
        assert (error <= 1.1 * step * exact.abs() + 2e-7).all(), (kind, dtype, (error / exact.abs()).max())


def random64(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_gradcheck(kind):
    x, bias, residual, seed = random64(2, 3, 4), random64(4), random64(2, 3, 4), torch.tensor([1, 2])
    if kind.startswith("relu"):  # away from the corner
        x = (x.detach() + 0.5 * x.detach().sign()).requires_grad_()
        bias = (bias.detach() * 1e-2).requires_grad_()

    def run(x, bias, residual):
        return functional.activation(x, kind, bias=bias, residual=residual, dropout_p=0.5, seed=seed)

    assert torch.autograd.gradcheck(run, (x, bias, residual))


def test_gradcheck_gated():
    seed = torch.tensor([1, 2])
    gate, up, gate_bias, up_bias, residual = random64(3, 4), random64(3, 4), random64(4), random64(4), random64(3, 4)

    def gated(gate, up, gate_bias, up_bias, residual):
        options = {"gate_bias": gate_bias, "up_bias": up_bias, "residual": residual, "dropout_p": 0.25, "seed": seed}
        return functional.gated_activation(gate, up, "gelu", **options)

    assert torch.autograd.gradcheck(gated, (gate, up, gate_bias, up_bias, residual))
    assert torch.autograd.gradcheck(
        lambda x, b: functional.gated_activation_packed(x, "silu", bias=b), (random64(3, 8), random64(8))
    )
    assert torch.autograd.gradcheck(lambda x: functional.dropout(x, 0.5, seed=seed), (random64(5, 7),))


def test_second_derivative_raises():
    x = random64(3, 6)
    (first,) = torch.autograd.grad(functional.gelu(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"activation: .*second derivative"):
        first.sum().backward()


def opcheck_samples():
    seed = torch.tensor([1, 2])
    for dtype in (torch.float32, torch.bfloat16):
        x, y, residual, wide = (torch.randn(3, n).to(dtype) for n in (8, 8, 8, 16))
        bias, wide_bias = torch.randn(8), torch.randn(16)
        leaf = lambda t: t.clone().requires_grad_()  # noqa: E731
        yield ops.activation, (x, bias, residual, seed, "gelu", 0.5)
        yield ops.activation_forward, (leaf(x), leaf(bias), leaf(residual), seed, "silu", 0.5)
        yield ops.activation_forward, (leaf(x), None, None, None, "relu", 0.0)
        yield ops.activation_backward, (x, x, bias, seed, "gelu", 0.5, True)
        yield ops.activation_backward, (x, x, None, None, "gelu", 0.0, False)
        yield ops.gated_activation, (x, y, None, None, residual, None, "silu", 0.0)
        yield ops.gated_activation_forward, (leaf(x), leaf(y), leaf(bias), leaf(bias), None, seed, "silu", 0.5)
        yield ops.gated_activation_backward, (x, x, y, bias, bias, seed, "gelu", 0.5, True, True)
        yield ops.gated_activation_packed, (wide, None, residual, None, "relu", 0.0)
        yield ops.gated_activation_packed_forward, (leaf(wide), leaf(wide_bias), leaf(residual), seed, "gelu", 0.5)
        yield ops.gated_activation_packed_backward, (x, wide, wide_bias, None, "silu", 0.0, True)
        yield ops.dropout, (x, seed, 0.5)
        yield ops.dropout_forward, (leaf(x), seed, 0.5)
        yield ops.dropout_backward, (x, seed, 0.5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op, args", list(opcheck_samples()), ids=lambda v: getattr(v, "__name__", ""))
def test_opcheck(op, args):
    torch.library.opcheck(op.default, args)


def test_compiles_without_a_break():
    torch._dynamo.reset()
    x, residual, bias = torch.randn(4, 16, requires_grad=True), torch.randn(4, 16), torch.randn(16, requires_grad=True)
    seed = torch.tensor([1, 2])

    def run(x):
        y = functional.activation(x, "gelu", bias=bias, residual=residual, dropout_p=0.25, seed=seed)
        return functional.dropout(functional.swiglu_packed(y), 0.5, seed=seed)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), run(x))
    wanted = torch.autograd.grad(run(x).sum(), (x, bias))
    for mine, theirs in zip(torch.autograd.grad(compiled(x).sum(), (x, bias)), wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_vmap_and_per_sample_gradients():
    x, bias = torch.randn(5, 3, 8), torch.randn(8)
    torch.testing.assert_close(torch.func.vmap(functional.gelu)(x), functional.gelu(x))
    torch.testing.assert_close(torch.func.vmap(functional.swiglu_packed)(x), functional.swiglu_packed(x))

    def loss(bias, x):
        return functional.activation(x, "silu", bias=bias).square().sum()

    mine = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(bias, x)
    wanted = torch.stack([torch.func.grad(loss)(bias, row) for row in x])
    torch.testing.assert_close(mine, wanted)


def test_mixed_types():
    x, bias, residual = torch.randn(4, 8).bfloat16(), torch.randn(8), torch.randn(4, 8)
    assert functional.activation(x, "gelu", bias=bias).dtype is torch.bfloat16
    assert functional.activation(x, "gelu", residual=residual).dtype is torch.float32  # the wider of the two
    assert functional.activation(x.float(), "gelu", bias=bias.half()).dtype is torch.float32
    assert functional.swiglu(x, x.float()).dtype is torch.float32


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda x: functional.activation(x, "swish"), 'activation: kind is "swish"; known are gelu'),
        (lambda x: functional.activation(x, "gelu", bias=x[0, :3]), r"activation: bias has shape \[3\].* is 8"),
        (lambda x: functional.activation(x, "gelu", residual=x[:1]), r"residual has shape \[1, 8\], x has \[2, 8\]"),
        (lambda x: functional.activation(x, "gelu", dropout_p=1.5), "activation: dropout_p is 1.5; it must lie"),
        (lambda x: functional.activation(x, "gelu", dropout_p=0.5, seed=x[0, :2]), "activation: seed is .*int64"),
        (lambda x: functional.activation(x.int(), "gelu"), "activation: x is int32; convert it"),
        (lambda x: functional.gated_activation(x, x, "tanh"), 'gated_activation: kind is "tanh"; a gate is'),
        (lambda x: functional.swiglu(x, x[:, :4]), r"gated_activation: up has shape \[2, 4\], gate has \[2, 8\]"),
        (lambda x: functional.swiglu_packed(x[:, :5]), r"gated_activation: x has shape \[2, 5\]; .* even"),
        (lambda x: functional.dropout(x, -0.5), "dropout: dropout_p is -0.5"),
    ],
)
def test_errors_name_the_op_both_values_and_the_cure(call, words):
    with pytest.raises(RuntimeError, match=words):
        call(torch.randn(2, 8))


def test_gelu_refuses_other_words():
    with pytest.raises(ValueError, match="gelu: approximate is 'erf'"):
        functional.gelu(torch.randn(2), "erf")


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_statistics(device):
    """Bias, variance, and independence of neighbours, rows and calls, each within five standard deviations."""
    torch.manual_seed(0)
    count = 1 << 20
    for p in (0.1, 0.5, 0.9):
        x = torch.ones(1024, count // 1024, device=device)
        dropped = [functional.dropout(x, p).eq(0).double().flatten() for _ in range(2)]
        deviation = math.sqrt(p * (1 - p) / count)
        for mask in dropped:
            assert abs(mask.mean().item() - p) < 5 * deviation + 2**-17
            assert abs(functional.dropout(x, p).mean().item() - 1) < 5 * deviation / (1 - p)
        centred = [mask - p for mask in dropped]
        pairs = [(centred[0], centred[1])]
        pairs += [(centred[0][:-lag], centred[0][lag:]) for lag in (1, 2, 8, 1024)]
        for a, b in pairs:
            correlation = (a * b).mean().item() / (p * (1 - p))
            assert abs(correlation) < 5 / math.sqrt(count), (p, a.shape)


def test_dropout_draws_from_torchs_generator_and_repeats_with_a_seed():
    x = torch.randn(64, 64)
    torch.manual_seed(7)
    first, second = functional.dropout(x), functional.dropout(x)
    torch.manual_seed(7)
    assert torch.equal(functional.dropout(x), first) and not torch.equal(first, second)
    seed = torch.tensor([1, 2])
    again = functional.dropout(x, 0.5, seed=seed)
    assert torch.equal(functional.dropout(x, 0.5, seed=seed), again)
    assert not torch.equal(functional.dropout(x, 0.5, seed=torch.tensor([1, 3])), again)
    assert functional.dropout(x, 0.5, training=False) is x and functional.dropout(x, 0.0) is x
    assert functional.dropout(torch.full((9,), math.nan), 1.0).eq(0).all()


def test_dropout_gradient_is_the_mask():
    x, seed = torch.randn(33, 65, requires_grad=True), torch.tensor([5, 6])
    output = functional.dropout(x, 0.25, seed=seed)
    (gradient,) = torch.autograd.grad(output, x, torch.ones_like(x))
    assert torch.equal(gradient.eq(0), output.eq(0))
    torch.testing.assert_close(output.detach(), x.detach() * gradient)


def test_dropout_does_not_depend_on_threads_shape_or_type():
    seed, threads = torch.tensor([5, 6]), torch.get_num_threads()
    x = torch.ones(999, 1001)
    wanted = functional.dropout(x, 0.3, seed=seed)
    torch.set_num_threads(1)
    try:
        assert torch.equal(functional.dropout(x, 0.3, seed=seed), wanted)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(functional.dropout(x.reshape(-1), 0.3, seed=seed), wanted.reshape(-1))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(functional.dropout(x.to(dtype), 0.3, seed=seed).eq(0), wanted.eq(0))


@pytest.mark.gpu
def test_the_gpu_draws_the_cpus_bits_and_a_graph_draws_anew():
    seed = torch.tensor([5, 6])
    for shape in ((33, 64), (7, 13), (5, 4100)):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.ones(shape, dtype=dtype)
            assert torch.equal(
                functional.dropout(x.cuda(), 0.3, seed=seed.cuda()).cpu(), functional.dropout(x, 0.3, seed=seed)
            )
    x = torch.ones(64, 64, device="cuda")
    functional.dropout(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = functional.dropout(x)
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(output.clone())
    assert not torch.equal(*seen)
