"""What tests of step graphs share: a small model, by graphs and as it is, on the CPU with noted graphs and on a GPU."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as torch_functional
from kernel_pytorch.optimization_patterns import capturing, step_graphs
from kernel_pytorch.optimization_patterns.step_graphs import StepGraphs
from noted_cuda import NotedCuda
from torch import Tensor, nn

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES, name="device")
def step_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device, with noted graphs on the CPU."""
    if request.param == "cpu":
        monkeypatch.setattr(step_graphs, "place_of", lambda tensors, state: (torch.device("cpu"), ""))
        monkeypatch.setattr(capturing, "uncached_autocast", contextlib.nullcontext)
        NotedCuda.install(monkeypatch)
    yield request.param


class Model(nn.Module):
    """A loss and what it was computed from, as Hugging Face's models return them."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16))
        self.norm = nn.BatchNorm1d(16) if norm else nn.LayerNorm(16)
        self.unused = nn.Parameter(torch.zeros(3))
        self.calls = 0

    def forward(self, ids: Tensor, labels: Tensor | None = None, scale: float = 1.0) -> dict[str, Any]:
        self.calls += 1
        x = self.embed(ids)
        x = x + self.inner(x)
        x = self.norm(x.flatten(0, 1)).view(x.shape)
        logits = x @ self.embed.weight.T * scale
        loss = None if labels is None else torch_functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits, "tag": None}


class Pair:
    """A model by graphs and its twin as it is."""

    def __init__(self, device: str, model: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.plain = (model or Model()).to(device).train()
        self.model = copy.deepcopy(self.plain)
        self.graphs = StepGraphs(self.model, type(self.model).forward)
        self.device = device

    def ids(self, *shape: int) -> Tensor:
        return torch.randint(50, shape or (4, 8), device=self.device)

    def both(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self.graphs(*args, **kwargs), self.plain(*args, **kwargs)

    def step(self, ids: Tensor | None = None, factor: float = 1.0) -> None:
        """One step of both, compared; gradients stay."""
        ids = self.ids() if ids is None else ids
        ours, theirs = self.both(ids, labels=ids)
        torch.testing.assert_close(ours["logits"], theirs["logits"])
        torch.testing.assert_close(ours["loss"], theirs["loss"])
        for output in (ours, theirs):
            (factor * output["loss"]).backward()
        self.compare()

    def compare(self) -> None:
        for (name, ours), theirs in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)

    def clear(self) -> None:
        for model in (self.model, self.plain):
            model.zero_grad(set_to_none=True)

    def captured(self) -> Pair:
        """After the two steps that lead to a graph."""
        for _ in range(2):
            self.step()
            self.clear()
        assert self.counts("graphs") == 1 and self.counts("replays") >= 1
        return self

    def counts(self, name: str) -> int:
        return int(self.graphs.statistics()[name])
