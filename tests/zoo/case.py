"""A model of the zoo: how it is called, with another shape too, and what else it can do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class NotBuilt(Exception):
    """The installed library does not build or run the model at this size: it is not counted."""


@dataclass
class Case:
    """`inputs` and `other_inputs` are named arguments, or a tuple of positional ones."""

    model: nn.Module
    inputs: Any
    other_inputs: Any = None
    is_causal_lm: bool = False


def call(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


@contextmanager
def seeded() -> Iterator[None]:
    """The same random numbers in every run inside, and the caller's afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def redraw(model: nn.Module) -> None:
    """Weights that are zeros or ones at the start (a last layer, a scale) would hide what is wrong before them."""
    generator = torch.Generator().manual_seed(0)
    model.train().eval()  # what some keep of their parameters while they are evaluated is gone
    with torch.no_grad():
        for parameter in model.parameters():
            if (
                not nn.parameter.is_lazy(parameter)
                and parameter.is_floating_point()
                and parameter.numel()
                and parameter.min() == parameter.max()
            ):
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.05)
