"""What broke kernels of others, one by one (next to random calls, tests/fuzz), and plans of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fuzz.ragged import CACHES, findings
from torch import Tensor

import kernel_pytorch
from kernel_pytorch import functional


def integers(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def caches(pages: int, page_size: int, heads: int = 2, size: int = 32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(pages)
    return [torch.randn(pages, page_size, heads, size, generator=generator) for _ in range(2)]


def dense(query: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """[queries, heads, size] over [keys, key heads, size] in fp64: the output and the natural log of the sums."""
    k, v = (t.double().repeat_interleave(query.shape[1] // keys.shape[1], 1) for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), k) * query.shape[2] ** -0.5
    scores = scores.masked_fill(~keep, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize("cache", CACHES)
def test_random_ragged_batches(cache: str) -> None:
    assert findings(cache, 25) == []


@pytest.mark.parametrize("page_size", [1, 16, 64, 128, 256])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_sizes_of_pages_and_natural_logarithms(page_size: int, layout: str) -> None:
    length = 300
    table = -(-length // page_size)
    keys, values = caches(2 * table, page_size)
    tables = torch.randperm(2 * table)[:table].to(torch.int32)[None]
    query = torch.randn(3, 4, 32)
    given = [c.transpose(1, 2).contiguous() if layout == "hnd" else c for c in (keys, values)]
    found, lse = functional.paged_attention(
        query, *given, tables, integers(length), cache_layout=layout, return_lse=True
    )
    rows = [c[tables[0].long()].reshape(-1, 2, 32)[:length] for c in (keys, values)]
    keep = torch.arange(length) <= torch.arange(length - 3, length)[:, None]
    expected, logs = dense(query, *rows, keep)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse.double(), logs, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kept", [torch.float32, torch.float8_e4m3fn])
def test_poison_behind_the_last_key_and_in_pages_that_nobody_has(causal: bool, kept: torch.dtype) -> None:
    keys, values = (c.to(kept) for c in caches(6, 16))
    query, tables = torch.randn(6, 4, 32), integers([1, 4, -1], [-1, -1, -1], [4, -1, 5])
    lengths = integers(21, 0, 40)
    expected = functional.paged_attention(query, keys, values, tables, lengths, causal=causal)
    for cache in (keys, values):
        bits = cache.view(torch.uint8) if kept != torch.float32 else cache
        poison = 0x7F if kept != torch.float32 else torch.nan
        for page in (0, 2, 3):
            bits[page] = poison
        bits[5, 8:] = poison  # of the last request's third page, 8 keys count
    found, lse = functional.paged_attention(query, keys, values, tables, lengths, causal=causal, return_lse=True)
    assert torch.equal(found, expected) and not found[2:4].any() and bool(torch.isneginf(lse[:, 2:4]).all())


def test_a_window_counts_from_each_draft_and_keeps_no_key_more() -> None:
    keys, values = caches(3, 16)
    query, length = torch.randn(4, 4, 32), 40
    found = functional.paged_attention(query, keys, values, integers([0, 1, 2]), integers(length), window=(6, 0))
    place, position = torch.arange(length), torch.arange(length - 4, length)[:, None]
    rows = [c.reshape(-1, 2, 32)[:length] for c in (keys, values)]
    expected, _ = dense(query, *rows, (place <= position) & (place >= position - 6))
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=2e-6)


def test_more_new_tokens_than_keys_and_a_window_to_the_right() -> None:
    keys, values = caches(1, 16)
    query, length = torch.randn(6, 4, 32), 2
    found = functional.paged_attention(
        query, keys, values, integers([0]), integers(length), causal=False, window=(10, 3)
    )
    distance = torch.arange(length) - torch.arange(length - 6, length)[:, None]
    expected, _ = dense(query, *(c.reshape(-1, 2, 32)[:length] for c in (keys, values)), distance <= 3)
    torch.testing.assert_close(found.double(), expected.nan_to_num(0.0), atol=2e-6, rtol=2e-6)
    assert not found[0].any() and found[1].any()  # at -4, whose window ends before the first key, and at -3


def test_drafts_that_form_a_tree_see_their_branch_alone() -> None:
    keys, values = caches(2, 16)
    query, length = torch.randn(4, 4, 32), 20
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    found = functional.paged_attention(
        query, keys, values, integers([0, 1]), integers(length), mask=tree[None], causal=False
    )
    rows = [c.reshape(-1, 2, 32)[:length] for c in (keys, values)]
    expected, _ = dense(query, *rows, torch.cat([torch.ones(4, 16, dtype=torch.bool), tree], 1))
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=2e-6)


def test_a_tree_mask_covers_every_request() -> None:
    keys, values = caches(2, 16)
    lengths, offsets = torch.tensor([9, 9], dtype=torch.int32), torch.tensor([0, 1, 4], dtype=torch.int32)
    tables = torch.tensor([[0], [1]], dtype=torch.int32)
    tree = torch.ones(2, 2, 2, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="mask is of 2 queries, request 1 has 3"):
        functional.paged_attention(
            torch.randn(4, 4, 32), keys, values, tables, lengths, cu_seqlens_q=offsets, mask=tree, causal=False
        )


def test_sinks_count_once_where_keys_are_split_and_in_codes() -> None:
    keys, values = (c.to(torch.float8_e4m3fn) for c in caches(40, 64))
    query, sinks, length = torch.randn(1, 4, 32), torch.randn(4) + 6, 2500
    tables = torch.arange(40, dtype=torch.int32)[None]
    found, lse = functional.paged_attention(
        query, keys, values, tables, integers(length), sinks=sinks, key_scale=0.5, value_scale=2.0, return_lse=True
    )
    rows = [c.float().reshape(-1, 2, 32)[:length] for c in (keys, values)]
    plain, logs = dense(query, rows[0] * 0.5, rows[1] * 2, torch.ones(1, length, dtype=torch.bool))
    whole = torch.logaddexp(logs, sinks.double()[:, None])
    torch.testing.assert_close(lse.double(), whole, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(found.double(), plain * torch.exp(logs - whole).T[..., None], atol=2e-6, rtol=2e-6)


def test_pages_beyond_two_to_the_31_elements() -> None:
    pages, page_size, size = 2**14 + 2, 1024, 128
    keys, values = (torch.empty(pages, page_size, 1, size, dtype=torch.int8) for _ in range(2))  # touched where used
    for cache in (keys, values):
        cache[-2:] = torch.randint(-100, 100, (2, page_size, 1, size), dtype=torch.int8)
    near = [c[-2:].clone() for c in (keys, values)]
    query, length = torch.randn(1, 2, size), integers(1500)
    options = {"key_scale": 0.01, "value_scale": 0.01}
    far = functional.paged_attention(query, keys, values, integers([pages - 1, pages - 2]), length, **options)
    assert torch.equal(far, functional.paged_attention(query, *near, integers([1, 0]), length, **options))


def test_large_distances_of_alibi_cost_no_digits() -> None:
    keys, values = caches(20, 64)
    query, length = torch.randn(2, 4, 32), 1200
    slopes = torch.tensor([-0.3, 0.5, -1.0, 0.01])
    found, lse = functional.paged_attention(
        query, keys, values, torch.arange(20, dtype=torch.int32)[None], integers(length), alibi_slopes=slopes,
        causal=False, softcap=20.0, window=(-1, -1), return_lse=True,
    )  # fmt: skip
    k, v = (c.reshape(-1, 2, 32)[:length].double().repeat_interleave(2, 1) for c in (keys, values))
    scores = 20 * torch.tanh(torch.einsum("qhd,khd->hqk", query.double(), k) * 32**-0.5 / 20)
    distance = (torch.arange(length)[None] - torch.tensor([[length - 2], [length - 1]])).abs()
    scores -= slopes.double()[:, None, None] * distance
    torch.testing.assert_close(
        found.double(), torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), atol=4e-6, rtol=4e-6
    )
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-4, rtol=1e-6)


def planned(lengths: list[int], **options: Any) -> tuple[Tensor, ...]:
    table = max(-(-length // 16) for length in lengths)
    keys, values = caches(len(lengths) * table, 16)
    tables = torch.arange(len(lengths) * table, dtype=torch.int32).view(len(lengths), table)
    return torch.randn(len(lengths), 4, 32), keys, values, tables, integers(*lengths)


@pytest.mark.parametrize("policy", ["fill", "invariant"])
def test_one_plan_serves_all_layers_and_all_steps(policy: str) -> None:
    heads: dict[str, Any] = {"heads": 4, "key_heads": 2, "policy": policy}
    large, small = planned([3000, 17, 0, 2100, 1]), planned([5, 1300])
    plan = functional.plan_decode(large[-1], **heads, max_requests=8)
    assert plan.shape == (17,) and plan.dtype == torch.int32
    for layer in (large, (large[0] * 2, *large[1:])):
        found = functional.paged_attention(*layer, plan=plan)
        torch.testing.assert_close(found, functional.paged_attention(*layer), atol=2e-6, rtol=2e-6)
    with pytest.raises(RuntimeError, match=r"the plan is of 5 requests .* plan this step anew"):
        functional.paged_attention(*small, plan=plan)
    assert functional.plan_decode(small[-1], **heads, out=plan) is plan  # smaller, in the larger plan's memory
    assert torch.equal(plan[:11], functional.plan_decode(small[-1], **heads))
    found = functional.paged_attention(*small, plan=plan)
    torch.testing.assert_close(found, functional.paged_attention(*small), atol=2e-6, rtol=2e-6)
    small[-1][1] += 2000  # a length that the plan does not know
    with pytest.raises(RuntimeError, match="request 1, its length"):
        functional.paged_attention(*small[:3], small[3].repeat(1, 3), small[4], plan=plan)


def test_an_invariant_plan_gives_a_request_the_same_bits_alone() -> None:
    query, keys, values, tables, lengths = planned([3000, 17, 1500])
    heads: dict[str, Any] = {"heads": 4, "key_heads": 2, "policy": "invariant"}
    plan = functional.plan_decode(lengths, **heads)
    together = functional.paged_attention(query, keys, values, tables, lengths, plan=plan, batch_invariant=True)
    for r in range(3):
        own = functional.plan_decode(lengths[r : r + 1], **heads)
        part = slice(r, r + 1)
        alone = functional.paged_attention(query[part], keys, values, tables[part], lengths[part], plan=own)
        assert torch.equal(alone, together[part])
    with pytest.raises(ValueError, match='policy is "greedy"'):
        functional.plan_decode(lengths, heads=4, key_heads=2, policy="greedy")
    with pytest.raises(RuntimeError, match="heads is 5, key_heads is 2"):
        functional.plan_decode(lengths, heads=5, key_heads=2)
    with pytest.raises(RuntimeError, match="3 requests need 12"):
        functional.plan_decode(lengths, heads=4, key_heads=2, out=torch.zeros(11, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="what plan_decode returned"):
        functional.paged_attention(query, keys, values, tables, lengths, plan=torch.zeros(12, dtype=torch.int32))


def test_keys_that_no_row_sees_may_be_no_numbers() -> None:
    keys, values = caches(4, 16)
    query, length = torch.randn(2, 4, 32), 60
    options: dict[str, Any] = {"window": (6, 0)}  # keys from 52 on, of the page that begins with 48
    expected = functional.paged_attention(query, keys, values, integers([0, 1, 2, 3]), integers(length), **options)
    for cache in (keys, values):
        cache.view(-1, 2, 32)[: length - 8] = torch.nan
    found = functional.paged_attention(query, keys, values, integers([0, 1, 2, 3]), integers(length), **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("heads", "key_heads"), [(12, 12), (14, 2), (40, 5)])
@pytest.mark.parametrize("size", [64, 72])
def test_bits_depend_neither_on_threads_nor_on_layouts(heads: int, key_heads: int, size: int) -> None:
    """A task of the CPU takes as many key heads as leave every thread some tasks, and one where heads come first."""
    keys, values = caches(12, 16, key_heads, size)
    slopes, sinks = torch.rand(heads), torch.randn(heads)
    query, tables, lengths = torch.randn(4, heads, size), integers([0, 1, 2, -1, 5, 6], [7, 3] * 3), integers(90, 33)

    def attend(layout: str) -> Tensor:
        given = [c.transpose(1, 2).contiguous() if layout == "hnd" else c for c in (keys, values)]
        options: dict[str, Any] = {"alibi_slopes": slopes, "sinks": sinks, "cache_layout": layout}
        return functional.paged_attention(query, *given, tables, lengths, **options)

    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 2, 7):
            torch.set_num_threads(number)
            found += [attend("nhd"), attend("hnd")]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(other, found[0]) for other in found[1:])


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_of_prompts_between_decoding_requests(layout: str, dtype: torch.dtype) -> None:
    """Requests of many rows go another way on the CPU; one with a missing page and one of few rows do not."""
    keys, values = (c.to(dtype) for c in caches(60, 16, 2, 48))
    counts, lengths = [40, 1, 70, 33, 0, 20], [200, 77, 70, 50, 5, 9]
    tables = torch.randperm(60)[: 6 * 13].repeat(2)[: 6 * 13].view(6, 13).to(torch.int32)
    tables[3, 1] = -1
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    query, sinks = torch.randn(sum(counts) + 2, 6, 48).to(dtype), torch.randn(6)
    given = [c.transpose(1, 2).contiguous() if layout == "hnd" else c for c in (keys, values)]
    options: dict[str, Any] = {"cu_seqlens_q": starts, "window": (25, 0), "sinks": sinks, "softcap": 9.0}
    options |= {"return_lse": True, "cache_layout": layout}
    found, lse = functional.paged_attention(query, *given, tables, integers(*lengths), **options)
    with kernel_pytorch.overlay({"paged_attention": "reference"}):
        expected, logs = functional.paged_attention(query, *given, tables, integers(*lengths), **options)
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, logs, atol=4e-6, rtol=4e-6)
    first = slice(int(starts[2]), int(starts[3]))
    options["batch_invariant"] = True
    together, _ = functional.paged_attention(query, *given, tables, integers(*lengths), **options)
    torch.testing.assert_close(together, expected, atol=tolerance, rtol=tolerance)
    options["cu_seqlens_q"] = None
    own, _ = functional.paged_attention(query[first], *given, tables[2:3], integers(lengths[2]), **options)
    assert torch.equal(own, together[first])
