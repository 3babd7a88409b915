"""Attention on our kernel, scaled_dot_product_attention or written out: masks as options, and grouped heads without
copies of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from ..._ops.attention import AttentionOptions
from ..._ops.support.casting import torch_allows_tf32
from ..canonical import writes_between
from ..masks import Fold, fold
from ..model import Candidate, Match, Refusal, Region
from ..nodes import (
    FLOATS,
    VIEWS,
    Emitter,
    Node,
    argument,
    aten,
    dtype,
    inputs_of,
    is_call,
    same,
    same_shape,
    shape,
    value,
)
from .written_attention import Attention, written

_SDPA = aten.scaled_dot_product_attention.default
_LARGEST_SEED = 2**62  # of torch's generator, so that torch.manual_seed governs it


def find(region: Region) -> Iterator[Match | Refusal]:
    for node in list(region.graph.nodes):
        if is_call(node, _SDPA):
            problem = _problem_of_call(node)
            query, key, value_node = node.args[:3]
            mask, is_causal = argument(node, 3, "attn_mask"), bool(argument(node, 5, "is_causal", False))
            dropout = argument(node, 4, "dropout_p", 0.0)
            found = Attention(query, key, value_node, mask, is_causal, argument(node, 6, "scale"), [node], dropout)
            yield Refusal("attention", node, problem) if problem else _match(region, found)
        elif (written_out := written(node)) is not None:
            yield _match(region, written_out)


def _match(region: Region, found: Attention) -> Match | Refusal:
    query, key, value_node, mask, is_causal, scale = found[:6]
    output = found.nodes[-1]
    problem = _problem(found)
    if problem:
        return Refusal("attention", output, problem)
    plain_key, key_nodes = _unrepeated(key, shape(query)[1])
    plain_value, value_nodes = _unrepeated(value_node, shape(query)[1])
    if not same(shape(plain_key)[1], shape(plain_value)[1]):
        plain_key, plain_value, key_nodes, value_nodes = key, value_node, [], []
    nodes = [*key_nodes, *value_nodes, *found.nodes]
    emit = _Call(query, plain_key, plain_value, scale, found.dropout)
    is_random = found.dropout != 0.0
    if mask is None:
        options = {"causal": is_causal, "causal_offset": 0 if is_causal else None}
        ours = Candidate("ours", emit.ours(options))
        return Match("attention", nodes, [output], [ours], "causal" * is_causal, is_random=is_random)
    candidates, detail = _masked(region, emit, mask, nodes)
    match = Match("attention", nodes, [output], candidates, detail, derived=(mask,), is_random=is_random)
    match.derived = (mask, *(one for candidate in candidates for one in candidate.reads))
    keys, queries = value(key).shape[2], value(query).shape[2]
    folded = region.folded.get(mask, (None,))[0]
    match.key = str((folded.causal, folded.offset, folded.left)) if isinstance(folded, Fold) else ""
    for base in () if not isinstance(folded, Fold) else filter(None, (folded.base, (folded.length or (None,))[0])):
        match.leaf_values[base] = _hint(keys) - _hint(queries)
    return match


def _problem_of_call(node: Node) -> str:
    dropout = argument(node, 4, "dropout_p", 0.0)
    if not isinstance(dropout, float | int) or not 0.0 <= dropout < 1.0:
        return f"dropout of {dropout}"
    if not isinstance(argument(node, 6, "scale", 1.0), float | int | None):
        return "a scale that is no number"
    if argument(node, 3, "attn_mask") is not None and argument(node, 5, "is_causal", False):
        return "a mask and is_causal"
    return ""


def _problem(found: Attention) -> str:
    query, key, value_node = found[:3]
    if any(len(shape(one)) != 4 for one in (query, key, value_node)):
        return "not four dimensions"
    kind = dtype(query)
    if kind not in FLOATS or any(dtype(one) is not kind for one in (key, value_node, found.nodes[-1])):
        return f"types {dtype(query)}, {dtype(key)}, {dtype(value_node)}"
    if not all(same(shape(one)[0], shape(query)[0]) for one in (key, value_node)):
        return "batches differ"
    return ""


def _unrepeated(node: Node, heads: Any) -> tuple[Node, list[Node]]:
    """Keys or values before each head was repeated for the query heads that read it, and the nodes that do so."""
    walked, one = [], node
    while is_call(one, *VIEWS, aten.clone.default, aten.contiguous.default):
        walked.append(one)
        one = one.args[0]
    if not walked or not is_call(one, aten.expand.default) or len(shape(one)) != 5:
        return node, []
    inner = one.args[0]
    if not is_call(inner, aten.unsqueeze.default) or inner.args[1] not in (2, -3):
        return node, []
    source = inner.args[0]
    fits = len(shape(source)) == 4 and same_shape(shape(source)[2:], shape(node)[2:])
    if not fits or not same(shape(node)[1], heads) or not same(shape(one)[1], shape(source)[1]):
        return node, []
    nodes = [inner, one, *reversed(walked)]
    if any(user not in nodes for part in nodes[:-1] for user in part.users) or len(node.users) != 1:
        nodes = []  # others read the copies as well: they stay
    return source, nodes


def _masked(region: Region, emit: _Call, mask: Node, nodes: Sequence[Node]) -> tuple[list[Candidate], str]:
    kept_bias = value(mask).dtype is not torch.bool
    as_it_is = {"bias": mask} if kept_bias else {"mask": mask}
    kept = Candidate("ours, mask kept", emit.ours(as_it_is), otherwise=True)
    if kept_bias:
        return [kept], "mask of numbers kept"
    if mask not in region.folded:
        region.folded[mask] = _emitted(region, mask, fold(region.reader, mask), emit)
    found, options = region.folded[mask]
    if isinstance(found, str):
        return [kept], f"mask kept: {found}"
    reads = tuple(one for one in options.values() if isinstance(one, fx.Node))
    candidates = [Candidate(f"ours, {found.text}", emit.ours(options), reads), kept]
    if found.is_plainly_causal or found.keeps_everything:
        candidates.insert(1, Candidate(f"torch, {found.text}", emit.torch(found.causal)))
    return candidates, found.text


def _emitted(region: Region, mask: Node, found: Fold | str, emit: _Call) -> tuple[Fold | str, dict[str, Any]]:
    """The options of attention that say the same as the mask; tensors among them are computed where the mask is."""
    if isinstance(found, str):
        return found, {}
    queries, keys = shape(emit.query)[2], shape(emit.key)[2]
    options: dict[str, Any] = {"causal": found.causal, "window_left": found.left}
    if found.is_band:
        right = int(found.offset)
        options = {"causal_offset": 0, "window_left": found.left - right, "window_right": right}
    elif found.causal and found.base is None:
        offset = _offset(found.offset, queries, keys)
        if isinstance(offset, str):
            return offset, {}
        options["causal_offset"] = offset
    if found.base is None and not found.has_extras:
        return found, options
    if writes_between([*_ancestors(mask), mask], region.graph):
        return "what the mask is made of changes in between", {}
    with region.graph.inserting_before(mask.next):
        add = Emitter(region.graph, region.mode, False)
        if found.length is not None or found.base is not None:
            if not isinstance(queries, int) or (found.base is not None and not found.offset.is_Integer):
                return "lengths of keys with symbolic sizes", {}
            base, more = found.length or (found.base, int(found.offset) + queries)
            options["key_lengths"] = _lengths(add, base, more, mask)
        for one in found.padding:
            options["mask"] = add.call(aten.logical_and.default, options["mask"], one) if "mask" in options else one
    return found, options


def _lengths(add: Emitter, base: Any, more: int, mask: Node) -> Node:
    one = add.call(aten.add.Tensor, base, more)
    one = add.call(aten.to.dtype, add.call(aten.reshape.default, one, [1]), torch.int32)
    batch = shape(mask)[0]
    if not isinstance(batch, int):
        return add.call(aten.clone.default, add.call(aten.expand.default, one, [add.call(aten.sym_size.int, mask, 0)]))
    return add.call(aten.clone.default, add.call(aten.expand.default, one, [batch]))


def _offset(offset: Any, queries: Any, keys: Any) -> int | str | None:
    """The number, or None where it aligns the ends (keys - queries)."""
    if offset.is_Integer:
        return int(offset)

    def expression(size: Any) -> Any:
        return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)

    return None if sympy.expand(expression(keys) - expression(queries) - offset) == 0 else "an offset of symbolic size"


def _ancestors(node: Node) -> list[Node]:
    found: dict[Node, None] = {}
    queue = inputs_of([node])
    while queue:
        one = queue.pop()
        if one.op != "placeholder" and one not in found:
            found[one] = None
            queue.extend(one.all_input_nodes)
    return list(found)


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


class _Call:
    """The two ways to attend, with what they share."""

    def __init__(self, query: Node, key: Node, value_node: Node, scale: Any, dropout: float) -> None:
        self.query, self.key, self.value, self.scale, self.dropout = query, key, value_node, scale, dropout

    def ours(self, given: dict[str, Any]) -> Any:
        def emit(add: Emitter, at: Callable[[Node], Node]) -> list[Node]:
            tf32 = value(self.query).is_cuda and dtype(self.query) is torch.float32 and torch_allows_tf32()
            options = {name: at(one) if isinstance(one, fx.Node) else one for name, one in given.items()}
            options = AttentionOptions(
                **{
                    "heads_first": True,
                    "scale": self.scale,
                    "deterministic": torch.are_deterministic_algorithms_enabled(),
                    "allow_tf32": tf32,
                    **options,
                }
            )
            if self.dropout and not add.without_dropout:
                device = value(self.query).device
                seed = add.call(aten.randint.low, 0, _LARGEST_SEED, [2], dtype=torch.int64, device=device)
                options = options._replace(dropout_p=float(self.dropout), seed=seed)
            operands = [at(one) for one in (self.query, self.key, self.value)]
            return add.op("attention", *operands, *_without_tuples(options), False)[:1]

        return emit

    def torch(self, is_causal: bool) -> Any:
        grouped = not same(shape(self.query)[1], shape(self.key)[1])

        def emit(add: Emitter, at: Callable[[Node], Node]) -> list[Node]:
            operands = [at(one) for one in (self.query, self.key, self.value)]
            dropout = 0.0 if add.without_dropout else self.dropout
            return [add.call(_SDPA, *operands, None, dropout, is_causal, scale=self.scale, enable_gqa=grouped)]

        return emit


def _without_tuples(options: Any) -> list[Any]:
    return [list(one) if isinstance(one, tuple) else one for one in options]
