"""2:4 sparsity of linear layers: packed for inference, trained by SR-STE, and StructuredSparsity24 for whole models."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from .._ops.matmul import matmul
from .._ops.sparse_matmul import Sparse24Tensor, sparse_compress, sparse_matmul
from .models.opened import open_layers, replace_layers
from .sensitivity import quantizable_layers


@lru_cache
def _patterns() -> Tensor:
    """The 90 ways to keep two of four in every row and every column of a block, [90, 4, 4]."""
    rows = [[float(i in pair) for i in range(4)] for pair in itertools.combinations(range(4), 2)]
    blocks = [
        block
        for block in itertools.product(rows, repeat=4)
        if all(sum(column) == 2 for column in zip(*block, strict=True))
    ]
    return torch.tensor(blocks, device="cpu")  # kept for all devices, whatever the default one is


def transposable_mask(weight: Tensor) -> Tensor:
    """A mask with two of each four kept along rows and along columns, so that weight and transpose are both 2:4.

    In each block of 4 x 4 the one of the 90 such patterns that keeps the largest sum of magnitudes. bool, of weight's
    shape [rows, columns]; both are multiples of 4.
    """
    rows, columns = weight.shape
    if rows % 4 or columns % 4:
        raise ValueError(f"transposable_mask: weight has shape {[rows, columns]}; both sizes must be multiples of 4")
    blocks = weight.detach().abs().float().view(rows // 4, 4, columns // 4, 4).transpose(1, 2).reshape(-1, 16)
    patterns = _patterns().to(weight.device)
    best = (blocks @ patterns.flatten(1).t()).argmax(1)
    kept = patterns[best].view(rows // 4, columns // 4, 4, 4).transpose(1, 2)
    return kept.reshape(rows, columns).bool()


@lru_cache
def _halves() -> Tensor:
    """The 35 ways to divide eight columns into two groups of four, [35, 8]; the first leaves them as they are."""
    firsts = [(0, *three) for three in itertools.combinations(range(1, 8), 3)]
    return torch.tensor([[*first, *(i for i in range(8) if i not in first)] for first in firsts], device="cpu")


def _kept_sum(groups: Tensor) -> Tensor:
    """The sum of the two largest of four magnitudes [..., 4]."""
    a, b, c, d = groups.unbind(-1)
    high, low = torch.maximum(a, b), torch.minimum(a, b)
    other_high, other_low = torch.maximum(c, d), torch.minimum(c, d)
    second = torch.maximum(torch.minimum(high, other_high), torch.maximum(low, other_low))
    return torch.maximum(high, other_high) + second


@torch.no_grad()
def permuted_columns(weight: Tensor, *, rounds: int = 32) -> Tensor:
    """An order of columns, int64 [columns], in which 2:4 by magnitude keeps more: of weight[:, order] the sum of kept
    magnitudes is never less than of weight.

    A search: in each round groups of four columns meet in pairs, and each pair's eight columns are divided anew in the
    best of the 35 ways. Pairs are drawn by a fixed seed. A round takes as long as some hundred passes over the weight.
    """
    rows, columns = weight.shape
    if columns % 4:
        raise ValueError(f"permuted_columns: weight has shape {[rows, columns]}; columns must be a multiple of 4")
    order = torch.arange(columns, device=weight.device)
    count = columns // 4
    magnitudes = weight.abs().float().t().contiguous()  # columns are gathered
    ways = _halves().to(weight.device)
    generator = torch.Generator("cpu").manual_seed(0)
    for _ in range(rounds if count > 1 else 0):
        drawn = torch.randperm(count, generator=generator, device="cpu")
        pairs = drawn[: count // 2 * 2].view(-1, 2).to(weight.device)
        places = (pairs[:, :, None] * 4 + torch.arange(4, device=weight.device)).flatten(1)  # [pairs, 8]
        eights = magnitudes[order[places]]  # [pairs, 8, rows]
        kept = torch.stack([
            _kept_sum(eights[:, way].view(len(pairs), 2, 4, rows).transpose(2, 3)).sum((1, 2)) for way in ways
        ])  # fmt: skip
        best = ways[torch.where(kept.amax(0) > kept[0], kept.argmax(0), 0)]
        order[places] = order[places].gather(1, best)
    return order


class Sparse24Linear(nn.Module):
    """activation(x @ weight.T + bias) with two of each four of the weight kept: values and metadata are buffers, and so
    is `order` where the weight's columns were permuted first: column i of what is kept is column order[i].

    `from_linear` prunes a layer by magnitude. Gradients reach x and bias; the weight is fixed (SparseTrainingLinear
    trains one).
    """

    values: Tensor
    metadata: Tensor
    order: Tensor | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, activation: str | None = None,
        permuted: bool = False, device: torch.device | str | None = None, dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        super().__init__()
        if in_features % 4:
            raise ValueError(
                f"Sparse24Linear: in_features is {in_features}; two of each four are kept: a multiple of 4"
            )
        self.in_features, self.out_features, self.activation = in_features, out_features, activation
        self.register_buffer("values", torch.zeros(out_features, in_features // 2, device=device, dtype=dtype))
        words = torch.full((-(-in_features // 64), out_features, 2), 0x44444444, device=device, dtype=torch.int32)
        self.register_buffer("metadata", words)
        self.register_buffer("order", torch.arange(in_features, device=device) if permuted else None)
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, mask: Tensor | None = None, activation: str | None = None, permuted: bool = False
    ) -> Sparse24Linear:
        """The layer with its weight pruned: by magnitude, by magnitude in the order of columns that keeps more
        (`permuted_columns`), or by a mask that keeps two of each four or fewer."""
        weight = linear.weight.detach()
        if mask is not None and permuted:
            raise ValueError(
                "Sparse24Linear: mask and permuted are both given; a mask says what is kept, leave one out"
            )
        order = permuted_columns(weight) if permuted else None
        if order is not None:
            weight = weight[:, order]
        if mask is not None:
            if int(mask.view(weight.shape[0], -1, 4).sum(2).max()) > 2:
                raise ValueError("Sparse24Linear: the mask keeps more than two of four neighbours; at most two can be")
            weight = weight * mask
        sparse = sparse_compress(weight)
        made = cls(linear.in_features, linear.out_features, False, activation=activation, device="meta")
        made.values, made.metadata, made.bias, made.order = sparse.values, sparse.metadata, linear.bias, order
        return made.train(linear.training)

    @property
    def weight(self) -> Sparse24Tensor:
        return Sparse24Tensor(self.values, self.metadata)

    def to_dense(self) -> Tensor:
        """The weight, columns as the layer's input has them."""
        dense = self.weight.to_dense()
        return dense if self.order is None else torch.empty_like(dense).index_copy_(1, self.order, dense)

    def forward(self, x: Tensor) -> Tensor:
        if self.order is not None:
            x = x.index_select(-1, self.order)
        return sparse_matmul(x, self.weight, bias=self.bias, activation=self.activation)

    def extra_repr(self) -> str:
        permuted = ", permuted=True" if self.order is not None else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}" + permuted
        )


class _SparseTraining(torch.autograd.Function):
    """x @ pruned.T. The gradient of the weight passes the pruning, and draws pruned weights to zero (SR-STE)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, mask: Tensor, decay: float, transposable: bool) -> Tensor:
        ctx.save_for_backward(x, weight, mask)
        ctx.decay, ctx.transposable = decay, transposable
        return sparse_matmul(x, sparse_compress(weight * mask))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mask = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            pruned = weight * mask
            # A transposable mask makes this product a sparse one, too.
            grad_x = (
                sparse_matmul(grad, sparse_compress(pruned.t().contiguous()))
                if ctx.transposable
                else matmul(grad, pruned)
            )
        if ctx.needs_input_grad[1]:
            grad_weight = matmul(grad.flatten(0, -2).t(), x.flatten(0, -2)).to(weight.dtype)
            grad_weight = grad_weight + ctx.decay * torch.where(mask, 0, weight)
        return grad_x, grad_weight, None, None, None


class SparseTrainingLinear(nn.Linear):
    """A linear layer that trains with a 2:4 weight. The dense weight is the parameter; each forward prunes it.

    SR-STE: the gradient of the pruned weight is the dense weight's, plus `decay` times what was pruned, so that the
    choice settles. `to_sparse` packs the layer when training is done.

    Args:
        decay: of pruned weights, added to their gradient; 0 is plain straight-through.
        transposable: keep two of four along both dimensions, so that the product for x's gradient is sparse as well.
    """

    def __init__(self, linear: nn.Linear, *, decay: float = 2e-4, transposable: bool = False) -> None:
        nn.Module.__init__(self)
        sizes = (linear.in_features, linear.out_features) if transposable else (linear.in_features,)
        if any(size % 4 for size in sizes):
            raise ValueError(
                f"SparseTrainingLinear: the layer is {linear.in_features} to {linear.out_features}; two of each four "
                "are kept, so sizes must be multiples of 4"
            )
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.decay, self.transposable = decay, transposable
        self.train(linear.training)

    def mask(self) -> Tensor:
        """What this forward keeps."""
        return transposable_mask(self.weight) if self.transposable else sparse_compress(self.weight).mask()

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.weight.dtype is x.dtype else self.weight.to(x.dtype)
        sums: Tensor = _SparseTraining.apply(x, weight, self.mask(), self.decay, self.transposable)  # type: ignore[no-untyped-call]
        return sums if self.bias is None else sums + self.bias.to(sums.dtype)

    def to_sparse(self) -> Sparse24Linear:
        return Sparse24Linear.from_linear(self, mask=self.mask())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, decay={self.decay}, transposable={self.transposable}"


class StructuredSparsity24:
    """2:4 sparsity of tensors and models: the two of largest magnitude of each four neighbours of a row are kept.

    Args:
        sparsity_ratio, block_size: 0.5 and 4 are what 2:4 means; others are refused.
        magnitude_based: choose by magnitude; False is refused, since nothing else is known of a tensor.
        hardware_optimized: layers multiply packed weights by sparse_matmul; False masks their dense weights in place,
            of nn.MultiheadAttention and Conv1D those of the linear layers that `open_layers` puts in their places.
        transposable: keep two of four along both dimensions.
        permuted: each layer's columns are put into an order first in which more is kept (`permuted_columns`); its input
            is gathered in that order.
    """

    def __init__(
        self, sparsity_ratio: float = 0.5, block_size: int = 4, magnitude_based: bool = True,
        hardware_optimized: bool = True, *, transposable: bool = False, permuted: bool = False,
    ) -> None:  # fmt: skip
        if sparsity_ratio != 0.5 or block_size != 4 or not magnitude_based:
            raise ValueError(
                f"StructuredSparsity24: sparsity_ratio is {sparsity_ratio}, block_size {block_size}, magnitude_based "
                f"{magnitude_based}; 2:4 by magnitude is 0.5, 4 and True"
            )
        if permuted and (transposable or not hardware_optimized):
            raise ValueError(
                f"StructuredSparsity24: permuted with transposable={transposable}, hardware_optimized="
                f"{hardware_optimized}; a permuted weight is 2:4 along its rows, and packed: leave the others out"
            )
        self.hardware_optimized, self.transposable, self.permuted = hardware_optimized, transposable, permuted

    def __repr__(self) -> str:
        return (
            f"StructuredSparsity24(hardware_optimized={self.hardware_optimized}, transposable={self.transposable}, "
            f"permuted={self.permuted})"
        )

    def create_24_pattern(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """The pruned tensor and its mask, bool, of a tensor [..., columns]."""
        rows = tensor.reshape(-1, tensor.shape[-1])
        if self.permuted:
            order = permuted_columns(rows)
            permuted = sparse_compress(rows[:, order]).mask()
            kept = torch.empty_like(permuted).index_copy_(1, order, permuted)
        else:
            kept = transposable_mask(rows) if self.transposable else sparse_compress(rows).mask()
        mask = kept.view(tensor.shape)
        return tensor * mask, mask

    def compress_24_tensor(self, tensor: Tensor) -> Sparse24Tensor:
        """A matrix in half of its values and their places."""
        if self.permuted:
            raise ValueError(
                "compress_24_tensor: permuted; a Sparse24Tensor keeps columns in order, compress tensor[:, "
                "permuted_columns(tensor)] and keep that order"
            )
        return sparse_compress(self.create_24_pattern(tensor)[0] if self.transposable else tensor)

    def decompress_24_tensor(self, tensor: Sparse24Tensor) -> Tensor:
        return tensor.to_dense()

    def apply_to_model(
        self, model: nn.Module, *, skip: Sequence[str] = (), trains: bool = False, decay: float = 2e-4,
        inplace: bool = False,
    ) -> nn.Module:  # fmt: skip
        """The model with its linear layers pruned; layers whose inputs are no multiple of 4 stay.

        Args:
            skip: names of layers that stay, whole or their last part.
            trains: layers keep their dense parameters and prune them in each forward (SparseTrainingLinear, `decay`).
            inplace: False prunes a copy.
        """
        if trains and self.permuted:
            raise ValueError(
                "StructuredSparsity24: permuted with trains; the order is that of one weight, prune after training"
            )
        if not inplace:
            model = copy.deepcopy(model)
        model = open_layers(model, skip)
        made: dict[nn.Module, nn.Module] = {}
        for layer in quantizable_layers(model, skip).values():
            if layer.in_features % 4 or (self.transposable and layer.out_features % 4) or layer in made:
                continue
            if trains:
                made[layer] = SparseTrainingLinear(layer, decay=decay, transposable=self.transposable)
            elif self.hardware_optimized:
                mask = transposable_mask(layer.weight) if self.transposable else None
                made[layer] = Sparse24Linear.from_linear(layer, mask=mask, permuted=self.permuted)
            else:
                with torch.no_grad():
                    layer.weight.mul_(self.create_24_pattern(layer.weight)[1])
        return replace_layers(model, made)
