"""Routers of models with experts choose alike while parts are verified; what follows from their scores is compared."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from kernel_pytorch._optimize.record import Choices  # noqa: E402
from kernel_pytorch._optimize.sites import Call  # noqa: E402
from kernel_pytorch._optimize.verify import results_of, verify  # noqa: E402
from torch import Tensor, nn  # noqa: E402


class Routed(nn.Module):
    """Scores of all experts are the same but for what `error` adds to the last."""

    num_experts = 4

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 16, 16))
        self.error, self.factor = 0.0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        scores = x[:, :1].expand(-1, 4) * torch.tensor([1.0, 1.0, 1.0, 1.0 + self.error]) * self.factor
        weights, chosen = torch.topk(scores, 2, dim=-1)
        return (torch.einsum("td,tkde->tke", x, self.experts[chosen]) * weights[..., None]).sum(1)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("error", "factor", "ok"), [(1e-6, 1.0, True), (-1e-6, 1.0, True), (0.0, 1.1, False)])
def test_almost_equal_experts_are_chosen_as_the_original_does(
    error: float, factor: float, ok: bool, gradients: bool
) -> None:
    torch.manual_seed(0)
    part = Routed()
    call = Call((torch.randn(32, 16),), {})

    def original(inputs: Call, seed: int, is_perturbed: bool) -> Any:
        part.error, part.factor = 0.0, 1.0
        try:
            return results_of(part, inputs, gradients, seed)
        finally:
            part.error, part.factor = error, factor

    part.error, part.factor = error, factor
    assert all(one.ok for one in verify("part", call, part, original, "exact", gradients)) == ok
    if error > 0:  # on its own it goes to another expert
        assert not torch.allclose(results_of(part, call, False).outputs[0], original(call, 0, False).outputs[0], 1e-2)


def test_choices_are_repeated_with_the_gradient_of_their_values() -> None:
    x = torch.randn(5, 8, requires_grad=True)
    with Choices() as first:
        torch.topk(x, 3, dim=-1)
    other = (first.made[0] + 1) % 8
    with Choices([other]) as again:
        values, chosen = x.topk(3, -1)
        assert torch.equal(x.topk(2).indices, torch.topk(x, 2).indices)  # a call that was not noted
    assert torch.equal(chosen, other) and torch.equal(values, x.gather(-1, other)) and len(again.made) == 3
    (gradient,) = torch.autograd.grad(values.sum(), x)
    assert torch.equal(gradient, torch.zeros_like(x).scatter(-1, other, 1.0))
