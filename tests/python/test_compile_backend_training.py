"""Patterns of the compile backend that exist for their gradients: embeddings, layers of one input, a head's loss."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from compile_models import Compiled  # noqa: E402
from kernel_pytorch.compile_backend import choice, products  # noqa: E402
from torch.nn import functional  # noqa: E402

AOT = {"kernel_pytorch.inner": "aot_eager"}


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch.manual_seed(0)
    choice.forget()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def check(found: Any, function: Any, arguments: list[Any], tolerance: float = 1e-5) -> None:
    """Values and gradients, the results being weighted so that no gradient is 1."""
    leaves = [one for one in arguments if one.requires_grad]
    outputs = [call(*arguments) for call in (found, function)]
    torch.testing.assert_close(*outputs, atol=tolerance, rtol=tolerance)
    totals = [sum(one.float().square().sum() for one in _all(output)) for output in outputs]
    gradients = [torch.autograd.grad(total, leaves) for total in totals]
    torch.testing.assert_close(*gradients, atol=4 * tolerance, rtol=4 * tolerance)


def _all(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else (output,)


@pytest.mark.parametrize("padding", [None, 3, -1])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_embedding(padding: int | None, dtype: Any) -> None:
    indices = torch.randint(0, 9, (4, 11)).to(dtype)
    indices[0] = 8  # the last row, which -1 names, many times

    def embed(weight: Any) -> Any:
        return functional.embedding(indices, weight, padding_idx=padding) * 2.0

    found, weight = Compiled(embed, AOT), torch.randn(9, 6, requires_grad=True)
    check(found, embed, [weight])
    assert found.replaced == {"embedding": 1}, str(found.report)


@pytest.mark.parametrize("kind", ["no gradient", "sparse", "by frequency"])
def test_embeddings_that_are_left_to_torch(kind: str) -> None:
    weight = torch.randn(9, 6, requires_grad=kind != "no gradient")
    options = {"sparse": {"sparse": True}, "by frequency": {"scale_grad_by_freq": True}}.get(kind, {})
    found = Compiled(lambda table: functional.embedding(torch.arange(9) % 4, table, **options))
    found(weight)
    assert not found.replaced, str(found.report)


def test_an_embedding_is_timed_on_indices_of_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timing with one index, or with one beyond the table, would tell nothing, or end the process."""
    seen: list[Any] = []

    def times(runs: Any, device: Any, seconds: float, turns: int = 11) -> Any:
        seen.extend(runs["torch"]()[:1])
        return {name: choice.Time(1e-3) for name in runs}

    monkeypatch.setattr(choice, "times", times)
    table = torch.randn(50, 4, requires_grad=True)
    found = Compiled(
        lambda weight: functional.embedding(torch.arange(300) % 50, weight), {"kernel_pytorch.choose": "timed"}
    )
    found(table)
    assert len(seen[0].unique(dim=0)) > 40


def norm(x: Any, weight: Any) -> Any:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


@pytest.mark.parametrize("frozen", [(), (2,), (0, 1)], ids=str)
def test_layers_of_one_input(frozen: tuple[int, ...]) -> None:
    """Behind an op of ours; with weights that want no gradient, and a result that nobody differentiates."""

    def project(x: Any, row: Any, *weights: Any) -> Any:
        normed = norm(x, row)
        q, k, v, unused = (functional.linear(normed, weight) for weight in weights)
        return q, k * 2.0, v, unused.detach()

    x, row = torch.randn(2, 5, 8, requires_grad=True), torch.rand(8, requires_grad=True)
    weights = [torch.randn(size, 8, requires_grad=i not in frozen) for i, size in enumerate((6, 4, 4, 3))]
    found = Compiled(project, AOT)
    check(found, project, [x, row, *weights[:3], weights[3].detach()])
    assert found.replaced == {"norm": 1, "linears": 1}, str(found.report)


def test_layers_whose_sum_of_gradients_inductor_fuses_are_left_alone() -> None:
    def project(x: Any, first: Any, second: Any) -> Any:
        y = x.tanh()
        return functional.linear(y, first), functional.linear(y, second)

    found = Compiled(project)
    check(found, project, [torch.randn(5, 8, requires_grad=True), *(torch.randn(6, 8) for _ in range(2))])
    assert not found.replaced, str(found.report)


def test_the_gradient_of_layers_is_rounded_like_torchs_sum() -> None:
    gradients = [torch.randn(3, 7, size, dtype=torch.bfloat16) for size in (16, 8, 8)]
    weights = [torch.randn(one.shape[-1], 32, dtype=torch.bfloat16) for one in gradients]
    exact = sum(one.double() @ weight.double() for one, weight in zip(gradients, weights))
    plain = sum(one @ weight for one, weight in zip(gradients, weights))
    found = products.linears_input_gradient(gradients, weights)
    assert found.shape == exact.shape and (found - exact).norm() <= 1.1 * (plain - exact).norm()
