"""What random calls (tests/fuzz/pages.py) do not show: poisoned tails, bits that do not depend on neighbours, layouts,
graphs of lengths, and refusals."""

import pytest
import torch

from kernel_pytorch import functional


def batch(requests: int = 4, dtype: torch.dtype = torch.float32, queries: int = 1):
    pages, page_size, heads, key_heads, size = 64, 16, 8, 2, 64
    generator = torch.Generator().manual_seed(0)
    caches = [torch.randn(pages, page_size, key_heads, size, generator=generator).to(dtype) for _ in range(2)]
    tables = torch.randperm(pages, generator=generator)[: requests * 12].view(requests, 12).to(torch.int32)
    lengths = torch.tensor([190, 0, 16, 77, 1][:requests], dtype=torch.int32)
    query = torch.randn(requests * queries, heads, size, generator=generator).to(dtype)
    return query, *caches, tables, lengths


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_lies_behind_the_last_key_is_never_a_number(dtype):
    query, keys, values, tables, lengths = batch(dtype=dtype)
    expected = functional.paged_attention(query, keys, values, tables, lengths)
    for r, length in enumerate(lengths.tolist()):
        for key in range(length, tables.shape[1] * 16):
            page = int(tables[r, key // 16])
            keys[page, key % 16] = values[page, key % 16] = torch.nan
    found, lse = functional.paged_attention(query, keys, values, tables, lengths, return_lse=True)
    assert torch.equal(found, expected)
    assert not found[1].any() and torch.isneginf(lse[:, 1]).all()  # a request without keys


def test_bits_of_a_request_do_not_depend_on_others():
    query, keys, values, tables, lengths = batch(queries=2)
    together = functional.paged_attention(query, keys, values, tables, lengths, batch_invariant=True)
    for r in range(4):
        alone = functional.paged_attention(
            query[2 * r : 2 * r + 2], keys, values, tables[r : r + 1], lengths[r : r + 1], batch_invariant=True
        )
        assert torch.equal(alone, together[2 * r : 2 * r + 2])


def test_layouts_are_views_of_the_same_cache():
    query, keys, values, tables, lengths = batch()
    expected = functional.paged_attention(query, keys, values, tables, lengths)
    first = [cache.transpose(1, 2).contiguous() for cache in (keys, values)]
    assert torch.equal(functional.paged_attention(query, *first, tables, lengths, cache_layout="hnd"), expected)
    pool = torch.stack([keys, values], dim=1)  # one tensor, keys and values of a page in turns
    wide = torch.full((*expected.shape[:2], 100), 7.0)  # written where it is, other columns stay
    out = wide[..., : expected.shape[2]]
    found, lse = functional.paged_attention(query, pool[:, 0], pool[:, 1], tables, lengths, out=out, return_lse=True)
    assert found is out and torch.equal(out, expected) and bool((wide[..., expected.shape[2] :] == 7).all())
    assert torch.equal(lse, functional.paged_attention(query, keys, values, tables, lengths, return_lse=True)[1])


def test_a_cache_that_is_appended_to_is_the_cache_of_all_tokens():
    query, keys, values, tables, _ = batch(requests=1)
    new = [torch.randn(5, 2, 64) for _ in range(2)]
    slots = torch.tensor([int(tables[0, k // 16]) * 16 + k % 16 for k in range(30, 35)])
    functional.append_kv(*new, keys, values, slots)
    assert torch.equal(keys.view(-1, 2, 64)[slots], new[0]) and torch.equal(values.view(-1, 2, 64)[slots], new[1])
    eager = functional.paged_attention(query, keys, values, tables, torch.tensor([35], dtype=torch.int32))
    compiled = torch.compile(functional.paged_attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(query, keys, values, tables, torch.tensor([35], dtype=torch.int32)), eager)


def latent_batch(dtype: torch.dtype = torch.bfloat16):
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(12, 16, 576, generator=generator).to(dtype)
    tables = torch.randperm(12, generator=generator).view(3, 4).to(torch.int32)
    return torch.randn(3, 16, 576, generator=generator).to(dtype), cache, tables, torch.tensor([40, 0, 64]).int()


def test_latent_rows_in_656_bytes_are_codes_scales_and_rope():
    query, cache, tables, lengths = latent_batch()
    codes, scale = cache[..., :512].to(torch.float8_e4m3fn), torch.rand(12, 16, 4) + 0.5
    parts = (codes, scale, cache[..., 512:].contiguous())
    packed = torch.cat([part.view(torch.uint8) for part in parts], -1)
    assert packed.shape[-1] == 656
    found, lse = functional.mla_decode(query, packed, tables, lengths, return_lse=True)
    assert torch.equal(found, functional.mla_decode(query, (codes, parts[2], scale), tables, lengths))
    numbers = torch.cat([codes.float() * scale.repeat_interleave(128, -1), cache[..., 512:].float()], -1)
    expected = functional.mla_decode(query.float(), numbers, tables, lengths)
    assert (found - expected).abs().max() < 0.01
    assert not found[1].any() and torch.isneginf(lse[:, 1]).all()  # a request without keys


def test_indices_see_what_tables_see():
    query, cache, tables, lengths = latent_batch()
    places = torch.arange(64)
    slots = tables[:, places // 16] * 16 + places % 16
    slots = torch.where(places < lengths[:, None], slots, -1).int()
    expected = functional.mla_decode(query, cache, tables, lengths)
    cache.view(-1, 576)[int(slots[2, 5])] = torch.nan  # of a slot that is not in the list
    slots[2, 5] = -1
    found = functional.mla_decode(query, cache, indices=slots)
    assert (found[:2] - expected[:2]).abs().max() < 0.01 and not found.isnan().any()
    with pytest.raises(RuntimeError, match="leave out block_tables"):
        functional.mla_decode(query, cache, tables, lengths, indices=slots)
    with pytest.raises(ValueError, match="656 bytes"):
        functional.mla_decode(query, torch.zeros(2, 16, 100, dtype=torch.uint8), tables, lengths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lists_of_slots_in_pages_with_gaps_and_in_caches_apart(dtype):
    query, cache, _, _ = latent_batch(dtype)
    slots = torch.stack([torch.randperm(12 * 16)[:70] for _ in range(3)]).int()
    slots[1, 3:9] = -1
    expected, logs = functional.mla_decode(query, cache, indices=slots, return_lse=True)
    wide = torch.full((12, 20, 600), torch.nan, dtype=dtype)
    wide[:, :16, :576] = cache
    for given in (wide[:, :16, :576], (cache[..., :512].contiguous(), cache[..., 512:].contiguous())):
        found, lse = functional.mla_decode(query, given, indices=slots, return_lse=True)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(lse, logs)
    rows = cache.reshape(-1, 576)[slots.clamp_min(0).long()].double()
    scores = (query.double() @ rows.transpose(1, 2) * 576**-0.5).masked_fill((slots < 0)[:, None], -torch.inf)
    torch.testing.assert_close(found.double(), scores.softmax(-1) @ rows[..., :512], atol=2e-2, rtol=1e-2)
    with pytest.raises(RuntimeError, match=r"indices\[2, 5\] is 192, the cache has 192 slots"):
        slots[2, 5] = 192
        functional.mla_decode(query, cache, indices=slots)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda a: a.update(tables=a["tables"].long()), "block_tables is int64; convert it to int32"),
        (lambda a: a.update(lengths=a["lengths"][:2]), r"seq_lens has shape \[2\]; it must be \[4\]"),
        (lambda a: a.update(keys=a["keys"][..., :32]), "query has size 64, key_cache has 32"),
        (lambda a: a.update(tables=a["tables"] + 100), "the cache has 64 pages; it must be one of them, or -1"),
        (lambda a: a.update(query=a["query"].requires_grad_()), "has no gradient"),
        (lambda a: a.update(cu_seqlens_q=torch.tensor([0, 2, 1, 3, 4], dtype=torch.int32)), "offsets must ascend"),
        (lambda a: a.update(cache_layout="bhsd"), 'cache_layout is "bhsd"'),
    ],
)
def test_refusals_name_the_argument_and_the_cure(change, sentence):
    arguments = dict(zip(("query", "keys", "values", "tables", "lengths"), batch(), strict=True))
    change(arguments)
    tensors = [arguments.pop(name) for name in ("query", "keys", "values", "tables", "lengths")]
    with pytest.raises((RuntimeError, ValueError), match=sentence):
        functional.paged_attention(*tensors, **arguments)


@pytest.mark.parametrize("options", [{}, {"window": (37, 0)}, {"window": (1500, 0)}, {"causal": False}])
def test_a_rows_bits_do_not_depend_on_queries_or_neighbours(options):
    generator = torch.Generator().manual_seed(2)
    keys, values = (torch.randn(600, 4, 2, 16, generator=generator) for _ in range(2))
    tables = torch.randperm(600, generator=generator)[:588].view(2, 294).int()
    query, other = (torch.randn(count, 8, 16, generator=generator) for count in (40, 20))
    last = []
    for count in range(1, 41):
        own, length = query[40 - count :], torch.tensor([1170], dtype=torch.int32)
        alone = functional.paged_attention(own, keys, values, tables[:1], length, batch_invariant=True, **options)
        among = functional.paged_attention(
            torch.cat([other, own]),
            keys,
            values,
            tables.flip(0).contiguous(),
            torch.tensor([333, 1170], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, 20, 20 + count], dtype=torch.int32),
            batch_invariant=True,
            **options,
        )
        assert torch.equal(alone, among[20:])
        last.append(alone[-1])
    assert [count for count, row in enumerate(last, 1) if not torch.equal(row, last[0])] == []
