"""How the ops run on DTensors: for each op, the ways in which its tensors may be cut over one dimension of a mesh.

A rule yields ways: the dimension (or placement) of each tensor that is cut, by its name in the schema; the others, and
all in the way that every op has, are replicated. torch takes the way that moves least. Rows are free, what is
normalised or summed over is whole, a product is cut by columns or by the dimension of its sum, attention by batch or
heads. Rules are made known to torch on the first call with a DTensor (see call_with_rules): nothing here imports
torch.distributed before.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

Way = dict[str, Any]
Rule = Callable[[Any], Iterator[Way]]
_SUM = "sum"  # a part of a sum: torch's Partial


_NORMS = ("rms_norm", "add_rms_norm", "rms_norm_activation", "layer_norm", "add_layer_norm", "layer_norm_activation")


def _norm(a: Any) -> Iterator[Way]:
    for d in range(a.x.ndim - 1):
        yield dict.fromkeys(("x", "residual", "output", "sum", "mean", "rstd"), d)


def _norm_backward(a: Any) -> Iterator[Way]:
    for d in range(a.value.ndim - 1):
        yield {
            **dict.fromkeys(("grad_output", "value", "mean", "rstd", "grad_sum"), d),
            "grad_input": d if a.input_grad else None,
            "grad_weight": _SUM if a.weight_grad and a.weight is not None else None,
            "grad_bias": _SUM if getattr(a, "bias_grad", False) and a.bias is not None else None,
        }


def _elementwise(a: Any) -> Iterator[Way]:
    """Activations: a bias belongs to the last dimension. Dropout counts elements of the whole, so it is not split."""
    x = a.x if hasattr(a, "x") else a.gate
    for d in range(x.ndim if a.seed is None else 0):
        of_bias = 0 if d == x.ndim - 1 else None
        yield {
            **dict.fromkeys(("x", "gate", "up", "residual", "output"), d),
            **dict.fromkeys(("bias", "gate_bias", "up_bias"), of_bias),
        }


def _elementwise_backward(a: Any) -> Iterator[Way]:
    x = a.x if hasattr(a, "x") else a.gate
    for d in range(x.ndim if a.seed is None else 0):
        is_last = d == x.ndim - 1
        way: Way = dict.fromkeys(("grad_output", "x", "gate", "up", "grad_input", "grad_gate", "grad_up"), d)
        for name in ("bias", "gate_bias", "up_bias"):
            way[name] = 0 if is_last else None
            is_made = getattr(a, name, None) is not None and getattr(a, f"{name}_grad")
            way[f"grad_{name}"] = (0 if is_last else _SUM) if is_made else None
        yield way


def _packed(rule: Rule) -> Rule:
    """Gate and up are halves of the last dimension, which stays whole."""
    return lambda a: (way for way in rule(a) if way["x"] != a.x.ndim - 1)


def _has_activation(a: Any) -> bool:
    return bool(a.gated) or a.activation != "identity"


def _can_cut_columns(a: Any, weight: Any) -> bool:
    """Pairs of gate and up stay together."""
    return not a.gated or weight.shape[0] % (2 * weight.mesh.size()) == 0


def _linear(a: Any) -> Iterator[Way]:
    last = a.x.ndim - 1
    is_kept = _has_activation(a)
    for d in range(last):
        yield {**dict.fromkeys(("x", "residual", "output"), d), "preactivation": d if is_kept else None}
    if _can_cut_columns(a, a.weight):
        columns = {"weight": 0, "weight_up": 0, "bias": 0, "residual": last, "output": last}
        yield {**columns, "preactivation": last if is_kept else None}
    if not is_kept:
        yield {"x": last, "weight": 1, "bias": _SUM, "residual": _SUM, "output": _SUM}


def _linear_backward(a: Any) -> Iterator[Way]:
    last = a.x.ndim - 1
    is_kept = _has_activation(a)

    def made(x: Any, weight: Any, bias: Any) -> Way:
        wants_bias = a.bias_grad and a.bias is not None
        return {
            "grad_x": x if a.input_grad else None,
            "grad_weight": weight if a.weight_grad else None,
            "grad_bias": bias if wants_bias else None,
        }

    for d in range(last):
        kept = {"preactivation": d if is_kept else None}
        yield {"grad_output": d, "x": d, **kept, **made(d, _SUM, _SUM)}
    if _can_cut_columns(a, a.weight):
        kept = {"preactivation": last if is_kept else None}
        yield {"grad_output": last, "weight": 0, "bias": 0, **kept, **made(_SUM, 0, 0)}
    if not is_kept:
        yield {"x": last, "weight": 1, **made(last, 1, None)}


def _mlp(a: Any) -> Iterator[Way]:
    last = a.x.ndim - 1
    is_kept = _has_activation(a)
    for d in range(last):
        kept = {"preactivation": d if is_kept else None}
        yield {**dict.fromkeys(("x", "residual", "output", "hidden"), d), **kept}
    if _can_cut_columns(a, a.weight_in):
        hidden = {"hidden": last, "preactivation": last if is_kept else None}
        weights = {"weight_in": 0, "bias_in": 0, "weight_out": 1, "bias_out": _SUM}
        yield {**weights, **hidden, "residual": _SUM, "output": _SUM}


def _mlp_backward(a: Any) -> Iterator[Way]:
    last = a.x.ndim - 1
    is_kept = _has_activation(a)
    names = ("weight_in", "bias_in", "weight_out", "bias_out")

    def made(x: Any, *others: Any) -> Way:
        grads: Way = {"grad_x": x if a.input_grad else None}
        for name, place in zip(names, others, strict=True):
            is_made = getattr(a, name) is not None and getattr(a, f"{name}_grad")
            grads[f"grad_{name}"] = place if is_made else None
        return grads

    for d in range(last):
        kept = {"preactivation": d if is_kept else None}
        yield {**dict.fromkeys(("grad_output", "x", "hidden"), d), **kept, **made(d, _SUM, _SUM, _SUM, _SUM)}
    if _can_cut_columns(a, a.weight_in):
        hidden = {"hidden": last, "preactivation": last if is_kept else None}
        yield {"weight_in": 0, "bias_in": 0, "weight_out": 1, **hidden, **made(_SUM, 0, 0, 1, None)}


def _matmul(a: Any) -> Iterator[Way]:
    last = a.a.ndim - 1
    for d in range(last - 1):
        yield {"a": d, "b": d, "output": d}
    yield {"a": last - 1, "output": last - 1}
    yield {"b": last, "output": last}
    yield {"a": last, "b": last - 1, "output": _SUM}


def _rope(a: Any) -> Iterator[Way]:
    query = a.query if hasattr(a, "query") else a.grad_query
    key = a.key if hasattr(a, "key") else a.grad_key
    has_batch = query.ndim == 4
    heads, sequence = (query.ndim - 3, query.ndim - 2) if a.heads_first else (query.ndim - 2, query.ndim - 3)

    def way(d: int, tables: int | None, positions: int | None) -> Way:
        queries = dict.fromkeys(("query", "grad_query", "rotated_query"), d)
        keys = dict.fromkeys(("key", "grad_key", "rotated_key"), d if key is not None else None)
        return {**queries, **keys, "cos": tables, "sin": tables, "positions": positions}

    has_rows = a.cos is not None and a.cos.ndim == 3  # of each batch
    yield way(heads, None, None)
    if has_batch:
        is_own = has_rows and a.cos.shape[0] == query.shape[0]
        has_positions = a.positions is not None and a.positions.ndim == 2
        yield way(0, 0 if is_own else None, 0 if has_positions and a.positions.shape[0] == query.shape[0] else None)
    if a.positions is not None and not has_rows:  # rows of a table that all have
        yield way(sequence, None, a.positions.ndim - 1)
    elif a.positions is None and a.cos is not None and a.cos.shape[-2] == query.shape[sequence]:
        yield way(sequence, a.cos.ndim - 2, None)


def _softmax(a: Any) -> Iterator[Way]:
    for d in range(a.x.ndim - (2 if a.causal else 1)):
        yield {"x": d, "mask": d, "output": d}


def _softmax_backward(a: Any) -> Iterator[Way]:
    for d in range(a.output.ndim - 1):
        yield dict.fromkeys(("grad_output", "output", _RESULT), d)


def _cross_entropy(a: Any) -> Iterator[Way]:
    """A sum over rows is a sum of parts; the divisor of a mean is that of the whole."""
    for d in range(0 if a.mean else a.target.ndim):
        yield {"logits": d, "target": d, "output": _SUM, "grad_logits": d}


def _cross_entropy_rows(a: Any) -> Iterator[Way]:
    for d in range(a.target.ndim):
        yield dict.fromkeys(("grad_output", "logits", "target", "lse", "output"), d)


def _embedding(a: Any) -> Iterator[Way]:
    for d in range(a.indices.ndim):
        yield {"indices": d, "output": d}
    yield {"weight": 1, "output": a.indices.ndim}


def _embedding_backward(a: Any) -> Iterator[Way]:
    for d in range(a.indices.ndim):
        yield {"indices": d, "grad_output": d, "output": _SUM}
    yield {"grad_output": a.indices.ndim, "output": 1}


def _attention(a: Any) -> Iterator[Way]:
    """Batch or heads: whatever tells them apart (programs that count them, dropout, lists of blocks) keeps it whole."""
    if a.blocks or a.captured:
        raise NotImplementedError(
            "kernel_pytorch.attention: DTensors cannot have block masks or captured tensors; call it on their local "
            "parts (to_local, or torch.distributed.tensor.experimental.local_map)"
        )
    if a.score_mod or a.mask_mod or a.seed is not None:
        return
    is_packed = a.query.ndim == 3
    heads = 1 if a.heads_first or is_packed else 2
    members = a.query.mesh.size()
    if a.query.shape[heads] % members == 0 and a.key.shape[heads] % members == 0:
        yield _attention_way(a, heads, -3, 0 if is_packed else 1)
    if not is_packed:
        yield _attention_way(a, 0, -4, 0)


def _attention_way(a: Any, d: int, of_scores: int, of_rows: int) -> Way:
    """By dimension `d` of queries and keys, which is `of_scores` of [batch, heads, queries, keys]."""
    is_heads = of_scores == -3
    names = ("query", "key", "value", "output", "grad_output", "grad_query", "grad_key", "grad_value")
    way: Way = dict.fromkeys(names, d)
    way["grad_lse"] = of_rows
    has_lse = getattr(a, "return_lse", True) or a.is_forward
    way["lse"] = of_rows if has_lse else None
    for name in ("bias", "mask"):
        given = getattr(a, name)
        is_cut = given is not None and given.ndim >= -of_scores and given.shape[of_scores] != 1
        way[name] = given.ndim + of_scores if is_cut else None
    way["sinks"] = 0 if is_heads else None
    if a.alibi_slopes is not None:
        way["alibi_slopes"] = a.alibi_slopes.ndim - 1 if is_heads else 0 if a.alibi_slopes.ndim == 2 else None
    if not is_heads:
        way.update(dict.fromkeys(("query_segment_ids", "key_segment_ids", "key_lengths"), 0))
    if getattr(a, "wants_bias", False) and a.bias is not None:
        way["grad_bias"] = _SUM if way["bias"] is None else way["bias"]
    if getattr(a, "wants_sinks", False) and a.sinks is not None:
        way["grad_sinks"] = 0 if is_heads else _SUM
    return way


_RESULT = "result"  # an output whose name an argument has
_FORWARDS: dict[str, Rule] = {
    **dict.fromkeys(_NORMS, _norm),
    **dict.fromkeys(("activation", "gated_activation"), _elementwise),
    "gated_activation_packed": _packed(_elementwise),
    "linear": _linear,
    "mlp": _mlp,
    "matmul": _matmul,
    "rope": _rope,
    "softmax": _softmax,
    "cross_entropy": _cross_entropy,
    "cross_entropy_rows": _cross_entropy_rows,
    "embedding": _embedding,
    "attention": _attention,
}
_BACKWARDS: dict[str, Rule] = {
    **dict.fromkeys(("rms_norm", "layer_norm"), _norm_backward),
    **dict.fromkeys(("activation", "gated_activation"), _elementwise_backward),
    "gated_activation_packed": _packed(_elementwise_backward),
    "linear": _linear_backward,
    "mlp": _mlp_backward,
    "rope": _rope,
    "softmax": _softmax_backward,
    "cross_entropy_rows": _cross_entropy_rows,
    "embedding": _embedding_backward,
    "attention": _attention,
}


def rules() -> dict[str, Rule]:
    """By the name of the op."""
    return {
        **_FORWARDS,
        **{f"{op}_forward": rule for op, rule in _FORWARDS.items()},
        **{f"{op}_backward": rule for op, rule in _BACKWARDS.items()},
    }


_registered: list[bool] = []


def register() -> bool:
    """Gives torch the rules, once, if this process has DTensors at all; whether it has."""
    if _registered:
        return True
    if "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor  # slow to load: only where the process has loaded it
    from torch.distributed.tensor.experimental import register_sharding  # slow to load, as the line above

    _registered.append(True)
    schema_infos = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    for name, rule in rules().items():
        packet = getattr(torch.ops.kernel_pytorch, name)
        for overload in (getattr(packet, one) for one in packet.overloads()):
            register_sharding(overload)(_shardings(overload, rule))
            # torch keeps what it found for a call by its tensors and what follows the first integer; flags count too.
            schema_infos[overload].static_argnum = _first_number(overload)
    return True


# Asked while compilers trace: they take the answer for a constant and leave no call in the graph.
register._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _first_number(overload: Any) -> int:
    tensors = (torch.TensorType.get(), torch.OptionalType.ofTensor(), torch.ListType.ofTensors())
    kinds = [argument.type in tensors for argument in overload._schema.arguments]
    return kinds.index(False) if False in kinds else len(kinds)


def _shardings(overload: Any, rule: Rule) -> Callable[..., list[tuple[list[Any], list[Any]]]]:
    from torch.distributed.tensor import Partial, Replicate, Shard  # slow to load, and only register() asks

    names = [argument.name for argument in overload._schema.arguments]
    defaults = {one.name: one.default_value for one in overload._schema.arguments if one.has_default_value()}
    outputs = [output.name or "output" for output in overload._schema.returns]
    outputs = [_RESULT if name in names else name for name in outputs]
    is_forward = overload._schema.name.endswith("_forward")

    def place(where: Any) -> Any:
        return Replicate() if where is None else Partial() if where is _SUM else Shard(where)

    def shardings(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        given = dict(zip(names, args))  # a compiler leaves out those at the end that are as by default
        ways = [{}, *rule(types.SimpleNamespace(**{**defaults, **given}, is_forward=is_forward))]
        return [
            (
                [place(way.get(name)) for name in outputs],
                [place(way.get(name)) if hasattr(value, "placements") else None for name, value in given.items()],
            )
            for way in ways
        ]

    return shardings


def call_with_rules(call: Callable[..., Any], error: NotImplementedError, args: tuple[Any, ...]) -> Any:
    """The call again, now that torch has the rules; `error` where they were not what it lacked."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None or not any(isinstance(arg, tensor.DTensor) for arg in args):
        raise error
    if "sharding strategy" not in str(error):
        raise error
    if _registered or not register():
        raise NotImplementedError(
            f"{error} kernel_pytorch has no rule for this op on DTensors; call it on their local parts (to_local, or "
            "torch.distributed.tensor.experimental.local_map)"
        ) from error
    return call(*args)
