"""Operations of one call, for the roofline: products by their sizes, everything else one an element it gives.

torch's own products are counted by torch's formulas. A pointwise op or a norm does a few operations an element; one is
the least, and on a logarithmic scale of operations to a byte the difference is small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

__all__ = ["flops_of"]

Arguments = dict[str, Any]


def flops_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """Of function(*args, **kwargs), an overload of a torch op, which gave `result`."""
    space, name = function._schema.name.split("::")
    table = _OURS if space == "kernel_pytorch" else _TORCHS
    formula = table.get(name.removesuffix("_").removesuffix("_forward"))
    if formula is None:
        known = by_torch(function, args, kwargs, result)
        return float(_elements(result) or _elements((args, kwargs))) if known is None else known
    arguments = dict(zip((argument.name for argument in function._schema.arguments), args)) | kwargs
    return float(formula(arguments))


def by_torch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float | None:
    """torch's own count, or None: its formulas refuse some calls by assertions."""
    formula = flop_registry.get(function._overloadpacket)
    try:
        return None if formula is None else float(formula(*args, **kwargs, out_val=result))
    except (AssertionError, TypeError, ValueError, IndexError):
        return None


def _elements(values: Any) -> int:
    return max((leaf.numel() for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)), default=0)


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1] if x.numel() else 0


def _matmul(arguments: Arguments) -> Any:
    a, b = arguments["a"], arguments["b"]
    batch = math.prod(a.shape[:-2]) if a.dim() >= b.dim() else math.prod(b.shape[:-2])
    return 2.0 * batch * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _scaled_matmul(arguments: Arguments) -> Any:
    """a [m, k] and b [n, k]: FP8 is multiplied along k alone."""
    return 2.0 * arguments["a"].numel() * arguments["b"].shape[0]


def _linear(arguments: Arguments) -> Any:
    return 2.0 * _rows(arguments["x"]) * arguments["weight"].numel()


def _linear_backward(arguments: Arguments) -> Any:
    return _linear(arguments) * (arguments["input_grad"] + arguments["weight_grad"])


def _mlp(arguments: Arguments) -> Any:
    return 2.0 * _rows(arguments["x"]) * (arguments["weight_in"].numel() + arguments["weight_out"].numel())


def _mlp_backward(arguments: Arguments) -> Any:
    return 2 * _mlp(arguments)  # of what is multiplied, and of the weights


def _linear_cross_entropy(arguments: Arguments) -> Any:
    products = 1 + arguments["hidden_grad"] + arguments["weight_grad"]
    return 2.0 * _rows(arguments["hidden"]) * arguments["weight"].numel() * products


def _attention(arguments: Arguments) -> Any:
    """Two products of every query with every key; half of them under a causal mask. Windows and other masks leave out
    more, which is not counted: such a point lies higher than the work that was done."""
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    if query.dim() == 4:
        keys = float(key.shape[2 if arguments["heads_first"] else 1])
    else:  # packed: as if all sequences had the same length
        starts = arguments.get("cu_seqlens_k")
        keys = key.shape[0] / max(1, starts.numel() - 1 if starts is not None else 1)
    half = 0.5 if arguments.get("causal") else 1.0
    return 2.0 * (query.numel() + query.numel() // query.shape[-1] * value.shape[-1]) * keys * half


def _attention_backward(arguments: Arguments) -> Any:
    return 2.5 * _attention(arguments)


def _torch_attention(arguments: Arguments) -> Any:
    """Of torch's attention. Its own formulas count causal ones in full and refuse grouped heads."""
    return _attention({**arguments, "heads_first": True, "causal": arguments.get("is_causal")})


def _torch_attention_backward(arguments: Arguments) -> Any:
    return 2.5 * _torch_attention(arguments)


_KINDS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_TORCHS: dict[str, Callable[[Arguments], Any]] = {
    **{f"_scaled_dot_product_{kind}": _torch_attention for kind in _KINDS},
    **{f"_scaled_dot_product_{kind}_backward": _torch_attention_backward for kind in _KINDS},
}
_OURS: dict[str, Callable[[Arguments], Any]] = {
    "matmul": _matmul,
    "matmul_add": _matmul,
    "scaled_matmul": _scaled_matmul,
    "linear": _linear,
    "linear_backward": _linear_backward,
    "mlp": _mlp,
    "mlp_backward": _mlp_backward,
    "gated_mlp": _mlp,
    "gated_mlp_backward": _mlp_backward,
    "linear_cross_entropy": _linear_cross_entropy,
    "attention": _attention,
    "attention_backward": _attention_backward,
}
