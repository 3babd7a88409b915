"""Whether padding changes a module's results: the padded part is filled with noise, twice, and what comes back for the
real part must be the same both times and the plain call's up to rounding. The first is the sharp test, since the shapes
are the same: a module that lets a little of the padding through cannot hide it behind another order of summation.
The comparison also tells which dimensions of the outputs were padded with the input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .padding import pad, unpad

__all__ = ["OutputMap", "compare_outputs", "noisy_pad", "unpad_outputs"]

# Shares of the largest value: against the plain call, whose shapes may mean other kernels and summation orders, and
# between two paddings, where only sums in no fixed order may differ.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
_NOISE_TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}

OutputMap = list[dict[int, int]]  # for each tensor returned: its dimension -> the input's dimension it follows


@dataclass(frozen=True)
class Comparison:
    """`refusal` is "" where padded results equal plain ones."""

    refusal: str
    outputs: OutputMap


def noisy_pad(tensor: Tensor, sizes: Mapping[int, int]) -> Tensor:
    """Padded with noise: normal numbers, or entries of the tensor itself where they are integers (valid indices)."""
    padded = pad(tensor, sizes)
    if padded is tensor:
        return tensor
    real = pad(torch.ones_like(tensor, dtype=torch.bool), sizes)
    if tensor.is_floating_point():
        noise = torch.randn_like(padded)
    else:
        flat = tensor.reshape(-1)
        noise = flat[torch.randint(len(flat), padded.shape, device=tensor.device)]
    return torch.where(real, padded, noise)


def compare_outputs(plain: Any, padded: Any, again: Any, sizes: Mapping[int, tuple[int, int]]) -> Comparison:
    """Args:
    padded, again: of two calls with other noise as padding.
    sizes: the input's padded dimensions, each with its real and its padded size.
    """
    plain_leaves, plain_spec = pytree.tree_flatten(plain)
    (padded_leaves, padded_spec), (again_leaves, again_spec) = pytree.tree_flatten(padded), pytree.tree_flatten(again)
    if not str(plain_spec) == str(padded_spec) == str(again_spec):
        return Comparison("padding changes the structure of what the module returns", [])
    outputs: OutputMap = []
    for index, (one, other, third) in enumerate(zip(plain_leaves, padded_leaves, again_leaves, strict=True)):
        if not isinstance(one, Tensor):
            if one is not other and one != other:
                return Comparison(f"output {index} is {other!r} when padded and {one!r} when not", [])
            continue
        links = _links(one, other, sizes)
        if isinstance(links, str):
            return Comparison(f"output {index}: {links}", [])
        real = {dim: one.shape[dim] for dim in links}
        difference = _difference(unpad(third, real), unpad(other, real), _NOISE_TOLERANCE)
        if difference:
            return Comparison(f"output {index} {difference} with other values", [])
        difference = _difference(one, unpad(other, real), _TOLERANCE)
        if difference:
            return Comparison(f"output {index} {difference}", [])
        outputs.append(links)
    return Comparison("", outputs)


def unpad_outputs(output: Any, outputs: OutputMap, real: Mapping[int, int], copy: bool = False) -> Any:
    """The real part of what a padded call returned; `copy` always copies, otherwise only what would have gaps."""
    if isinstance(output, Tensor):
        return _cut(output, outputs[0], real, copy)
    leaves, spec = pytree.tree_flatten(output)
    links = iter(outputs)
    results = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            leaf = _cut(leaf, next(links), real, copy)
        results.append(leaf)
    return pytree.tree_unflatten(results, spec)


def _cut(tensor: Tensor, links: Mapping[int, int], real: Mapping[int, int], copy: bool) -> Tensor:
    cut = unpad(tensor, {dim: real[source] for dim, source in links.items()})
    return cut.clone(memory_format=torch.contiguous_format) if copy else cut.contiguous()


def _links(plain: Tensor, padded: Tensor, sizes: Mapping[int, tuple[int, int]]) -> dict[int, int] | str:
    if plain.dim() != padded.dim():
        return f"has {padded.dim()} dimensions when padded and {plain.dim()} when not"
    links: dict[int, int] = {}
    for dim, (one, other) in enumerate(zip(plain.shape, padded.shape, strict=True)):
        if one == other:
            continue
        sources = [source for source, pair in sizes.items() if pair == (one, other)]
        if not sources:
            return f"dimension {dim} goes from {one} to {other}, which is not how the input was padded"
        links[dim] = dim if dim in sources else sources[0]
    return links


def _difference(plain: Tensor, padded: Tensor, tolerance: Mapping[torch.dtype, float]) -> str:
    if not plain.is_floating_point():
        return "" if torch.equal(plain, padded) else "differs when padded"
    if plain.numel() == 0:
        return ""
    one, other = plain.detach().double(), padded.detach().double()
    if not torch.equal(one.isfinite(), other.isfinite()):
        return "has other infinities or NaN when padded"
    finite = one.isfinite()
    scale = one[finite].abs().max().item() if finite.any() else 0.0
    error = (one - other)[finite].abs().max().item() if finite.any() else 0.0
    bound = tolerance.get(plain.dtype, 1e-2) * max(scale, 1e-6)
    return "" if error <= bound else f"differs by {error:.2e} when padded; its largest value is {scale:.2e}"
