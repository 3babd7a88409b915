"""Losses that ask a router to use its experts alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..functional import Routing


class LoadBalancer(nn.Module):
    """A loss that is least where tokens are spread evenly over the experts.

    Args:
        loss: "switch": the mean share of an expert's pairs times its mean probability, times the experts, which is the
            routing's own aux_loss for softmax scores; "gshard": the same with the shares of first choices alone;
            "entropy": how far the entropy of the mean probabilities is from that of even ones, as a share of it.
        weight: of the loss.
    """

    KINDS = ("switch", "gshard", "entropy")

    def __init__(self, loss: str = "switch", weight: float = 0.01) -> None:
        super().__init__()
        if loss not in self.KINDS:
            raise ValueError(f'LoadBalancer: loss is "{loss}"; it is one of {", ".join(self.KINDS)}')
        self.loss, self.weight = loss, weight

    def forward(self, logits: Tensor, routing: Routing) -> Tensor:
        """The weighted loss, with a gradient to the logits [..., experts] that the routing was made of."""
        experts = logits.shape[-1]
        mean = logits.float().softmax(-1).reshape(-1, experts).mean(0)
        if self.loss == "entropy":
            entropy = -(mean * mean.clamp(min=torch.finfo(mean.dtype).tiny).log()).sum()
            most = torch.tensor(float(experts)).log().to(entropy)
            return self.weight * (1 - entropy / most)
        counts = routing.counts
        if self.loss == "gshard":
            counts = torch.bincount(routing.experts[..., 0].flatten(), minlength=experts)
        shares = counts / counts.sum().clamp(min=1)
        return self.weight * experts * (shares * mean).sum()

    def extra_repr(self) -> str:
        return f"{self.loss}, weight {self.weight}"
