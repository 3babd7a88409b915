"""How the ops run on DTensors: for each op, the dimensions along which its tensors may be cut over a mesh.

A cut names dimensions of the op's list of fields (ops/<op>/<op>.h). A tensor that has one of them is cut there; an
output that has none is a part of a sum; an argument that has none is replicated, as everything is in the way that every
op has. torch takes the way that moves least. Rows are free, what is normalised over is whole, a product is cut by
columns or by the dimension of its sum, attention by batch or heads. Rules are made known to torch on the first call
with a DTensor (see call_with_rules): nothing here imports torch.distributed before.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ..._shape_rules import declared, outputs_of, picked_shape


class Cut(NamedTuple):
    """One way of an op: its tensors are cut along these dimensions, which belong together."""

    dimensions: str  # "...": each of the dimensions in front by itself
    added: str = ""  # arguments of the forward that are added to the sum: parts of it as well
    whole: str = ""  # outputs that do not depend on these dimensions
    kept: int = 0  # so many dimensions at the end of "..." are not cut


Rule = Callable[[Any], Iterable[Cut]]
_ROWS = Cut("...")


def _can_cut_columns(a: Any, weight: Any) -> bool:
    """Pairs of gate and up stay together."""
    return not a.gated or weight.shape[0] % (2 * weight.mesh.size()) == 0


def _linear(a: Any) -> Iterator[Cut]:
    yield _ROWS
    if _can_cut_columns(a, a.weight):
        yield Cut("out")
    if not a.gated and a.activation == "identity":
        yield Cut("in", added="bias residual", whole="grad_bias")


def _mlp(a: Any) -> Iterator[Cut]:
    yield _ROWS
    if _can_cut_columns(a, a.weight_in):
        yield Cut("inner hidden", added="bias_out residual", whole="grad_bias_out")


def _rope(a: Any) -> Iterator[Cut]:
    query = a.query if hasattr(a, "query") else a.grad_query
    yield Cut("heads")
    if query.ndim == 4:
        yield Cut("batch")
    if a.positions is not None:
        has_one_table = a.cos is None or a.cos.ndim == 2
    else:
        has_one_table = a.cos is not None and a.cos.shape[-2] == query.shape[-2 if a.heads_first else -3]
    if has_one_table:
        yield Cut("sequence")


def _attention(a: Any) -> Iterator[Cut]:
    """Batch or heads: whatever tells them apart (programs that count them, dropout, lists of blocks) keeps it whole."""
    if a.blocks or a.captured:
        raise NotImplementedError(
            "kernel_pytorch.attention: DTensors cannot have block masks or captured tensors; call it on their local "
            "parts (to_local, or torch.distributed.tensor.experimental.local_map)"
        )
    if a.score_mod or a.mask_mod or a.seed is not None:
        return
    is_packed = a.query.ndim == 3
    heads, members = 1 if a.heads_first or is_packed else 2, a.query.mesh.size()
    if a.query.shape[heads] % members == 0 and a.key.shape[heads] % members == 0:
        yield Cut("heads key_heads")
    if not is_packed:
        yield Cut("batch")


def _native_sparse_attention(a: Any) -> Iterator[Cut]:
    members = a.query.mesh.size()
    if a.query.shape[2] % members == 0 and a.key.shape[2] % members == 0:
        yield Cut("heads key_heads")
    if a.cu_seqlens is None:
        yield Cut("batch")


_NORMS = ("rms_norm", "add_rms_norm", "rms_norm_activation", "layer_norm", "add_layer_norm", "layer_norm_activation")
# By the op's name, of its forward and backward too. Dropout counts elements of the whole, so it is not split.
_RULES: dict[str, Rule] = {
    **dict.fromkeys((*_NORMS, "cross_entropy_rows"), lambda a: [_ROWS]),
    **dict.fromkeys(
        ("activation", "gated_activation"), lambda a: [] if a.seed is not None else [_ROWS, Cut("columns")]
    ),
    "gated_activation_packed": lambda a: [] if a.seed is not None else [_ROWS],
    "linear": _linear,
    "mlp": _mlp,
    "matmul": lambda a: [_ROWS, Cut("m"), Cut("n"), Cut("k")],
    "rope": _rope,
    "softmax": lambda a: [Cut("...", kept=1 if getattr(a, "causal", False) else 0)],
    "cross_entropy": lambda a: [] if a.mean else [_ROWS],  # the divisor of a mean is that of the whole
    "embedding": lambda a: [_ROWS, Cut("columns")],
    "attention": _attention,
    "native_sparse_attention": _native_sparse_attention,
}


def rules() -> dict[str, Rule]:
    """By the name of the op."""
    all_rules = {f"{op}{suffix}": rule for op, rule in _RULES.items() for suffix in ("", "_forward", "_backward")}
    return {op: rule for op, rule in all_rules.items() if op in declared()}


def _broadcast_words(name: str, a: Any) -> str:
    """The dimensions of a tensor whose shape its list has not: those in front may be missing, or 1 for all."""
    if name in ("query", "key", "grad_query", "grad_key"):
        return "batch heads sequence size" if a.heads_first else "batch sequence heads size"
    if name in ("cos", "sin"):
        return "batch sequence width" if a.positions is None else "batch rows width"
    return {
        "bias": "batch heads queries keys",
        "mask": "batch heads queries keys",
        "alibi_slopes": "batch heads",
        "query_segment_ids": "batch queries",
        "key_segment_ids": "batch keys",
        "key_lengths": "batch",
        "positions": "batch sequence",
    }.get(name, "")


class _Dimensions(NamedTuple):
    """A tensor of a call: the words of its shape, its sizes, and whether those of 1 are for all."""

    words: list[Any]
    sizes: tuple[int, ...]
    broadcasts: bool

    def place(self, names: list[str], row: int) -> int | None:
        """Where one of these dimensions is; of "...", the one with this number."""
        if "..." in names:
            return row if "..." in self.words else None
        words = [word.split("/")[0] if isinstance(word, str) else word for word in self.words]
        found = (len(self.sizes) - len(words) + i for i, word in enumerate(words) if word in names)
        return next((at for at in found if at >= 0 and not (self.broadcasts and self.sizes[at] == 1)), None)


def ways(op: str, rule: Rule, values: dict[str, Any]) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Where the outputs and the arguments are cut: dimensions, "sum" for parts of one, None for the whole."""
    declaration, a = declared()[op], types.SimpleNamespace(**values)
    choices = {one["name"]: one["choices"].split() for one in declaration["arguments"] if "choices" in one}

    def dimensions(field: dict[str, Any], sizes: tuple[int, ...]) -> _Dimensions:
        if "shapes" in field:
            return _Dimensions(picked_shape(field, values, choices), sizes, False)
        return _Dimensions(_broadcast_words(field.get("like", field["name"]), a).split(), sizes, True)

    arguments = {
        one["name"]: dimensions(one, tuple(values[one["name"]].shape))
        for one in declaration["arguments"]
        if hasattr(values[one["name"]], "shape")
    }
    outputs = [
        None if output.shape is None else arguments.get(field.get("like")) or dimensions(field, output.shape)
        for field, output in zip(declaration["outputs"], outputs_of(op, values, lambda _: "fp32"), strict=True)
    ]
    rows = next((len(one.sizes) + 1 - len(one.words) for one in arguments.values() if "..." in one.words), 0)
    for cut in rule(a):
        names, whole = cut.dimensions.split(), cut.whole.split()
        added = [] if op.endswith("_backward") else cut.added.split()
        for row in range(rows - cut.kept if names == ["..."] else 1):
            of_arguments = {name: "sum" if name in added else one.place(names, row) for name, one in arguments.items()}
            of_outputs: list[Any] = []
            for field, one in zip(declaration["outputs"], outputs, strict=True):
                at = None if one is None else one.place(names, row)
                is_sum = at is None and one is not None and 0 not in one.sizes and field["name"] not in whole
                of_outputs.append("sum" if is_sum else at)
            yield of_outputs, of_arguments


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

    op = overload._schema.name.split("::")[1]
    defaults = {one.name: one.default_value for one in overload._schema.arguments}

    def place(where: Any) -> Any:
        return Replicate() if where is None else Partial() if where == "sum" else Shard(where)

    def shardings(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        given = dict(zip(defaults, args))  # a compiler leaves out those at the end that are as by default
        whole: tuple[list[Any], dict[str, Any]] = [None] * len(overload._schema.returns), {}
        return [
            (
                [place(where) for where in of_outputs],
                [place(cuts.get(name)) if hasattr(value, "placements") else None for name, value in given.items()],
            )
            for of_outputs, cuts in [whole, *ways(op, rule, {**defaults, **given})]
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
