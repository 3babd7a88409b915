"""key_lengths with what counts places: causal, window and ALiBi, over lengths below, at and above the number of
queries, in batches and in packs, forward and backward, against a formula that is written here pair by pair."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from attention_cases import assert_close, leaf  # noqa: E402
from kernel_pytorch.functional import attention  # noqa: E402

import kernel_pytorch  # noqa: E402

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
OPTIONS = {
    "causal": dict(causal=True),
    "window": dict(window=(2, 1)),
    "left": dict(window=(3, -1)),
    "alibi": dict(alibi=True),
    "causal alibi": dict(causal=True, alibi=True),
    "causal window": dict(causal=True, window=(4, 0)),
}
SLOPES = (0.3, 0.05)


def place_of_first_query(queries, keys, length):
    """Where query 0 stands among the keys, case by case."""
    if length == keys:  # no padding
        return keys - queries
    if length >= queries:  # a cache: the last query stands at the last real key
        return length - queries
    return min(0, keys - queries)  # padding on the right


def formula(query, key, value, length, *, causal=False, window=(-1, -1), alibi=False):
    """One sequence, [heads, tokens, size], score by score."""
    heads, queries, size = query.shape
    keys = key.shape[1]
    length = max(0, min(keys, length))
    first = place_of_first_query(queries, keys, length)
    outputs = []
    for h in range(heads):
        for q in range(queries):
            seen, scores = [], []
            for k in range(length):
                distance = k - (q + first)
                if (causal and distance > 0) or (0 <= window[0] < -distance) or (0 <= window[1] < distance):
                    continue
                seen.append(k)
                score = (query[h, q] * key[h, k]).sum() * size**-0.5
                scores.append(score - SLOPES[h] * abs(distance) if alibi else score)
            if not seen:
                outputs.append(value.new_zeros(value.shape[-1]))
                continue
            outputs.append(torch.softmax(torch.stack(scores), 0) @ value[h, seen])
    return torch.stack(outputs).view(heads, queries, -1) if outputs else value.new_zeros(heads, 0, value.shape[-1])


def check(ours, expected, leaves, doubles, dtype, what):
    assert_close(ours, expected, dtype, what)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    actual = torch.autograd.grad((ours.double() * weights).sum(), leaves)
    wanted = torch.autograd.grad((expected * weights).sum(), doubles, allow_unused=True, materialize_grads=True)
    for one, other in zip(actual, wanted, strict=True):
        assert_close(one, other, dtype, f"{what}: gradient")


def arguments(options, dtype):
    options = dict(options)
    if options.pop("alibi", False):
        options["alibi_slopes"] = torch.tensor(SLOPES, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return options


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("queries, keys", [(6, 6), (3, 9), (9, 5)])
def test_batches(queries, keys, name, dtype):
    generator = torch.Generator().manual_seed(queries)
    lengths = [0, 1, min(queries, keys) - 1, min(queries, keys), min(queries, keys) + 1, keys - 1, keys, keys + 7, -2]
    leaves = [leaf(len(lengths), 2, n, 8, dtype=dtype, generator=generator) for n in (queries, keys, keys)]
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    ours = attention(*leaves, key_lengths=torch.tensor(lengths), **arguments(OPTIONS[name], dtype))
    expected = torch.stack(
        [formula(*(x[i] for x in doubles), n, **OPTIONS[name]) for i, n in enumerate(lengths)]
    )  # fmt: skip
    check(ours, expected, leaves, doubles, dtype, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_packs(name, dtype):
    generator = torch.Generator().manual_seed(5)
    sizes = [(6, 6, 4), (2, 7, 5), (7, 4, 3), (5, 5, 5), (1, 6, 1), (3, 5, 0), (4, 4, 9)]  # queries, keys, length
    ends = [torch.tensor([0, *(one[i] for one in sizes)]).cumsum(0) for i in (0, 1)]
    leaves = [leaf(int(end[-1]), 2, 8, dtype=dtype, generator=generator) for end in (ends[0], ends[1], ends[1])]
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    ours = attention(
        *leaves,
        cu_seqlens_q=ends[0],
        cu_seqlens_k=ends[1],
        max_seqlen_q=7,
        max_seqlen_k=7,
        key_lengths=torch.tensor([one[2] for one in sizes]),
        **arguments(OPTIONS[name], dtype),
    )
    parts = []
    for i, (_, _, length) in enumerate(sizes):
        spans = [slice(int(end[i]), int(end[i + 1])) for end in (ends[0], ends[1], ends[1])]
        one = [x[span].transpose(0, 1) for x, span in zip(doubles, spans, strict=True)]
        parts.append(formula(*one, length, **OPTIONS[name]).transpose(0, 1))
    check(ours, torch.cat(parts), leaves, doubles, dtype, name)


def test_padding_on_the_right_changes_nothing():
    query, key, value = (torch.randn(3, 2, 10, 8) for _ in range(3))
    lengths = torch.tensor([4, 10, 7])
    padded = attention(query, key, value, causal=True, key_lengths=lengths)
    for i, n in enumerate(lengths.tolist()):
        alone = attention(*(x[i : i + 1, :, :n] for x in (query, key, value)), causal=True)
        torch.testing.assert_close(padded[i : i + 1, :, :n], alone)
    assert not (padded == 0).all(-1).any()


def test_a_cache_longer_than_its_content_is_its_content():
    query, key, value = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    for n in (3, 8, 20):
        ours = attention(query, key, value, causal=True, key_lengths=torch.tensor([n]))
        torch.testing.assert_close(ours, attention(query, key[:, :, :n], value[:, :, :n], causal=True))


def test_a_length_of_all_keys_is_no_length():
    for queries, keys in ((5, 9), (9, 5), (6, 6)):
        query, key, value = torch.randn(2, 2, queries, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 8)
        for options in (dict(causal=True), dict(window=(2, 1)), dict(alibi_slopes=torch.tensor([0.1, 0.2]))):
            ours = attention(query, key, value, key_lengths=torch.tensor([keys, keys + 3]), **options)
            assert torch.equal(ours, attention(query, key, value, **options))


def test_streamed_keys_align_as_whole_ones_or_ask():
    from kernel_pytorch.attention.distributed import context_parallel_attention

    lengths = torch.tensor([7, 12])
    query, key, value = (torch.randn(2, 2, 12, 8) for _ in range(3))
    for options in (dict(causal=True), dict(window=(3, 1)), dict(alibi_slopes=torch.tensor(SLOPES))):
        options = dict(layout="bhsd", key_lengths=lengths, **options)
        streamed = context_parallel_attention(query, key, value, key_chunk=5, **options)
        torch.testing.assert_close(streamed, attention(query, key, value, **options))
        with pytest.raises(ValueError, match=r"key_lengths move .* give causal_offset"):
            context_parallel_attention(query[:, :, :4], key, value, key_chunk=5, **options)
        options["causal_offset"] = 2
        streamed = context_parallel_attention(query[:, :, :4], key, value, key_chunk=5, **options)
        torch.testing.assert_close(streamed, attention(query[:, :, :4], key, value, **options))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_lengths_beyond_32_bits_are_not_cast(dtype):
    query, key, value = (torch.randn(3, 1, 8, 8) for _ in range(3))
    far = [2**32 + 3, 2**62, -(2**62)] if dtype == torch.int64 else [2**31 - 1, 8, -(2**31)]
    ours = attention(query, key, value, causal=True, key_lengths=torch.tensor(far, dtype=dtype))
    torch.testing.assert_close(ours[:2], attention(query, key, value, causal=True)[:2])
    assert torch.equal(ours[2], torch.zeros_like(ours[2]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("queries, keys", [(70, 70), (3, 200), (150, 90)])
def test_on_a_gpu(queries, keys, name):
    lengths = [0, 1, queries - 1, queries, queries + 1, keys - 1, keys, keys + 7, keys // 2]
    tensors = [torch.randn(len(lengths), 2, n, 64) for n in (queries, keys, keys)]
    options = arguments(OPTIONS[name], torch.float32)
    on_device = {n: o.cuda() if isinstance(o, torch.Tensor) else o for n, o in options.items()}
    for dtype in (torch.bfloat16, torch.float16):
        near = [x.to(dtype).float().requires_grad_() for x in tensors]
        far = [x.to(dtype).cuda().requires_grad_() for x in tensors]
        expected = attention(*near, key_lengths=torch.tensor(lengths), **options)
        ours = attention(*far, key_lengths=torch.tensor(lengths, device="cuda"), **on_device)
        assert_close(ours, expected, dtype, name)
        grad = torch.randn(expected.shape)
        for one, other in zip(
            torch.autograd.grad(ours, far, grad.to("cuda", dtype)),
            torch.autograd.grad(expected, near, grad.to(dtype).float()),
            strict=True,
        ):
            assert_close(one, other, dtype, f"{name}: gradient")


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("queries", [1, 3])
def test_few_queries_on_the_cpu_read_keys_as_pages(layout, queries):
    """Query heads of a group read a key once, where tiles of many queries read it for each head."""
    found = kernel_pytorch.explain("attention_forward", [2, 32, queries, 900, 64], key_heads=4, causal=True)
    assert found.kernel == "cpu_decode", str(found)
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 8, queries, 64), *torch.randn(2, 2, 2, 900, 64).unbind()
    given = [x if layout == "bhsd" else x.transpose(1, 2).contiguous() for x in (query, key, value)]
    options = dict(causal=True, window=(500, 0), softcap=4.0, alibi_slopes=torch.rand(8) / 50, sinks=torch.randn(8))
    ours, lse = attention(*given, layout=layout, return_lse=True, **options)
    with kernel_pytorch.overlay({"attention_forward": "reference"}):
        expected, logs = attention(*given, layout=layout, return_lse=True, **options)
    torch.testing.assert_close(ours, expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse, logs, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("keys", [1, 16, 31, 32, 40])
@pytest.mark.parametrize("where", ["query", "last key"])
def test_few_queries_on_the_cpu_bring_nan_to_the_output(keys, where):
    """Wherever the key lies in a tile, and whether or not other scores are numbers."""
    query, key, value = torch.randn(1, 2, 1, 16), torch.randn(1, 2, keys, 16), torch.randn(1, 2, keys, 16)
    (query if where == "query" else key)[0, 1, -1] = torch.nan
    ours, lse = attention(query, key, value, return_lse=True)
    assert ours[0, 1].isnan().all() and lse[0, 1].isnan().all()
    assert ours[0, 0].isfinite().all() and lse[0, 0].isfinite().all()


@pytest.mark.parametrize("queries, layout", [(1, "bhsd"), (3, "bshd")])
def test_few_queries_of_no_sequence(queries, layout):
    shapes = [(0, 2, n, 16) if layout == "bhsd" else (0, n, 2, 16) for n in (queries, 64, 64)]
    assert attention(*(torch.empty(shape) for shape in shapes), layout=layout, causal=True).shape == shapes[0]
