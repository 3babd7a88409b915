"""Lists of blocks: from maps, from scores, and from queries and keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch import functional as F

from .case import Case
from .draw import Draw
from .run import generates


def check_lists(lists: F.BlockLists, wanted: Tensor | None, has_gradients: bool) -> str | None:
    """Indices ascend, zeros follow, the transposed lists are those of the same map."""
    counts, indices = lists.kv_num_blocks, lists.kv_indices
    found = lists.block_map()
    if wanted is not None and not torch.equal(found, wanted):
        return "the lists are not those of the map"
    for count, row in zip(counts.flatten().tolist(), indices.flatten(0, -2).tolist()):
        if row[:count] != sorted(set(row[:count])) or any(row[count:]):
            return f"a row of {count} is {row}"
    if (lists.q_num_blocks is not None) != has_gradients:
        return "gradients was not heeded"
    if has_gradients and lists.full_kv_num_blocks is None:
        back = F.BlockLists(lists.q_num_blocks, lists.q_indices, *(None,) * 6, lists.BLOCK_SIZE)
        if not torch.equal(back.block_map().transpose(-1, -2), found):
            return "the transposed lists are of another map"
    return None


@generates("block_lists")
def block_lists(d: Draw, name: str) -> Case:
    shape = [d.size(3), d.size(3), d.size(20), d.size(20)]
    kinds = d.maybe(0.4)
    blocks = d.integers(shape, 0, 3, torch.int8) if kinds else d.booleans(shape, 0.5)
    size = d.choice((1, 16, 128, (64, 128), 2**20))
    gradients = d.maybe(0.7)
    case = Case((blocks, size), {"gradients": gradients}, gradients=False, names=("block_list",))
    case.check = lambda lists, case: check_lists(lists, blocks != 0, gradients)
    if d.maybe(0.12):
        if d.maybe():
            case.args, case.refused = (blocks, d.choice((0, -5, (0, 8), (8, -1)))), "a block has no size"
        else:
            case.args, case.refused = (blocks[0] if shape[0] else blocks.float(), size), "the map has three dimensions"
            if not shape[0]:
                case.refused = "the map is of floats"
    return case


def _selection(d: Draw, queries: int, keys: int) -> dict[str, Any]:
    return {
        "sparsity": d.choice((0.0, 0.5, 0.9, 1.0)),
        "block_size": d.choice((4, 16, (8, 16), 64)),
        "causal": d.maybe(0.4),
        "causal_offset": d.choice((None, None, 0, keys - queries)),
        "sinks": d.choice((0, 1, 3, 2**40)),
        "local": d.choice((0, 1, 3, 2**40)),
        "threshold": d.choice((None, None, 0.0)),
        "gradients": d.maybe(0.7),
    }


def _places(options: dict[str, Any], queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Of blocks [rows, columns]: visible by causality; and kept whatever their scores (their own and sinks)."""
    size = options["block_size"]
    of_query, of_key = (size, size) if isinstance(size, int) else size
    rows, columns = -(-queries // of_query), -(-keys // of_key)
    offset = keys - queries if options["causal_offset"] is None else options["causal_offset"]
    visible = torch.ones(rows, columns, dtype=torch.bool)
    if options["causal"]:
        last = torch.minimum((torch.arange(rows) + 1) * of_query, torch.tensor(queries)) - 1 + offset
        visible = torch.arange(columns)[None] * of_key <= last[:, None]
    first = torch.arange(columns)[None] < min(options["sinks"], columns)
    return visible, visible & first


def _check_selection(options: dict[str, Any], queries: int, keys: int, scores: Tensor | None) -> Any:
    def check(lists: F.BlockLists, case: Case) -> str | None:
        if wrong := check_lists(lists, None, options["gradients"]):
            return wrong
        found = lists.block_map()
        visible, forced = _places(options, queries, keys)
        if bool((found & ~visible).any()):
            return "a block that causality hides is listed"
        if bool((forced & ~found).any()):
            return "a first block is not listed"
        if options["sparsity"] == 0.0 and options["threshold"] is None and bool((visible & ~found).any()):
            return "sparsity 0 leaves a block out"
        return None

    return check


def _spoil(d: Draw, case: Case) -> Case:
    if not d.maybe(0.12):
        return case
    way = d.between(0, 3)
    if way == 0:
        case.options["sparsity"], case.refused = d.choice((-0.1, 1.5, float("nan"))), "sparsity is no share"
    elif way == 1:
        case.options["block_size"], case.refused = d.choice((0, -4)), "a block has no size"
    elif way == 2:
        case.options["sinks"], case.refused = -1, "sinks are fewer than none"
    else:
        case.options["local"], case.refused = -1, "local is less than none"
    return case


@generates("select_by_scores")
def select_by_scores(d: Draw, name: str) -> Case:
    queries, keys = d.size(200), d.size(200)
    options = _selection(d, queries, keys)
    visible, _ = _places(options, queries, keys)
    scores = d.tensor([d.size(3), d.size(3), *visible.shape], d.dtype())
    check = _check_selection(options, queries, keys, scores)
    names = ("block_select", "select_blocks")
    case = Case((scores, queries, keys), options, check=check, gradients=False, names=names)
    if d.maybe(0.05):
        case.args, case.refused = (d.tensor(d.wrong_size(list(scores.shape)), torch.float32), queries, keys), None
        case.check = None
        return case
    return _spoil(d, case)


@generates("select_blocks")
def select_blocks(d: Draw, name: str) -> Case:
    queries, keys, size, dtype = d.size(200), d.size(200), d.size(40, empty=0.0), d.dtype()
    batch, heads = d.size(3), d.size(3, empty=0.0)
    options = {**_selection(d, queries, keys), "layout": d.choice(("bhsd", "bshd")), "key_parts": d.choice((1, 2, 4))}

    def tensor(count: int, length: int) -> Tensor:
        shape = [batch, count, length, size] if options["layout"] == "bhsd" else [batch, length, count, size]
        return d.tensor(shape, dtype)

    check = _check_selection(options, queries, keys, None)
    names = ("block_select", "select_blocks", "mean_pool")
    case = Case((tensor(heads * d.choice((1, 2)), queries), tensor(heads, keys)), options, check=check, names=names)
    case.gradients = False
    if d.maybe(0.05):
        case.options["key_parts"], case.refused = d.choice((0, -1, 7)), "parts do not divide a block"
        return case
    if d.maybe(0.04):
        case.options["layout"], case.refused = "sbhd", "the layout is unknown"
        return case
    return _spoil(d, case)
