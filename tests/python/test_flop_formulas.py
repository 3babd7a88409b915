"""torch's FlopCounterMode counts this library's products as it counts torch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode, flop_registry  # noqa: E402

from kernel_pytorch import functional as F  # noqa: E402

T = torch.nn.functional


def count(run: Callable[[], object]) -> int:
    counter = FlopCounterMode(display=False)
    with counter:
        run()
    return counter.get_total_flops()


def step(function: Callable[..., object], *arguments: object) -> Callable[[], None]:
    def run() -> None:
        leaves = [a.clone().requires_grad_() if a.is_floating_point() else a for a in arguments]  # type: ignore[attr-defined]
        output = function(*leaves)
        output.backward(torch.ones_like(output))  # type: ignore[attr-defined]

    return run


X, W, V = torch.randn(12, 8), torch.randn(16, 8), torch.randn(8, 16)
Q = torch.randn(2, 4, 16, 8)
TARGET = torch.randint(16, (12,))
PAIRS = {
    "matmul": (F.matmul, torch.matmul, (X, V)),
    "linear": (F.linear, T.linear, (X, W)),
    "mlp": (F.mlp, lambda x, w, v: T.linear(T.relu(T.linear(x, w)), v), (X, W, V)),
    "linear_cross_entropy": (
        F.linear_cross_entropy,
        lambda x, w, target: T.cross_entropy(T.linear(x, w), target),
        (X, W, TARGET),
    ),
}


@pytest.mark.parametrize("name", list(PAIRS))
def test_products_count_as_torchs(name: str) -> None:
    ours, theirs, arguments = PAIRS[name]
    assert count(lambda: ours(*arguments)) == count(lambda: theirs(*arguments)) > 0
    assert count(step(ours, *arguments)) == count(step(theirs, *arguments))


def test_attention_counts_what_is_computed() -> None:
    full = 4 * Q.numel() * Q.shape[2]
    assert count(lambda: F.attention(Q, Q, Q)) == full
    assert count(lambda: F.attention(Q, Q, Q, causal=True)) == full // 2
    assert count(step(F.attention, Q, Q, Q)) == int(3.5 * full)


def test_linear_attention_counts_its_recurrence() -> None:
    whole = 4 * Q.numel() * Q.shape[3]  # a state of size x size, written and read by every token of a head
    assert count(lambda: F.linear_attention(Q, Q, Q)) == whole
    assert count(step(F.linear_attention, Q, Q, Q)) == 3 * whole
    beta = torch.rand(Q.shape[:3])
    assert count(lambda: F.delta_rule(Q, Q, Q, beta)) == 1.5 * whole
    assert count(step(lambda *x: F.delta_rule(*x, beta), Q, Q, Q)) == 5.5 * whole


def test_native_sparse_attention_counts_the_keys_of_its_branches() -> None:
    means = Q.shape[1] / 2 / 4
    options = dict(block_size=4, blocks=1, window=3, form="ejkernel")
    counted = count(lambda: F.native_sparse_attention(Q, Q, Q, gates=(1.0, 1.0, 1.0), **options))
    assert counted == 4 * Q.numel() * (means + min(4, Q.shape[1]) + min(3, Q.shape[1]))
    assert count(lambda: F.native_sparse_attention(Q, Q, Q, gates=(None, None, 1.0), **options)) == 12 * Q.numel()


def test_every_op_that_multiplies_has_a_formula() -> None:
    """By name: what is neither a product nor attention counts nothing, as torch's norms and activations do."""
    names = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("kernel_pytorch::")
    }
    words = ("matmul", "linear", "mlp", "attention", "mla", "delta")
    multiplies = {n for n in names if any(word in n for word in words)}
    multiplies.remove("merge_attention")  # a weighted sum of two results
    registered = {op.__name__ for op in flop_registry if str(op).startswith("kernel_pytorch.")}
    assert registered == multiplies


def test_torchs_grouped_products_are_counted() -> None:
    """optimize compares a part with what it was: torch counts nothing for its own grouped product."""
    from kernel_pytorch._optimize.flops import product_flops
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        total = 0.0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            self.total += product_flops(function, args, kwargs or {}, result) or 0.0
            return result

    x, weight = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((64, 32), (4, 32, 48)))
    ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32)
    upstream = torch.randn(64, 48, dtype=torch.bfloat16)
    with Counter() as counter:
        torch._grouped_mm(x, weight, offs=ends).backward(upstream)
    assert counter.total == 3 * 2 * 64 * 32 * 48
