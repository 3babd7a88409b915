"""softmax and log_softmax against torch: values, gradients, masks, edges, what compilers and transforms ask, errors."""

from __future__ import annotations

import math
import random

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch import functional  # noqa: E402

ops = torch.ops.kernel_pytorch
TYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def reference(x, *, scale=1.0, mask=None, causal=False, log=False):
    """In double, by torch's own operations; rows without scores as ours: zeros, or -inf for log."""
    scores = x.double() * scale
    keep = torch.ones(scores.shape, dtype=torch.bool, device=x.device)
    if mask is not None and mask.dtype is torch.bool:
        keep = keep & mask
    elif mask is not None:
        scores = scores + mask.double()
    if causal:
        queries, keys = x.shape[-2:]
        keep = keep & torch.ones(queries, keys, dtype=torch.bool, device=x.device).tril(keys - queries)
    scores = scores.masked_fill(~keep, -math.inf)
    is_empty = (scores == -math.inf).all(-1, keepdim=True) & (torch.tensor(causal) | torch.tensor(mask is not None))
    scores = scores.masked_fill(is_empty.to(x.device), 0.0)
    output = torch.log_softmax(scores, -1) if log else torch.softmax(scores, -1)
    return output.masked_fill(is_empty.to(x.device), -math.inf if log else 0.0)


def assert_near(actual, expected, dtype):
    assert actual.shape == expected.shape
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=bound, atol=bound)


def random_problem(rng, device="cpu"):
    """An x of random shape, strides and type, with random options."""
    dtype = rng.choice(TYPES)
    sizes = [rng.choice((1, 2, 3, 5)) for _ in range(rng.randint(0, 2))] + [rng.randint(1, 9)]
    keys = rng.choice((1, 3, 8, 31, 64, 100, 257, 1024, rng.randint(1, 3000)))
    x = torch.randn(*sizes, keys + rng.choice((0, 0, 5)), device=device).to(dtype)[..., :keys]
    if len(sizes) > 1 and rng.random() < 0.3:
        x = x.transpose(0, 1)
    kind = rng.choice(("none", "none", "bool", "added", "fp32"))
    shape = [size if rng.random() < 0.6 else 1 for size in x.shape[:-1]] + [keys]
    shape = shape[rng.randint(0, len(shape) - 1) :]
    mask = None
    if kind == "bool":
        mask = torch.rand(shape, device=device) > rng.choice((0.1, 0.5, 0.95))
    elif kind != "none":
        mask = torch.randn(shape, device=device).to(dtype if kind == "added" else torch.float32)
        mask = mask.masked_fill(torch.rand(shape, device=device) < 0.1, -math.inf)
    scale = rng.choice((1.0, 0.125, -2.0))
    return x, dict(scale=scale, mask=mask, causal=rng.random() < 0.3)


def check_random_problem(seed, device="cpu"):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    x, options = random_problem(rng, device)
    log = rng.random() < 0.5
    function = functional.log_softmax if log else functional.softmax
    ours, theirs = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    output, expected = function(ours, **options), reference(theirs, log=log, **options)
    assert output.dtype is x.dtype
    assert_near(output, expected, x.dtype)
    gradient = torch.randn_like(output)
    output.backward(gradient)
    # The backward's own formula on our rounded output: rounding of the output is not the gradient's error.
    y, g = output.detach().double(), gradient.double()
    if log:
        wanted = g - y.exp() * g.sum(-1, keepdim=True)
        if options["mask"] is not None or options["causal"]:
            wanted = wanted.masked_fill(y == -math.inf, 0.0)
    else:
        wanted = y * (g - (g * y).sum(-1, keepdim=True))
    bound = 3 * TOLERANCE[x.dtype] * max(1.0, abs(options["scale"]) * math.sqrt(x.shape[-1]))
    torch.testing.assert_close(ours.grad.double(), options["scale"] * wanted, rtol=bound, atol=bound)


@pytest.mark.parametrize("block", range(4))
def test_random_problems(block):
    for seed in range(40 * block, 40 * block + 40):
        check_random_problem(seed)


@pytest.mark.gpu
def test_random_problems_on_the_gpu():
    for seed in range(500):
        check_random_problem(seed, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [32768, 65536, 128256, 262144])
def test_wide_rows_on_the_gpu(keys):
    for dtype in TYPES:
        x = torch.randn(5, keys, device="cuda").to(dtype)
        assert_near(functional.softmax(x), reference(x), dtype)
        mask = torch.rand(keys, device="cuda") > 0.5
        assert_near(functional.log_softmax(x, mask=mask), reference(x, mask=mask, log=True), dtype)
        inplace = x.clone()
        assert torch.equal(functional.softmax_(inplace), functional.softmax(x))


@pytest.mark.parametrize("log", [False, True])
def test_gradcheck(log):
    function = functional.log_softmax if log else functional.softmax
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: function(x, scale=-0.7), (x,))
    assert torch.autograd.gradcheck(lambda x, mask: function(x, scale=0.5, mask=mask), (x, mask))
    if not log:
        keep = torch.tensor([True, False, True, True])
        assert torch.autograd.gradcheck(lambda x: function(x, causal=True, mask=keep), (x,))


def test_gradient_of_a_broadcast_mask():
    x, mask = torch.randn(3, 4, 5), torch.randn(4, 1, requires_grad=True)
    weights = torch.randn(3, 4, 5)
    (functional.softmax(x, mask=mask.expand(4, 5)) * weights).sum().backward()
    ours, mask.grad = mask.grad, None
    (torch.softmax(x + mask, -1) * weights).sum().backward()
    torch.testing.assert_close(ours, mask.grad)


def test_extreme_scores():
    x = torch.tensor([[1e4, 1e4 - 1, -math.inf], [-3e38, 3e38, 0.0]])
    torch.testing.assert_close(functional.softmax(x), torch.softmax(x, -1))
    torch.testing.assert_close(functional.log_softmax(x), torch.log_softmax(x, -1))
    for bad in ([math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]):
        assert functional.softmax(torch.tensor(bad)).isnan().all() == torch.softmax(torch.tensor(bad), -1).isnan().all()
    nothing = functional.softmax(torch.randn(2, 3), mask=torch.zeros(3, dtype=torch.bool))
    assert torch.equal(nothing, torch.zeros(2, 3))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 0, 4), (1,), (1, 1)])
def test_small_and_empty(shape):
    x = torch.randn(shape, requires_grad=True)
    output = functional.softmax(x)
    assert torch.equal(output, torch.softmax(x, -1))
    output.sum().backward()
    assert x.grad.shape == x.shape


def test_in_place():
    x = torch.randn(4, 300)
    expected, expected_log = functional.softmax(x, scale=2.0), functional.log_softmax(x)
    other, version = x.clone(), x._version
    assert functional.softmax_(x, scale=2.0) is x and torch.equal(x, expected) and x._version > version
    assert torch.equal(functional.log_softmax_(other), expected_log)
    with pytest.raises(RuntimeError, match="writes into its arguments"):
        functional.softmax_(torch.randn(3, requires_grad=True))
    with pytest.raises(RuntimeError, match="contiguous"):
        functional.softmax_(torch.randn(3, 4).t())


def opcheck_samples():
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 3, 8).to(dtype)
        leaf = x.clone().requires_grad_()
        yield ops.softmax, (x, None, 1.0, True, False)
        yield ops.softmax_forward, (leaf, (torch.rand(3, 8) > 0.2).expand(2, 3, 8), 0.5, False, True)
        yield (
            ops.softmax_forward,
            (leaf, torch.randn(3, 8).to(dtype).expand(2, 3, 8).requires_grad_(), 0.5, False, False),
        )
        yield ops.softmax_backward, (x, x.softmax(-1), 1.0, False, False)
        yield ops.softmax_, (x.clone(), None, 1.0, False, True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op, args", list(opcheck_samples()), ids=lambda v: getattr(v, "__name__", ""))
def test_opcheck(op, args):
    torch.library.opcheck(op.default, args)


def test_compiled():
    torch._dynamo.reset()

    def block(x, mask):
        scores = functional.softmax(x * 2, mask=mask, causal=True, scale=0.5)
        return functional.log_softmax(scores + x).sum()

    x, mask = torch.randn(3, 5, 7, requires_grad=True), torch.rand(5, 7) > 0.2
    torch.compile(block, fullgraph=True)(x, mask).backward()
    compiled, x.grad = x.grad, None
    block(x, mask).backward()
    torch.testing.assert_close(compiled, x.grad)


def test_transforms():
    x, mask = torch.randn(4, 3, 5), torch.rand(3, 5) > 0.3
    batched = torch.vmap(lambda x: functional.softmax(x, mask=mask, causal=True))(x)
    torch.testing.assert_close(batched, functional.softmax(x, mask=mask, causal=True))
    ours = torch.func.jacrev(functional.log_softmax)(x[0, 0])
    torch.testing.assert_close(ours, torch.func.jacrev(lambda x: torch.log_softmax(x, -1))(x[0, 0]))


def test_errors():
    x = torch.randn(3, 4)
    with pytest.raises(RuntimeError, match="x is int64"):
        functional.softmax(torch.ones(3, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="scale is nan"):
        functional.softmax(x, scale=math.nan)
    with pytest.raises(RuntimeError, match="causal needs a dimension"):
        functional.softmax(x[0], causal=True)
    with pytest.raises(RuntimeError, match="mask is fp64"):
        functional.softmax(x, mask=x.double())
    with pytest.raises(RuntimeError, match="expand"):
        functional.softmax(x, mask=torch.ones(5))
    y = functional.softmax(x.clone().requires_grad_())
    (gradient,) = torch.autograd.grad(y.sum(), y.grad_fn.next_functions[0][0].variable, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        gradient.sum().backward()
