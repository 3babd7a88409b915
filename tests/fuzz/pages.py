"""Attention over pages, against dense attention in fp64 on the keys that a request sees; the writing of pages, the
merging of parts, and the draw of a token."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch import functional

from .case import Case
from .draw import Draw
from .run import generates

_CODES = {torch.float8_e4m3fn: 4.0, torch.int8: 100.0}  # magnitudes that fill a cache's type


def _caches(
    d: Draw,
    dtype: torch.dtype,
    pages: int,
    page_size: int,
    heads: int,
    size: int,
    value_size: int,
    kept: torch.dtype | None = None,
) -> Any:
    kept = kept or d.choice((dtype, dtype, torch.float8_e4m3fn, torch.int8))
    caches = []
    for columns in (size, value_size):
        cache = d.normal((pages, page_size, heads, columns), torch.float64, _CODES.get(kept, 1.0))
        caches.append((cache.round().clamp(-127, 127) if kept == torch.int8 else cache).to(kept))
    if kept == dtype:
        return *caches, {}
    shape = d.choice(((1,), (heads,), (pages, page_size, heads)))
    small = 1 / _CODES[kept]
    return *caches, {f"{n}_scale": (torch.rand(shape, generator=d.generator) + 0.5) * small for n in ("key", "value")}


@generates("paged_attention")
def paged_attention(d: Draw, name: str) -> Case:
    return ragged_batch(d, d.dtype(double=False))


def ragged_batch(d: Draw, dtype: torch.dtype, kept: torch.dtype | None = None) -> Case:
    """Requests of random lengths over a cache of the type `kept`; None draws one."""
    requests, key_heads, group = d.between(1, 5), d.between(1, 3), d.choice((1, 2, 5, 8))
    size, value_size = d.choice((8, 33, 64, 80)), d.choice((8, 40, 64))
    page_size = d.choice((1, 2, 7, 16, 64, 128, 256))
    longest = d.choice((1, 20, 150, 1200))
    table = -(-longest // page_size)
    pages = max(1, d.between(1, requests * table))
    key_cache, value_cache, scales = _caches(d, dtype, pages, page_size, key_heads, size, value_size, kept)
    lengths = [d.between(0, longest) for _ in range(requests)]
    tables = torch.randint(0, pages, (requests, table), generator=d.generator, dtype=torch.int32)
    if d.maybe(0.3):
        tables[torch.rand(tables.shape, generator=d.generator) < 0.1] = -1
    counts = [d.choice((0, 1, 1, 2, 5, 40)) for _ in range(requests)] if d.maybe() else [d.between(0, 4)] * requests
    options: dict[str, Any] = {"causal": d.maybe(0.8), "batch_invariant": d.maybe(0.3), **scales}
    if len(set(counts)) > 1 or d.maybe(0.3):
        starts = torch.tensor([0, *counts]).cumsum(0)
        options["cu_seqlens_q"] = starts.to(torch.int32)
        options["max_seqlen_q"] = max(counts) + d.between(0, 2)
    heads = key_heads * group
    if d.maybe(0.3):
        options["window"] = (d.between(0, 30), d.choice((-1, 0, 5)))
    if d.maybe(0.2):
        options["softcap"] = d.number(1.0, 30.0)
    if d.maybe(0.3):
        options["sinks"] = d.normal((heads,), torch.float32)
    if d.maybe(0.2):
        options["alibi_slopes"] = d.normal((heads,), torch.float32, 0.1)
    if d.maybe(0.2):
        most = max(max(counts), options.get("max_seqlen_q", 0), 1)
        options["mask"] = torch.rand(requests, most, most, generator=d.generator) < 0.7
    query = d.normal((sum(counts), heads, size), dtype)
    if d.maybe(0.3):
        key_cache, value_cache = (c.transpose(1, 2).contiguous().transpose(1, 2) for c in (key_cache, value_cache))
    args = (query, key_cache, value_cache, tables, torch.tensor(lengths, dtype=torch.int32))
    if d.maybe(0.3):
        which: dict[str, Any] = {one: options[one] for one in ("causal", "window", "cu_seqlens_q") if one in options}
        which |= {
            "heads": heads,
            "key_heads": key_heads,
            "queries": counts[0],
            "policy": d.choice(("fill", "invariant")),
        }
        options["plan"] = functional.plan_decode(args[4], **which, max_requests=requests + d.between(0, 3))
    expected = _dense(query, key_cache, value_cache, tables, lengths, counts, options)
    largest = max(float(expected.abs().max()) if expected.numel() else 0.0, 1.0)

    def check(output: Tensor, case: Case) -> str | None:
        bound = {torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype] * largest
        off = float((output.double() - expected).abs().max()) if output.numel() else 0.0
        return f"a value is off by {off}, {bound} is allowed" if not off <= bound else None

    case = Case(args, options, check=check, gradients=False)
    if d.maybe(0.08):
        way = d.between(0, 2)
        if way == 0:
            case.args, case.refused = (query, key_cache, value_cache, tables.long(), args[4]), "tables are int64"
        elif way == 1:
            case.args, case.refused = (query.double(), *args[1:]), "the query is fp64"
        else:
            case.options["sinks"], case.refused = torch.zeros(heads + 1), "there are more sinks than heads"
    return case


def _dense(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: list[int],
    counts: list[int],
    o: dict[str, Any],
) -> Tensor:
    """One request, one head, one query at a time would be slow: scores of a request at once, as a matrix per head."""
    page_size, key_heads, size = keys.shape[1], keys.shape[2], keys.shape[3]
    group = query.shape[1] // key_heads
    output = torch.zeros(query.shape[0], query.shape[1], values.shape[3], dtype=torch.float64)
    left, right = o.get("window", (-1, -1))
    first = 0
    for r, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        places = torch.arange(length)
        pages = tables[r].long()[places // page_size] if length else torch.zeros(0, dtype=torch.long)
        rows, present = (pages.clamp(min=0), places % page_size), pages >= 0
        k, v = (cache[rows].double() for cache in (keys, values))
        for part, which in (("key_scale", "k"), ("value_scale", "v")):
            if part in o:
                scale = o[part].double()
                scale = scale[rows][..., None] if scale.dim() == 3 else scale.view(1, -1, 1)
                k, v = (k * scale, v) if which == "k" else (k, v * scale)
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", query[first : first + count].double(), k) / math.sqrt(size)
        if "softcap" in o:
            scores = o["softcap"] * torch.tanh(scores / o["softcap"])
        distance = places[None, :] - (length - count + torch.arange(count))[:, None]
        if "alibi_slopes" in o:
            scores = scores - o["alibi_slopes"].double().view(-1, 1, 1) * distance.abs()
        kept = present[None, :].expand(count, length).clone()
        kept &= (distance <= 0) if o["causal"] else torch.ones_like(kept)
        kept &= (distance >= -left) if left >= 0 else torch.ones_like(kept)
        kept &= (distance <= right) if right >= 0 else torch.ones_like(kept)
        if "mask" in o and count:
            new = torch.arange(length) - (length - count)
            kept &= torch.where(new[None, :] >= 0, o["mask"][r][:count, new.clamp(min=0)], True)
        scores = scores.masked_fill(~kept, -math.inf)
        sink = o["sinks"].double().view(-1, 1, 1).expand(-1, count, 1) if "sinks" in o else None
        everything = scores if sink is None else torch.cat([scores, sink], -1)
        weights = torch.softmax(everything, -1).nan_to_num(0.0)[..., :length] if everything.shape[-1] else scores
        output[first : first + count] = torch.einsum("hqk,khd->qhd", weights, v)
        first += count
    return output


@generates("plan_decode")
def plan_decode(d: Draw, name: str) -> Case:
    requests, key_heads, group = d.size(40), d.between(1, 4), d.choice((1, 3, 8, 64))
    lengths = torch.randint(0, 5000, (requests,), generator=d.generator, dtype=torch.int32)
    counts = [d.choice((0, 1, 2, 100)) for _ in range(requests)]
    options: dict[str, Any] = {"heads": key_heads * group, "key_heads": key_heads, "causal": d.maybe()}
    options |= {"policy": d.choice(("fill", "invariant")), "max_requests": requests + d.between(0, 4)}
    window = (-1, -1)
    if d.maybe():
        window = options["window"] = (d.choice((-1, 5, 300)), d.choice((-1, 0, 700)))
    if d.maybe():
        options["cu_seqlens_q"] = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    else:
        counts = [d.between(0, 5)] * requests
        options["queries"] = counts[0] if counts else 1

    def check(plan: Tensor, case: Case) -> str | None:
        numbers = plan.tolist()
        unit, rows = numbers[4], numbers[5]
        if numbers[1:4] != [requests, group, key_heads] or len(numbers) != 9 + options["max_requests"]:
            return f"a header of {numbers[:8]}"
        sides = [2**30 if side < 0 else side for side in window]
        seen = sides[0] + (0 if options["causal"] else sides[1]) + (rows - 1) // group + 2 + unit
        units = 0
        for i in range(requests):
            if numbers[8 + i] != units:
                return f"request {i} begins at {numbers[8 + i]}, {units} units are before it"
            keys = min(int(lengths[i]), seen)
            units += -(-counts[i] * group // rows) * key_heads * max(1, -(-keys // unit))
        return None if numbers[7] == units and set(numbers[8 + requests :]) <= {units} else f"{numbers[7]} units"

    return Case((lengths,), options, check=check, gradients=False)


@generates("mla_decode")
def mla_decode(d: Draw, name: str) -> Case:
    dtype = d.dtype(double=False)
    requests, heads, page_size = d.between(1, 4), d.choice((1, 5, 16, 40)), d.choice((1, 3, 16))
    is_code = d.maybe(0.3)
    size, rope = (128 * d.between(1, 2), d.choice((8, 16))) if is_code else (d.choice((8, 64, 512)), d.choice((8, 64)))
    longest = d.choice((1, 20, 150))
    table = -(-longest // page_size)
    pages = max(1, d.between(1, requests * table))
    latent, columns = d.normal((pages, page_size, size), dtype), d.normal((pages, page_size, rope), dtype)
    cache: Any = torch.cat([latent, columns], -1)
    rows = cache.double()
    if is_code:
        scale = torch.rand(pages, page_size, size // 128, generator=d.generator) + 0.5
        codes = latent.to(torch.float8_e4m3fn)
        parts = (codes, scale, columns)
        cache = torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
        rows = torch.cat([codes.double() * scale.double().repeat_interleave(128, -1), columns.double()], -1)
    lengths = [d.between(0, longest) for _ in range(requests)]
    tables = torch.randint(0, pages, (requests, table), generator=d.generator, dtype=torch.int32)
    if d.maybe(0.3):
        tables[torch.rand(tables.shape, generator=d.generator) < 0.1] = -1
    counts = [d.choice((0, 1, 2, 5)) for _ in range(requests)]
    query = d.normal((sum(counts), heads, size + rope), dtype)
    options: dict[str, Any] = {"head_size_v": size, "causal": d.maybe(0.8), "batch_invariant": d.maybe(0.3)}
    keys = rows[:, :, None]
    expected = _dense(query, keys, keys[..., :size], tables, lengths, counts, options)
    args: tuple[Any, ...] = (query, cache, tables, torch.tensor(lengths, dtype=torch.int32))
    if not options["causal"] and d.maybe():  # the same keys by a list for each token
        places = torch.arange(table * page_size)
        slots = torch.where(tables[:, places // page_size] < 0, -1, tables[:, places // page_size] * page_size)
        slots = torch.where(slots < 0, -1, slots + places % page_size)
        slots = torch.where(places < args[3][:, None], slots, -1).to(torch.int32)
        args = (query, cache)
        options["indices"] = slots.repeat_interleave(torch.tensor(counts), dim=0)
    else:
        options["cu_seqlens_q"] = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        options["max_seqlen_q"] = max(counts)
    largest = max(float(expected.abs().max()) if expected.numel() else 0.0, 1.0)

    def check(output: Tensor, case: Case) -> str | None:
        bound = {torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype] * largest
        off = float((output.double() - expected).abs().max()) if output.numel() else 0.0
        return f"a value is off by {off}, {bound} is allowed" if not off <= bound else None

    return Case(args, options, check=check, gradients=False)


@generates("append_kv")
def append_kv(d: Draw, name: str) -> Case:
    dtype = d.dtype(double=False)
    tokens, heads, page_size = d.size(30), d.between(1, 3), d.choice((1, 4, 16))
    pages = tokens // page_size + 2
    size, value_size = d.between(1, 70), d.between(1, 70)
    key_cache, value_cache, options = _caches(d, dtype, pages, page_size, heads, size, value_size)
    key, value = d.normal((tokens, heads, size), dtype), d.normal((tokens, heads, value_size), dtype)
    slots = torch.randperm(pages * page_size, generator=d.generator)[:tokens]
    slots[torch.rand(tokens, generator=d.generator) < 0.1] = -1
    before = key_cache.clone()
    turned = key.float()
    if size > 1 and d.maybe():
        turned = _turned(d, key, options)

    def check(_: Any, case: Case) -> str | None:
        if not tokens:
            return None
        expected = before.clone().view(pages * page_size, heads, size)
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            rows = turned[token].float()
            if "key_scale" in options:
                scale = options["key_scale"]
                scale = scale.view(pages * page_size, heads)[slot] if scale.dim() == 3 else scale
                rows = rows / scale.view(-1, 1)
            wide = rows.round().clamp(-128, 127) if before.dtype == torch.int8 else rows.clamp(-448, 448)
            expected[slot] = (wide if "key_scale" in options else rows).to(before.dtype)
        same = torch.equal(case.args[2].view(torch.uint8), expected.view_as(before).view(torch.uint8))
        return None if same else "the key cache holds other rows"

    return Case((key, value, key_cache, value_cache, slots), options, check=check, gradients=False)


def _turned(d: Draw, key: Tensor, options: dict[str, Any]) -> Tensor:
    """Keys turned in the op's own arithmetic: products in fp64 are exact, so that each fp32 is rounded as there."""
    tokens, size = key.shape[0], key.shape[2]
    pairs = d.between(1, size // 2)
    is_twice, interleaved = d.maybe(), d.maybe()
    rows = tokens + d.between(0, 3)
    angles = d.normal((rows, pairs), torch.float32, 3.0)
    tables = [angles.cos(), angles.sin()]
    if d.maybe(0.3) and key.dtype != torch.float32:
        tables = [table.to(key.dtype) for table in tables]
    cos, sin = tables
    if is_twice:
        cos, sin = ((t.repeat_interleave(2, 1) if interleaved else torch.cat([t, t], 1)) for t in tables)
    options |= {"cos": cos, "sin": sin, "interleaved": interleaved, "rotary_dim": 2 * pairs}
    places = torch.arange(tokens)
    if d.maybe():
        places = torch.randint(0, max(rows, 1), (tokens,), generator=d.generator)
        options["positions"] = places.to(d.choice((torch.int32, torch.int64)))
    c, s = (t[places][:, None].double() for t in tables)
    wide = key.double()
    columns = torch.arange(pairs)
    first = 2 * columns if interleaved else columns
    second = first + 1 if interleaved else columns + pairs
    a, b = wide[..., first], wide[..., second]
    turned = key.float().clone()
    turned[..., first] = (a * c - (b * s).float().double()).float()
    turned[..., second] = (b * c + (a * s).float().double()).float()
    return turned


@generates("merge_attention")
def merge_attention(d: Draw, name: str) -> Case:
    dtype = d.dtype(double=False)
    tokens, heads, size = d.size(20), d.between(1, 4), d.between(1, 140)
    outputs = [d.normal((tokens, heads, size), dtype) for _ in range(2)]
    sums = [d.normal((heads, tokens), torch.float32, d.choice((1.0, 30.0))) for _ in range(2)]
    for lse, output in zip(sums, outputs):
        empty = torch.rand(lse.shape, generator=d.generator) < 0.2
        lse[empty] = -math.inf
        output[empty.T] = math.nan
    if d.maybe(0.3):
        sums[1] = sums[1].T.contiguous().T
    lse = torch.logaddexp(sums[0].double(), sums[1].double())
    weights = [torch.where(one == -math.inf, 0.0, torch.exp(one.double() - lse)).T[..., None] for one in sums]
    parts = [torch.where(w == 0, 0.0, w * o.double()) for w, o in zip(weights, outputs)]
    expected = parts[0] + parts[1]

    def check(found: Any, case: Case) -> str | None:
        output, merged = found
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}[dtype]
        if not torch.allclose(output.double(), expected, atol=tolerance, rtol=tolerance):
            return f"off by {(output.double() - expected).abs().max()}"
        return None if torch.allclose(merged.double(), lse, atol=1e-5, rtol=1e-5) else "another lse"

    return Case((outputs[0], sums[0], outputs[1], sums[1]), {}, check=check, gradients=False)


@generates("sample")
def sample(d: Draw, name: str) -> Case:
    """Against what the limits keep, sorted in fp64, with a margin where a sum is close to its limit."""
    dtype = d.dtype(double=False)
    rows, vocabulary = d.between(1, 6), d.choice((1, 7, 100, 3000))
    logits = d.normal((rows, vocabulary), dtype, d.choice((0.5, 4.0)))
    each = lambda low, high: torch.rand(rows, generator=d.generator) * (high - low) + low  # noqa: E731
    options: dict[str, Any] = {"seeds": torch.randint(0, 2**60, (rows,), generator=d.generator)}
    options["temperature"] = each(0.1, 2.0) * (torch.rand(rows, generator=d.generator) < 0.8)
    if d.maybe():
        options["top_k"] = torch.randint(0, 20, (rows,), generator=d.generator, dtype=torch.int32)
    if d.maybe():
        options["top_p"] = each(0.0, 1.1)
    if d.maybe():
        options["min_p"] = each(0.0, 0.3)
    if d.maybe():
        options["positions"] = d.between(0, 1000)

    def check(tokens: Any, case: Case) -> str | None:
        for row, token in enumerate(tokens.tolist()):
            values = logits[row].double()
            if options["temperature"][row] == 0:
                if token != int(values.argmax()):
                    return f"row {row} is greedy: {token}"
                continue
            if not _may_be_drawn(values / options["temperature"][row], token, row, options):
                return f"row {row}: token {token} is not among the kept ones"
        return None

    return Case((logits,), options, check=check, gradients=False)


def _may_be_drawn(scores: Tensor, token: int, row: int, options: dict[str, Any]) -> bool:
    shares = torch.softmax(scores, 0)
    k = int(options["top_k"][row]) if "top_k" in options else 0
    if k > 0 and int((scores > scores[token]).sum()) >= k:
        return False
    kept = shares.clone()
    if 0 < k < len(kept):
        kept[scores < scores.topk(k).values[-1]] = 0
    above = float(kept[scores > scores[token]].sum() / kept.sum())
    if "top_p" in options and options["top_p"][row] < 1 and above > float(options["top_p"][row]) + 1e-4:
        return False
    return "min_p" not in options or bool(shares[token] / shares.max() >= options["min_p"][row] - 1e-5)
