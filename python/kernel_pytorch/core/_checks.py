"""What the layers refuse, in one place: each message names the layer, both values and the cure."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# What layers call the functions of `functional.activation`.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu_squared": "relu_squared",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "identity": "identity",
}


def activation_kind(layer: str, activation: str) -> str:
    if activation not in ACTIVATIONS:
        raise ValueError(f"{layer}: activation is {activation!r}; it must be one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]


def check_probability(layer: str, probability: float, name: str = "dropout") -> float:
    if not 0.0 <= probability <= 1.0:
        raise ValueError(f"{layer}: {name} is {probability}; it must be between 0 and 1")
    return probability


def check_features(module: nn.Module, x: Tensor, features: int, name: str = "x") -> None:
    if x.dim() == 0 or x.shape[-1] != features:
        raise RuntimeError(
            f"{type(module).__name__}: {name} has shape {list(x.shape)}, its last dimension must be {features}; "
            f"build the layer for that size"
        )


def check_sequences(module: nn.Module, x: Tensor, features: int, name: str) -> None:
    """Checks the input of layers that take only [batch, sequence, features]."""
    check_features(module, x, features, name)
    if x.dim() != 3:
        raise RuntimeError(
            f"{type(module).__name__}: {name} has shape {list(x.shape)}; give [batch, sequence, {features}], such as "
            f"{name}[None] for one sequence"
        )


def check_device(layer: str, device: torch.device | str | None) -> None:
    """Checks that parameters can be created there: torch's own message without CUDA does not name the layer."""
    if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"{layer}: device is {str(device)!r}, and torch {torch.__version__} finds no CUDA device here; use "
            'device="cpu", or a machine and a build of torch with CUDA'
        )
