"""Calls of torch's functions inside a module's own forward: attention, rotary embeddings, softmax, GELU, norms.

The forward stays, line for line; the names by which it reaches those functions find ours (see rebind.py). A rotary
embedding is a function of the model's own file: it is recognised by its name and proved by its numbers.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn

from ..._ops.support.casting import product_dtype
from ..._rebind import reached, rebind
from ..._supports import runs_attention as kernels_take
from ...core._products import product
from ...functional import attention, gelu, layer_norm, rms_norm, rope, silu, softmax
from ..changes import Change, SetAttribute, SetForward, Several, mark
from ..sites import Call, Found, Proposal, Refusal, Way
from ..verify import row_error
from .context import Context, undisturbed, why_not_around

NAME = "calls"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_TORCH_ATTENTION = torch_functional.scaled_dot_product_attention


def runs_attention(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether our attention is the one to use: four dimensions, and kernels that take these heads."""
    if query.dim() != 4 or query.dtype not in _FLOATS or type(query) is not Tensor or _is_context_parallel():
        return False
    if query.is_cuda:
        sizes = int(query.shape[-1]), int(value.shape[-1])
        return kernels_take(*sizes, product_dtype(query), query.device)
    return query.is_cpu


def _is_context_parallel() -> bool:
    """Whether torch's attention is of many ranks just now (torch's context_parallel, or compat's): ours is of one."""
    if torch_functional.scaled_dot_product_attention is not _TORCH_ATTENTION:
        return True
    if torch.compiler.is_compiling() or not torch._C._is_torch_function_mode_enabled():
        return False
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(getattr(mode, "attends_to_all_ranks", False) for mode in modes)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function on our kernels where they are the ones to use."""
    if (
        query.dim() != 4
        and query.dim() >= 3
        and attn_mask is None
        and query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    ):
        rows, keys, values = (one.unsqueeze(0) if one.dim() == 3 else one.flatten(0, -4) for one in (query, key, value))
        attended = scaled_dot_product_attention(rows, keys, values, None, dropout_p, is_causal, scale)
        return attended.view(*query.shape[:-1], value.shape[-1])
    heads_fit = query.dim() != 4 or enable_gqa or query.shape[1] == key.shape[1] or key.shape[1] == value.shape[1] == 1
    if not runs_attention(query, key, value) or not heads_fit or (is_causal and attn_mask is not None):
        return torch_functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    is_bool = attn_mask is not None and attn_mask.dtype is torch.bool
    output: Tensor = attention(
        query,
        key,
        value,
        causal=is_causal,
        causal_offset=0 if is_causal else None,
        scale=scale,
        dropout_p=dropout_p,
        mask=attn_mask if is_bool else None,
        bias=None if is_bool else attn_mask,
    )
    return output


def _native_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    heads: int,
    weight: Tensor,
    bias: Tensor,
    output_weight: Tensor,
    output_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    *others: Any,
) -> tuple[Tensor, Tensor | None]:
    """torch's fused call of an nn.MultiheadAttention, for inference; masked or with its weights asked for it stays."""
    is_plain = mask is None and not need_weights and query is key is value and query.dim() == 3
    packed = product(query, weight, bias).view(*query.shape[:2], 3, heads, -1).unbind(2) if is_plain else None
    if packed is None or not runs_attention(*packed):
        return torch._native_multi_head_attention(
            query, key, value, embed_dim, heads, weight, bias, output_weight, output_bias, mask, need_weights, *others
        )
    return product(attention(*packed, layout="bshd").flatten(2), output_weight, output_bias), None


def _gelu(input: Tensor, approximate: str = "none") -> Tensor:
    return gelu(input, approximate)


def _silu(input: Tensor, inplace: bool = False) -> Tensor:
    return torch_functional.silu(input, inplace=True) if inplace else silu(input)


def is_deferred(value: Any) -> bool:
    """Whether it is computed late (deferred/scores.py): of a softmax it must see torch's."""
    return getattr(type(value), "is_deferred", False) is True


def _softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    is_last = input.dim() > 0 and dim in (-1, input.dim() - 1)
    if not is_last or (dtype is not None and dtype is not input.dtype) or is_deferred(input):
        return torch_functional.softmax(input, dim=dim, dtype=dtype)
    return softmax(input)


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if len(normalized_shape) != 1:
        return torch_functional.layer_norm(input, list(normalized_shape), weight, bias, eps)
    return layer_norm(input, weight, bias, eps)


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if len(normalized_shape) != 1:
        return torch_functional.rms_norm(input, list(normalized_shape), weight, eps)
    return rms_norm(input, weight, eps)


ATTENTION: dict[Any, Any] = {
    torch_functional.scaled_dot_product_attention: scaled_dot_product_attention,
    torch._native_multi_head_attention: _native_attention,
}
POINTWISE = {
    torch_functional.gelu: _gelu,
    torch_functional.silu: _silu,
    torch_functional.softmax: _softmax,
    torch.softmax: lambda input, dim, dtype=None: _softmax(input, dim, 3, dtype),
    torch_functional.layer_norm: _layer_norm,
    torch_functional.rms_norm: _rms_norm,
}


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Llama's rotary embedding of [batch, heads, sequence, size], or with unsqueeze_dim=2 heads after the sequence.
    Tables narrower than the heads turn the first columns alone."""
    heads_first = unsqueeze_dim == 1
    if cos.dim() == 3 and cos.shape[0] == 1:
        cos, sin = cos[0], sin[0]
    if heads_first:  # laid out in memory as [batch, sequence, heads, size], and so is what comes out
        query, key = query.transpose(1, 2), key.transpose(1, 2)
    turned, rotated_key = rope(query, key, cos, sin, rotary_dim=cos.shape[-1])
    return (turned.transpose(1, 2), rotated_key.transpose(1, 2)) if heads_first else (turned, rotated_key)


def rotary_table(function: Any) -> dict[Any, Any]:
    """The rotary embedding that a forward reaches, if its numbers are Llama's."""
    for name, value in getattr(function, "__globals__", {}).items():
        if name not in function.__code__.co_names or not isinstance(value, types.FunctionType):
            continue
        if ("rotary" in name or "rope" in name) and _is_rotary(value, 8):
            return {value: _on_our_rope(value, _is_rotary(value, 4))}
    return {}


def _on_our_rope(function: Any, is_partial: bool) -> Any:
    """`function`, by our kernel for tables as wide as the heads and, where it turns a part of them, for narrower ones;
    what was not proved of it is the function's own."""

    def turn(*args: Any, **kwargs: Any) -> Any:
        known = len(args) == 4 and kwargs.keys() <= {"unsqueeze_dim"} and type(args[0]) is Tensor
        width, size = (args[2].shape[-1], args[0].shape[-1]) if known else (0, 0)
        fits = known and (width == size or (is_partial and width < size))
        return rotary(*args, **kwargs) if fits else function(*args, **kwargs)

    return turn


def _is_rotary(function: Any, width: int) -> bool:
    """Whether its numbers are those of `rotary` for heads of 8 columns and tables of `width`."""
    with undisturbed():
        generator = torch.Generator().manual_seed(0)
        query, key = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (4, 2))
        angles = torch.randn(2, 5, width // 2, generator=generator)
        cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
        try:
            found = function(query, key, cos, sin)
        except Exception:  # another signature: it is not this function
            return False
        if not isinstance(found, tuple) or len(found) != 2:
            return False
        expected = rotary(query, key, cos, sin)
        return all(a.shape == b.shape and row_error(a, b)[1] < 1e-5 for a, b in zip(found, expected))


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    forward = type(module).forward
    owner = getattr(forward, "__module__", "") or ""
    is_torch = owner.startswith("torch.") and not isinstance(module, nn.MultiheadAttention)
    known = (context.perceptrons, context.activations, context.norms, context.attentions)
    is_known = any(module in table for table in known)
    if is_torch or is_known or (owner.startswith("kernel_pytorch.") and not owner.endswith("demo_models")):
        return None
    table = {**ATTENTION, **POINTWISE, **rotary_table(forward)}
    names = _reached(module, table)
    if not names:
        return None
    reason = why_not_around(module)
    if reason:
        return Refusal(path, NAME, reason)
    heavy = {key: value for key, value in table.items() if key not in POINTWISE}
    ways = [_way(module, table, names)]
    lighter = _reached(module, heavy)
    if lighter and lighter != names:
        ways.append(_way(module, heavy, lighter))
    return Proposal(
        "attention" if "scaled_dot_product_attention" in names else "calls",
        path,
        module,
        f"{type(module).__name__} calling {', '.join(names)}",
        ways,
        pointwise="scaled_dot_product_attention" not in names,
        opaque=isinstance(module, nn.MultiheadAttention),
    )


def _reached(module: nn.Module, table: dict[Any, Any]) -> list[str]:
    """By the module's forward, and by functions that it holds (diffusers' attention processors)."""
    inside = [name for _, held in _held(module) for name in reached(type(held).__call__, table)]
    return sorted({*reached(type(module).forward, table), *inside})


def _held(module: nn.Module) -> list[tuple[str, Any]]:
    """Objects by attribute that are called like functions and are written in Python, no modules."""
    return [
        (name, value)
        for name, value in vars(module).items()
        if not isinstance(value, (nn.Module, Tensor, type)) and isinstance(_call_of(value), types.FunctionType)
    ]


def _call_of(value: Any) -> Any:
    return getattr(type(value), "__call__", None)  # noqa: B004 (the function itself is wanted)


class _Rebound:
    """Base of a held object whose call is rebound. Pickled it is the object that it stands for."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _same, (vars(self)[_ORIGINAL],)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _with_call(copy.deepcopy(vars(self)[_ORIGINAL], memo), _call_of(self))


_ORIGINAL = "_kernel_pytorch_original"


def _same(value: Any) -> Any:
    return value


def _with_call(held: Any, function: Any) -> Any:
    """A copy of an object, of a class derived from its own, with another call."""
    made = copy.copy(held)
    made.__class__ = type(type(held).__name__, (_Rebound, type(held)), {"__call__": function})
    vars(made)[_ORIGINAL] = held
    return made


def _way(module: nn.Module, table: dict[Any, Any], names: list[str]) -> Way:
    def change() -> Change:
        function = rebind(type(module).forward, table)
        found: list[Change] = [] if function is None else [SetForward(module, mark(function))]
        for name, held in _held(module):
            function = rebind(_call_of(held), table)
            if function is not None:
                found.append(SetAttribute(module, name, _with_call(held, function)))
        return found[0] if len(found) == 1 else Several(*found)

    return Way(f"the same forward on kernel_pytorch's {', '.join(names)}", change)
