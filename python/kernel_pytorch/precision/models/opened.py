"""Modules that hide their linear layers, opened: afterwards every matrix that multiplies is an nn.Linear, which
conversions find. What a model computes stays the same.

- nn.MultiheadAttention reads its weights itself; OpenMultiheadAttention has four linear layers instead.
- transformers' Conv1D (GPT-2) is a linear layer whose weight lies transposed.

nn.TransformerEncoderLayer and nn.TransformerEncoder read weights past their layers' forward in eval mode (torch's fast
path). `replace_layers` keeps them off it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ..._modules import has_hooks, replace_modules
from ..sensitivity import is_skipped

_ENCODERS = (nn.TransformerEncoderLayer, nn.TransformerEncoder)
_LEFT = "_left_fast_path"  # what switched torch's fast path on


class OpenMultiheadAttention(nn.Module):
    """nn.MultiheadAttention with its projections as linear layers, q_proj, k_proj, v_proj and out_proj."""

    # What nn.TransformerEncoderLayer asks before it takes its fast path: this answer keeps it off that.
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = attention.embed_dim, attention.num_heads
        self.head_dim, self.dropout = attention.head_dim, attention.dropout
        self.batch_first = attention.batch_first
        packed, bias = attention.in_proj_weight, attention.in_proj_bias
        each = [f"{name}_proj" for name in "qkv"]
        weights = [getattr(attention, f"{name}_weight") if packed is None else packed for name in each]
        for i, (name, weight) in enumerate(zip(each, weights, strict=True)):
            third = slice(i * self.embed_dim, (i + 1) * self.embed_dim)
            rows = weight if packed is None else weight[third]
            self.add_module(name, _linear(_own(rows, weight), None if bias is None else _own(bias[third], bias)))
        out = attention.out_proj
        self.out_proj = _linear(_own(out.weight, out.weight), None if out.bias is None else _own(out.bias, out.bias))
        self.train(attention.training)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """As nn.MultiheadAttention takes and returns it."""
        if is_causal and attn_mask is None:
            raise ValueError("OpenMultiheadAttention: is_causal says what attn_mask is; give attn_mask, too")
        is_batched = query.dim() == 3
        if not is_batched:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (one.transpose(0, 1) for one in (query, key, value))
        q, k, v = (
            self._modules[name](one).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # type: ignore[misc]
            for name, one in (("q_proj", query), ("k_proj", key), ("v_proj", value))
        )
        mask = self._mask(attn_mask, key_padding_mask, q)
        dropout_p = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * self.head_dim**-0.5) @ k.transpose(-1, -2)  # scaled first, as fp16 needs it
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            weights = nn.functional.dropout(weights, dropout_p, self.training)
            heads = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            heads = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p)
        output = self.out_proj(heads.transpose(1, 2).flatten(2))
        if not is_batched:
            return output[0], None if weights is None else weights[0]
        return output if self.batch_first else output.transpose(0, 1), weights

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """What is added to scores [batch, heads, queries, keys]; True hides in torch's masks of this layer."""

        def added(name: str, mask: Tensor) -> Tensor:
            if mask.is_floating_point():
                return mask.to(q.dtype)
            if mask.dtype is not torch.bool:
                raise TypeError(
                    f"OpenMultiheadAttention: {name} is {mask.dtype}; it is bool, where True hides, or of a floating "
                    "type, which is added to the scores"
                )
            return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, float("-inf"))

        of_keys = None if padding is None else added("key_padding_mask", padding)[:, None, None]
        if attn_mask is None:
            return of_keys
        of_scores = added("attn_mask", attn_mask)
        if attn_mask.dim() == 3:  # [batch * heads, queries, keys]
            of_scores = of_scores.view(-1, self.num_heads, *attn_mask.shape[1:])
        return of_scores if of_keys is None else of_scores + of_keys

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"


class OpenConv1D(nn.Linear):
    """transformers' Conv1D as the linear layer it is."""

    def __init__(self, layer: Any) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.weight.shape
        self.weight, self.bias = _own(layer.weight.t(), layer.weight), _own(layer.bias, layer.bias)
        self.train(layer.training)


def open_layers(
    model: nn.Module, skip: Sequence[str] = (), *, wanted: Callable[[str], bool] | None = None
) -> nn.Module:
    """The model with its hidden linear layers opened, in place; the model itself where it is one of them.

    Args:
        skip: names of modules that stay, whole or their last part.
        wanted: of names: whether a module is opened; None: all.
    """
    made: dict[nn.Module, nn.Module] = {}
    for name, module in model.named_modules():
        if not is_closed(module) or is_skipped(name, skip) or (wanted is not None and not wanted(name)):
            continue
        is_attention = isinstance(module, nn.MultiheadAttention)
        made[module] = OpenMultiheadAttention(module) if is_attention else OpenConv1D(module)
    return replace_layers(model, made)


def is_closed(module: nn.Module) -> bool:
    """Whether `open_layers` has another form for it. Learned extra keys, an added zero key and hooks have no place in
    that."""
    if any(map(has_hooks, module.modules())):
        return False
    if is_conv1d(module):
        return True
    if type(module) is not nn.MultiheadAttention:
        return False
    return module.bias_k is None and not module.add_zero_attn


def replace_layers(model: nn.Module, made: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """`replace_modules`, after which torch's encoders call the layers that they were given, in eval mode, too."""
    for module in list(model.modules()):
        if isinstance(module, _ENCODERS) and any(part in made for part in module.modules()):
            _leave_fast_path(module)
    return replace_modules(model, made)


def take_fast_paths(model: nn.Module) -> None:
    """The way back, for encoders with no layer of this library's left inside."""
    library = __name__.partition(".")[0]
    for module in model.modules():
        if _LEFT not in module.__dict__:
            continue
        if all(type(part).__module__.partition(".")[0] != library for part in module.modules()):
            setattr(module, *module.__dict__.pop(_LEFT))


def _leave_fast_path(module: nn.Module) -> None:
    # Where torch asks before it takes its fast path, in its layer and in its stack of layers.
    name = "activation_relu_or_gelu" if isinstance(module, nn.TransformerEncoderLayer) else "use_nested_tensor"
    if _LEFT not in module.__dict__ and hasattr(module, name):
        module.__dict__[_LEFT] = (name, getattr(module, name))
        setattr(module, name, 0)


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D; that library need not be there."""
    library = sys.modules.get("transformers.pytorch_utils")
    return library is not None and type(module) is library.Conv1D


def _own(values: Tensor, of: Tensor) -> nn.Parameter:
    """A parameter with memory of its own that trains where `of` does, in inference mode, too."""
    with torch.inference_mode(False):
        copied = values.detach().clone(memory_format=torch.contiguous_format)
        return nn.Parameter(copied, of.requires_grad)


def _linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    made.weight = weight
    if bias is not None:
        made.bias = bias
    return made
