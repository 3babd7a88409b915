"""Attention over pages on a GPU, where shipped kernels broke: graphs of changing lengths, memory of larger batches,
poisoned tails, large strides, bits that do not depend on neighbours, pages of every size and layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_pytorch import functional

pytestmark = pytest.mark.gpu
F8 = torch.float8_e4m3fn


def batch(lengths: list[int], page: int = 16, heads: int = 16, key_heads: int = 2, size: int = 128, queries: int = 1):
    generator = torch.Generator().manual_seed(len(lengths) + page)
    table = max(1, -(-max(lengths) // page))
    pages = len(lengths) * table
    caches = [torch.randn(pages, page, key_heads, size, generator=generator).bfloat16().cuda() for _ in range(2)]
    tables = torch.randperm(pages, generator=generator).view(len(lengths), table).int().cuda()
    query = torch.randn(len(lengths) * queries, heads, size, generator=generator).bfloat16().cuda()
    return query, *caches, tables, torch.tensor(lengths, dtype=torch.int32, device="cuda")


def on_cpu(query: Tensor, keys: Tensor, values: Tensor, *rest: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    wide = [t.float().cpu() for t in (query, keys, values)]
    output, lse = functional.paged_attention(*wide, *(t.cpu() for t in rest), return_lse=True, **options)
    return output.cuda(), lse.cuda()


def close(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], bound: float = 0.02) -> bool:
    same = torch.isneginf(expected[1]) == torch.isneginf(found[1])
    kept = ~torch.isneginf(expected[1])
    return (
        bool((found[0].float() - expected[0]).abs().max() < bound)
        and bool(same.all())
        and bool((found[1] - expected[1])[kept].abs().lt(0.02).all())
    )


def test_one_graph_serves_all_lengths_and_forgets_larger_ones():
    query, keys, values, tables, lengths = batch([3000, 17, 0, 1200, 64])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            functional.paged_attention(query, keys, values, tables, lengths, return_lse=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = functional.paged_attention(query, keys, values, tables, lengths, return_lse=True)
    for changed in (
        [3000, 17, 0, 1200, 64],
        [1, 1, 1, 1, 1],
        [0, 3000, 2999, 0, 0],
        [0, 0, 0, 0, 0],
        [5, 2048, 16, 15, 33],
    ):
        lengths.copy_(torch.tensor(changed))
        with torch.cuda.stream(stream):
            graph.replay()
        torch.cuda.synchronize()
        assert close(found, on_cpu(query, keys, values, tables, lengths)), changed


@pytest.mark.parametrize("cache", [torch.bfloat16, F8])
@pytest.mark.parametrize("page", [1, 16, 64, 256])
@pytest.mark.parametrize("key_heads", [1, 2, 8])
def test_pages_heads_and_poisoned_tails(cache, page, key_heads):
    lengths = [700, 1, 0, 333, 48]
    query, keys, values, tables, device_lengths = batch(lengths, page, 8 * key_heads, key_heads)
    keys, values = keys.to(cache), values.to(cache)
    expected = on_cpu(query, keys, values, tables, device_lengths)
    if cache == torch.bfloat16:
        behind = torch.arange(tables.shape[1] * page) >= torch.tensor(lengths)[:, None]
        unseen = torch.empty(keys.shape[:2], dtype=torch.bool)
        unseen[tables.cpu().long()] = behind.view(len(lengths), -1, page)
        for one in (keys, values):
            one[unseen.cuda()] = torch.nan
    for layout in ("nhd", "hnd"):
        given = [c if layout == "nhd" else c.transpose(1, 2).contiguous() for c in (keys, values)]
        found = functional.paged_attention(query, *given, tables, device_lengths, cache_layout=layout, return_lse=True)
        assert close(found, expected), layout


@pytest.mark.parametrize("queries", [1, 2, 4, 8])
def test_drafts_see_their_own_windows(queries):
    query, keys, values, tables, lengths = batch([900, 12, 300], heads=16, queries=queries)
    for window in (None, (100, 0), (0, 0)):
        found = functional.paged_attention(query, keys, values, tables, lengths, window=window, return_lse=True)
        assert close(found, on_cpu(query, keys, values, tables, lengths, window=window)), window


def test_bits_of_a_request_do_not_depend_on_others():
    query, keys, values, tables, lengths = batch([5000, 17, 0, 2500, 64], heads=64, key_heads=8)
    for cache in (torch.bfloat16, F8):
        given = [c.to(cache) for c in (keys, values)]
        together = functional.paged_attention(query, *given, tables, lengths, batch_invariant=True)
        for r in range(5):
            part = slice(r, r + 1)
            alone = functional.paged_attention(query[part], *given, tables[part], lengths[part], batch_invariant=True)
            assert torch.equal(alone, together[part])


def test_strides_beyond_32_bits():
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GB")
    query, keys, values, tables, lengths = batch([40, 16], key_heads=1, heads=8)
    pool = torch.zeros(6, 2**30 // 2, dtype=torch.bfloat16, device="cuda")  # pages lie 2^29 numbers apart
    far = [pool[:, offset : offset + 16 * 128].view(6, 16, 1, 128) for offset in (0, 4096)]
    for one, cache in zip(far, (keys, values), strict=True):
        one.copy_(cache)
    expected = functional.paged_attention(query, keys, values, tables, lengths)
    assert torch.equal(functional.paged_attention(query, *far, tables, lengths), expected)


@pytest.mark.parametrize("heads", [16, 20, 128])
@pytest.mark.parametrize("codes", [False, True])
def test_latent_rows(heads, codes):
    generator = torch.Generator().manual_seed(heads)
    cache = torch.randn(40, 64, 576, generator=generator).bfloat16()
    query = torch.randn(4, heads, 576, generator=generator).bfloat16()
    tables = torch.randperm(40, generator=generator).view(4, 10).int()
    lengths = torch.tensor([640, 0, 33, 500], dtype=torch.int32)
    if codes:
        scale = torch.rand(40, 64, 4, generator=generator) + 0.5
        parts = (cache[..., :512].to(F8), scale, cache[..., 512:].contiguous())
        cache = torch.cat([part.view(torch.uint8) for part in parts], -1)
    expected = functional.mla_decode(query, cache, tables, lengths, scale=192**-0.5, return_lse=True)
    found = functional.mla_decode(
        query.cuda(), cache.cuda(), tables.cuda(), lengths.cuda(), scale=192**-0.5, return_lse=True
    )
    assert close(found, (expected[0].float().cuda(), expected[1].cuda()), 0.03)
    places = torch.arange(640)
    slots = tables[:, places // 64] * 64 + places % 64
    slots = torch.where(places < lengths[:, None], slots, -1).int().cuda()
    listed = functional.mla_decode(query.cuda(), cache.cuda(), indices=slots, scale=192**-0.5)
    assert (listed - found[0]).abs().max() < 0.03
