"""Operations of one call, for the roofline: products by their sizes, everything else one an element it gives.

Products are counted by the formulas that torch's FlopCounterMode has, ours (_ops/support/flops.py) among them. A
pointwise op or a norm does a few operations an element; one is the least, and on a logarithmic scale of operations to a
byte the difference is small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from .._ops.support.flops import attention_flops

__all__ = ["flops_of", "product_flops"]

Arguments = dict[str, Any]


def flops_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """FLOPs of function(*args, **kwargs), an overload of a torch op that returned `result`."""
    known = product_flops(function, args, kwargs, result)
    return float(_elements(result) or _elements((args, kwargs))) if known is None else known


def product_flops(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float | None:
    """FLOPs of its GEMMs; None for an op without any."""
    space, name = function._schema.name.split("::")
    formula = _TORCHS.get(name) if space == "aten" else None
    if formula is None:
        return by_torch(function, args, kwargs, result)
    arguments = dict(zip((argument.name for argument in function._schema.arguments), args)) | kwargs
    return float(formula(arguments))


def by_torch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float | None:
    """The registered count, or None: torch's formulas refuse some calls by assertions."""
    formula = flop_registry.get(function._overloadpacket)
    try:
        return None if formula is None else float(formula(*args, **kwargs, out_val=result))
    except (AssertionError, TypeError, ValueError, IndexError):
        if function.namespace == "kernel_pytorch":
            raise
        return None


def _elements(values: Any) -> int:
    return max((leaf.numel() for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)), default=0)


def _torch_attention(arguments: Arguments) -> Any:
    """FLOPs of torch's attention. torch's own formulas count causal attention in full and refuse grouped heads."""
    return attention_flops({**arguments, "heads_first": True, "causal": arguments.get("is_causal")})


def _torch_attention_backward(arguments: Arguments) -> Any:
    return 2.5 * _torch_attention(arguments)


def _torch_native_attention(arguments: Arguments) -> Any:
    """FLOPs of torch's single op for nn.MultiheadAttention in evaluation: query, key and value together."""
    query, key = arguments["query"], arguments["key"]
    weights = arguments["qkv_weight"].numel() + arguments["proj_weight"].numel()
    return 2.0 * query.numel() // query.shape[-1] * weights + 4.0 * query.numel() * key.shape[1]


def _torch_encoder_layer(arguments: Arguments) -> Any:
    """torch's one op for nn.TransformerEncoderLayer in evaluation."""
    source = arguments["src"]
    attention = _torch_native_attention({**arguments, "query": source, "key": source})
    weights = arguments["ffn_weight_1"].numel() + arguments["ffn_weight_2"].numel()
    return attention + 2.0 * source.numel() // source.shape[-1] * weights


def _torch_grouped_product(arguments: Arguments) -> Any:
    """FLOPs of torch's grouped product, which torch counts none of: each line of the groups with one matrix of the
    other operand, or, where groups cut k, all of both."""
    a, b = arguments["self"], arguments["mat2"]
    matrices = b.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2.0 * matrices * a.shape[-2] * a.shape[-1] * b.shape[-1]


_KINDS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_TORCHS: dict[str, Callable[[Arguments], Any]] = {
    **{f"_scaled_dot_product_{kind}": _torch_attention for kind in _KINDS},
    **{f"_scaled_dot_product_{kind}_backward": _torch_attention_backward for kind in _KINDS},
    "_native_multi_head_attention": _torch_native_attention,
    "_transformer_encoder_layer_fwd": _torch_encoder_layer,
    "_grouped_mm": _torch_grouped_product,
}
