"""Floating-point operations of this library's products, registered for torch's FlopCounterMode.

torch counts products and nothing else, and so does this table: a norm or an activation has no entry. Every op that
multiplies matrices has one; a test compares each with torch's count of the same work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from ... import _torch as _torch  # loads the library

__all__ = ["attention_flops", "register"]

Arguments = dict[str, Any]
Formula = Callable[[Arguments], Any]


def rows_of(x: Tensor) -> int:
    return x.numel() // x.shape[-1] if x.numel() else 0


def _matmul(arguments: Arguments) -> Any:
    a, b = arguments["a"], arguments["b"]
    batch = math.prod(a.shape[:-2]) if a.dim() >= b.dim() else math.prod(b.shape[:-2])
    return 2.0 * batch * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _products(rows: str, **factors: str) -> Formula:
    """Products of the rows of one tensor with others that are there, each as often as flags are set ("1" always is)."""

    def flops(arguments: Arguments) -> Any:
        elements = 0
        for name, flags in factors.items():
            if arguments.get(name) is not None:
                elements += arguments[name].numel() * sum(flag == "1" or arguments[flag] for flag in flags.split())
        return 2.0 * rows_of(arguments[rows]) * elements

    return flops


def _mlp_backward(arguments: Arguments) -> Any:
    """Gradients of x and of both weights, and of the hidden layer, which the first two and the first bias come from."""
    into_hidden = arguments["input_grad"] or arguments["weight_in_grad"] or arguments.get("bias_in_grad", False)
    products_in = arguments["input_grad"] + arguments["weight_in_grad"]
    products_out = into_hidden + arguments["weight_out_grad"]
    weights = products_in * arguments["weight_in"].numel() + products_out * arguments["weight_out"].numel()
    return 2.0 * rows_of(arguments["x"]) * weights


def attention_flops(arguments: Arguments) -> Any:
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


def _paged(arguments: Arguments) -> Any:
    """As if every request filled its table of pages: how long they are is the device's knowledge."""
    query, value = arguments["query"], arguments["value_cache"]
    keys = arguments["block_tables"].shape[1] * value.shape[1]
    return 2.0 * (query.numel() + query.shape[0] * query.shape[1] * value.shape[3]) * keys


def _latent(arguments: Arguments) -> Any:
    query, latent, indices = arguments["query"], arguments["latent_cache"], arguments.get("indices")
    keys = arguments["block_tables"].shape[1] * latent.shape[1] if indices is None else indices.shape[1]
    return 2.0 * (query.numel() + query.shape[0] * query.shape[1] * latent.shape[2]) * keys


def _linear_attention(arguments: Arguments) -> Any:
    """The recurrence: every token adds key times value to a state of its head and multiplies its query with it."""
    return 4.0 * arguments["query"].numel() * arguments["value"].shape[-1]


def _delta_rule(arguments: Arguments) -> Any:
    """The recurrence: a key reads the state of its head and is written to it, a query reads it."""
    return 6.0 * arguments["value"].numel() * arguments["query"].shape[-1]


def _native_sparse_attention(arguments: Arguments) -> Any:
    """Means up to the token, as many keys as a list and the window have; early tokens are counted as full ones."""
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    lists, size, tokens = arguments.get("block_indices"), arguments["block_size"], key.shape[1]
    stride = arguments.get("compress_stride") or (16 if arguments["form"] == "paper" else size)
    branches = (
        ("gate_compressed", 0.5 * tokens / max(stride, 1)),
        ("gate_selected", min(tokens, (arguments["blocks"] if lists is None else lists.shape[-1]) * size)),
        ("gate_window", min(tokens, arguments["window"])),
    )
    keys = sum(count for gate, count in branches if arguments.get(gate) is not None)
    return 2.0 * (query.numel() + query.shape[:3].numel() * value.shape[-1]) * keys


def _grouped(arguments: Arguments) -> Any:
    """Every row by one matrix; rows in no group are counted too, their number being the device's."""
    groups = max(1, arguments["b"].shape[0])
    return 2.0 * arguments["rows"] * (arguments["b"].numel() // groups)


def _grouped_weight(arguments: Arguments) -> Any:
    gather = arguments.get("gather_a") if arguments.get("gather_a") is not None else arguments.get("gather_b")
    rows = arguments["a"].shape[0] if gather is None else gather.shape[0]
    return 2.0 * rows * arguments["a"].shape[1] * arguments["b"].shape[1]


def _experts(arguments: Arguments) -> Any:
    """Both products of every pair of a token and an expert."""
    experts = max(1, arguments["gate_up"].shape[0])
    elements = (arguments["gate_up"].numel() + arguments["down"].numel()) // experts
    return 2.0 * arguments["chosen"].numel() * elements


def _experts_backward(arguments: Arguments) -> Any:
    experts, pairs = max(1, arguments["gate_up"].shape[0]), arguments["chosen"].numel()
    of_up, of_down = arguments["gate_up"].numel() // experts, arguments["down"].numel() // experts
    flags = ("input_grad", "gate_up_grad", "gate_up_bias_grad", "down_grad", "down_bias_grad", "weights_grad")
    through = any(arguments.get(flag, False) for flag in flags)
    first = of_up * (arguments["input_grad"] + arguments["gate_up_grad"])
    return 2.0 * pairs * (first + of_down * (arguments["down_grad"] + through))


def _quantized(arguments: Arguments) -> Any:
    return 2.0 * arguments["x"].numel() * arguments["codes"].shape[0]


def _quantized_grouped(arguments: Arguments) -> Any:
    """Every row by one matrix; rows in no group are counted too, their number being the device's."""
    x, lines = arguments["x"], arguments["codes"].shape[0] // max(1, arguments["offsets"].shape[0])
    return 2.0 * arguments["rows"] * x.shape[1] * lines


def _sparse(arguments: Arguments) -> Any:
    """Of what is kept: half of the dense product."""
    return 2.0 * rows_of(arguments["x"]) * arguments["values"].numel()


_FORWARDS: dict[str, Formula] = {
    "matmul": _matmul,
    "linear": _products("x", weight="1", weight_up="1"),
    "mlp": _products("x", weight_in="1", weight_out="1"),
    "linear_cross_entropy": _products("hidden", weight="1 hidden_grad weight_grad"),
    "attention": attention_flops,
    "linear_attention": _linear_attention,
    "delta_rule": _delta_rule,
    "native_sparse_attention": _native_sparse_attention,
    "grouped_matmul": _grouped,
    "moe_mlp": _experts,
    "quantized_matmul": _quantized,
    "int8_matmul": _products("x", weight="1"),
    "quantized_grouped_matmul": _quantized_grouped,
    "sparse_matmul": _sparse,
}
_FORMULAS: dict[str, Formula] = {
    **_FORWARDS,
    **{f"{op}_forward": formula for op, formula in _FORWARDS.items()},
    "matmul_add_": _matmul,
    "scaled_matmul": _products("a", b="1"),  # FP8 is multiplied along the last dimension of both
    "scaled_grouped_matmul": _grouped,
    "linear_backward": _products("x", weight="input_grad weight_grad"),
    "mlp_backward": _mlp_backward,
    "grouped_matmul_weight": _grouped_weight,
    "moe_mlp_backward": _experts_backward,
    "attention_backward": lambda arguments: 2.5 * attention_flops(arguments),
    "attention_fp8": attention_flops,
    "linear_attention_": _linear_attention,
    "linear_attention_backward": lambda arguments: 2.0 * _linear_attention(arguments),  # of query, key, value, state
    "delta_rule_": _delta_rule,
    "delta_rule_backward": lambda arguments: 8.0 / 3 * _delta_rule(arguments),  # query, both uses of key, value, state
    "native_sparse_attention_backward": lambda arguments: 2.5 * _native_sparse_attention(arguments),
    "attention_part_": attention_flops,
    "paged_attention": _paged,
    "paged_attention_": _paged,
    "mla_decode": _latent,
    "attention_part_backward_": lambda arguments: 2.5 * attention_flops(arguments),
}


def register() -> None:
    """Tells torch's FlopCounterMode the formulas; a second call does nothing."""
    for name, formula in _FORMULAS.items():
        packet = getattr(torch.ops.kernel_pytorch, name)
        if packet not in flop_registry:
            register_flop_formula(packet, get_raw=True)(_by_position(packet, formula))


def _by_position(packet: Any, formula: Formula) -> Callable[..., int]:
    names = [argument.name for argument in packet.default._schema.arguments]

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return int(formula(dict(zip(names, args, strict=False)) | kwargs))

    return count


register()
