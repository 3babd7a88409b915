"""One call of a bucketed module: which of its tensors are padded, to what, and with which mask."""

from __future__ import annotations

import inspect
import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .padding import MaskArgument, PaddingStrategy, pad
from .verification import noisy_pad

__all__ = ["BucketCall", "index_of_argument"]


_PLAIN = (Tensor, int, float, str, type(None))


def index_of_argument(module: nn.Module, name: str) -> int | None:
    """Its place among the positional arguments of the module's forward; None where it has none."""
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return None
    places = [parameter.name for parameter in parameters if parameter.kind == parameter.POSITIONAL_OR_KEYWORD]
    return places.index(name) if name in places else None


class BucketCall:
    """Arguments, flat. A tensor is padded in every bucketed dimension in which it is as long as the first tensor.

    Attributes:
        shape: the bucket's.
        tensors: of the call as it came; a mask that is made here is not among them.
        dims: for each tensor the dimensions that the bucket may grow; `values` what goes behind them.
        padded: dimensions that do grow, with their real and padded sizes.
        real: the first tensor's sizes of all bucketed dimensions.
        makes_mask: whether a mask is added; it describes `length` positions.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        primary: Tensor,
        shape: tuple[int, ...],
        bucketed: tuple[int, ...],
        mask: MaskArgument | None,
        mask_index: int | None,
        sequence_dim: int,
    ) -> None:
        self.args, self.kwargs = args, kwargs
        self._count, self._names = len(args), tuple(kwargs)
        self.leaves: list[Any] = [*args, *kwargs.values()]
        self._spec: Any = None
        if not all(isinstance(leaf, _PLAIN) for leaf in self.leaves):  # tensors inside of something
            self.leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._graph_key: Hashable | None = None
        self.shape = shape
        self.real_elements, self.padded_elements = primary.numel(), math.prod(shape)  # of the primary
        self.mask = mask
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.real = {dim: primary.shape[dim] for dim in bucketed}
        self.padded = {dim: (size, shape[dim]) for dim, size in self.real.items() if size != shape[dim]}
        self.length = self.real.get(sequence_dim, 0)
        is_placed = mask is not None and mask_index is not None and len(args) > mask_index
        self._given_mask: Any = None
        if mask is not None:
            self._given_mask = args[mask_index] if is_placed and mask_index is not None else kwargs.get(mask.name)
        is_described = sequence_dim in self.real and sequence_dim != 0
        self.makes_mask = mask is not None and self._given_mask is None and is_described and not is_placed
        self._mask_sizes = (shape[0], shape[sequence_dim]) if self.makes_mask else (0, 0)
        self.dims = [self._dims_of(tensor) for tensor in self.tensors]
        self.values = [
            mask.padding_value if mask is not None and tensor is self._given_mask else 0 for tensor in self.tensors
        ]

    def _dims_of(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(dim for dim, size in self.real.items() if dim < tensor.dim() and tensor.shape[dim] == size)

    def _sizes(self, index: int) -> dict[int, int]:
        return {dim: self.shape[dim] for dim in self.dims[index]}

    def padded_tensors(self, strategy: PaddingStrategy) -> list[Tensor]:
        """At the bucket's sizes, with the mask that is made last."""
        padded = [
            pad(
                tensor,
                self._sizes(index),
                PaddingStrategy.ZEROS if self.values[index] or tensor.dtype == torch.bool else strategy,
                self.values[index],
            )
            for index, tensor in enumerate(self.tensors)
        ]
        return padded + self._new_mask()

    def noisy(self) -> list[Tensor]:
        """As padded_tensors, with noise behind everything but a mask."""
        padded = [
            pad(tensor, self._sizes(index), value=self.values[index])
            if self.is_mask(index)
            else noisy_pad(tensor, self._sizes(index))
            for index, tensor in enumerate(self.tensors)
        ]
        return padded + self._new_mask()

    def is_mask(self, index: int) -> bool:
        return self.tensors[index].dtype == torch.bool or self.tensors[index] is self._given_mask

    def _new_mask(self) -> list[Tensor]:
        if not self.makes_mask:
            return []
        assert self.mask is not None
        return [self.mask.tensor(*self._mask_sizes, self.length, self.tensors[0].device)]

    def arguments(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments with other tensors in their places."""
        replaced = iter(tensors)
        leaves = [next(replaced) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        if self._spec is None:
            args, kwargs = tuple(leaves[: self._count]), dict(zip(self._names, leaves[self._count :], strict=True))
        else:
            args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        if self.makes_mask:
            assert self.mask is not None
            kwargs = {**kwargs, self.mask.name: next(replaced)}
        return args, kwargs

    def graph_key(self) -> Hashable:
        """What a graph is captured for: the padded shapes and everything that is no tensor."""
        if self._graph_key is not None:
            return self._graph_key
        spec = (self._count, self._names) if self._spec is None else str(self._spec)
        parts: list[Any] = [spec, self.makes_mask]
        index = 0
        for leaf in self.leaves:
            if isinstance(leaf, Tensor):
                shape = list(leaf.shape)
                for dim in self.dims[index]:
                    shape[dim] = self.shape[dim]
                parts.append((tuple(shape), self.dims[index], leaf.dtype, leaf.device))
                index += 1
            else:
                parts.append((type(leaf), leaf))
        self._graph_key = tuple(parts)
        return self._graph_key

    def key(self) -> Hashable | None:
        """What a plan is kept under: as a graph's, and which dimensions were padded; None: no hash."""
        key = (self.graph_key(), tuple(self.padded))
        try:
            hash(key)
        except TypeError:
            return None
        return key
