"""What lies at the edge of attention and its block lists: numbers of 64 bits, offsets that cut nothing, sinks of NaN,
empty dimensions under every broadcast of a bias, shapes with too few dimensions."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from attention_cases import products  # noqa: E402
from kernel_pytorch.functional import attention  # noqa: E402

from kernel_pytorch import functional as F  # noqa: E402

FAR = 2**62
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
# Few queries with a mask and without one are two kernels; that of AMX rounds probabilities to bf16.
ROUNDINGS = {torch.bfloat16: {"rtol": 1.6e-2, "atol": 2**-7}}


def outputs_and_gradients(tensors, **options):
    leaves = [x.detach().requires_grad_() for x in tensors]
    output, lse = attention(*leaves, return_lse=True, **options)
    weights = torch.arange(output.numel(), dtype=output.dtype).view(output.shape).cos()
    return output, lse, *torch.autograd.grad((output * weights).sum(), leaves)


def kept(queries, keys, offset, causal, window):
    """Python's integers are as wide as they need to be."""
    left, right = window
    return torch.tensor(
        [
            [
                not (causal and k > q + offset)
                and not (left >= 0 and k - (q + offset) < -left)
                and not (right >= 0 and k - (q + offset) > right)
                for k in range(keys)
            ]
            for q in range(queries)
        ]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_offsets_and_windows_of_64_bits(causal, dtype):
    tensors = products((1, 2, 8, 9, 8), dtype)
    for offset in (-(2**63), -FAR, -(2**40), 2**31, 2**32, 2**40, FAR, 2**63 - 1):
        for window in ((-1, -1), (FAR, 5), (3, FAR), (2**63 - 1, 2**63 - 1), (abs(offset + 2) % 2**63, 1)):
            mask = kept(8, 9, offset, causal, window)
            ours = outputs_and_gradients(tensors, causal=causal, causal_offset=offset, window=window)
            wanted = outputs_and_gradients(tensors, mask=mask)
            for one, other in zip(ours, wanted, strict=True):
                torch.testing.assert_close(one, other, msg=f"{offset} {window}")


@pytest.mark.parametrize("window", [(FAR, 3), (3, FAR), (FAR, FAR), 2**63 - 1])
def test_windows_of_64_bits_without_an_offset(window):
    tensors = products((2, 2, 8, 9, 8), torch.float32)
    sides = (window, window) if isinstance(window, int) else window
    near = tuple(min(side, 1000) for side in sides)
    lengths = torch.tensor([4, 9])
    for one, other in zip(
        outputs_and_gradients(tensors, window=window, key_lengths=lengths),
        outputs_and_gradients(tensors, window=near, key_lengths=lengths),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_parts_of_64_bits():
    query, key, value = (x.detach() for x in products((1, 2, 8, 9, 8), torch.float32))

    def part(**options):
        output, lse = torch.empty_like(query), torch.full((1, 2, 8), -torch.inf)
        F.attention_part_(output, lse, query, key, value, causal=True, **options)
        return output

    wanted = attention(query, key, value, causal=True, causal_offset=3)
    assert torch.equal(part(first_query=FAR, first_key=FAR - 3, causal_offset=0), wanted)
    assert torch.equal(part(first_query=FAR, causal_offset=3 - FAR), wanted)
    assert torch.equal(part(first_key=2**63 - 1, causal_offset=-(2**63)), torch.zeros_like(query))
    with pytest.raises(RuntimeError, match="dropout, score_mod and mask_mod count up to"):
        part(first_query=FAR, causal_offset=0, mask_mod=lambda b, h, q, k: q >= k)


def test_alibi_is_exact_or_refused():
    query, key, value = products((1, 1, 4, 4, 8), torch.float32)
    slopes = torch.full((1,), 2.0**-20)  # so that fp32 has scores of a distance of 2^24
    ours = attention(query, key, value, alibi_slopes=slopes, causal_offset=2**24)
    places = torch.arange(4.0)
    wanted = attention(query, key, value, bias=2.0**-20 * (places[None, :] - places[:, None]))
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)
    with pytest.raises(RuntimeError, match="their distances are exact up to"):
        attention(query, key, value, alibi_slopes=slopes, causal_offset=FAR)


@pytest.mark.parametrize("size", [9, 1000, 2**30, FAR, (4, FAR), (FAR, 5), 2**63 - 1], ids=str)
def test_blocks_may_be_larger_than_the_sequence(size):
    tensors = products((1, 2, 8, 9, 8), torch.float32)
    queries, keys = (size, size) if isinstance(size, int) else size
    shape = (1, 1, -(-8 // queries), -(-9 // keys))
    lists = F.block_lists(torch.ones(shape, dtype=torch.bool), size)
    for one, other in zip(
        outputs_and_gradients(tensors, block_mask=lists), outputs_and_gradients(tensors), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("size", [0, -5, (0, 128), (128, -1), -(2**62)], ids=str)
def test_blocks_without_a_size_are_refused(size):
    with pytest.raises(ValueError, match=r"block_lists: blocks are .* both sizes must be at least 1"):
        F.block_lists(torch.ones(1, 1, 1, 1, dtype=torch.bool), size)
    with pytest.raises(ValueError, match="select_by_scores: blocks are"):
        F.select_by_scores(torch.ones(1, 1, 1, 1), 8, 8, block_size=size)
    with pytest.raises(ValueError, match="select_blocks: blocks are"):
        F.select_blocks(torch.ones(1, 1, 8, 8), torch.ones(1, 1, 8, 8), block_size=size)


def test_an_own_list_without_a_size_is_refused():
    class Mask:
        kv_num_blocks, kv_indices = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
        q_num_blocks, q_indices = kv_num_blocks, kv_indices
        full_kv_num_blocks = mask_mod = None
        BLOCK_SIZE = (0, 0)

    query, key, value = (torch.randn(1, 1, 8, 8) for _ in range(3))
    with pytest.raises(RuntimeError, match="blocks are 0 by 0; both sizes must be positive"):
        attention(query, key, value, block_mask=Mask)


@pytest.mark.parametrize("size", [(1000, FAR), (FAR, 64), (2**30 + 1, 2**30 + 1), 2**32], ids=str)
def test_a_selection_of_blocks_that_are_too_large_is_refused(size):
    with pytest.raises(RuntimeError, match=r"block_select: blocks are .* both sizes must be from 1 to"):
        F.select_by_scores(torch.randn(2, 33, 1, 8), 3, 64, block_size=size)


@pytest.mark.parametrize("bound", [-1, 2**31, FAR])
def test_a_selection_of_packs_that_are_too_long_is_refused(bound):
    x, ends = torch.randn(12, 2, 8), torch.tensor([0, 4, 12])
    with pytest.raises(ValueError, match=r"select_blocks: the longest sequence has .* tokens"):
        F.select_blocks(x, x, block_size=4, cu_seqlens_q=ends, max_seqlen_q=8, max_seqlen_k=bound)


def test_a_selection_is_checked_before_it_is_counted():
    scores = torch.randn(1, 1, 1, 1)
    for queries, keys in ((2**36, 64), (64, 2**36), (FAR, 64), (64, FAR), (2**63 - 1, 2**63 - 1)):
        with pytest.raises(RuntimeError, match=r"block_select: .*(scores have shape|make more than|would have shape)"):
            F.select_by_scores(scores, queries, keys)
    assert F.select_by_scores(scores, 64, 64, block_size=2**30).block_map().all()


@pytest.mark.parametrize("offset", [-(2**63), -FAR, FAR, 2**63 - 1])
def test_a_selection_with_an_offset_of_64_bits(offset):
    near = 10**6 if offset > 0 else -(10**6)
    scores = torch.randn(1, 1, 4, 6, generator=torch.Generator().manual_seed(0))
    options = dict(block_size=16, causal=True, sparsity=0.4)
    ours = F.select_by_scores(scores, 64, 96, causal_offset=offset, **options)
    wanted = F.select_by_scores(scores, 64, 96, causal_offset=near, **options)
    assert torch.equal(ours.block_map(), wanted.block_map())


@pytest.mark.parametrize("chunk", [8, 9, 2**31, FAR, 2**63 - 1])
def test_a_chunk_may_be_larger_than_the_sequence(chunk):
    x = torch.randn(2, 8, 3, requires_grad=True)
    means = F.chunk_mean_pool(x, chunk)
    torch.testing.assert_close(means, x.mean(1, keepdim=True))
    (gradient,) = torch.autograd.grad(means.sum(), x)
    torch.testing.assert_close(gradient, torch.full_like(x, 1 / 8))


BAD_OFFSETS = {
    "negative": ([0, -4, 12], "are 0 and -4"),
    "descending": ([0, 9, 4, 12], "are 9 and 4"),
    "past the end": ([0, 4, 13], "are 4 and 13, query has 12 tokens"),
    "not from 0": ([2, 4, 12], "begins with 2"),
    "beyond 32 bits": ([0, 4, 2**32 + 12], "are 4 and 2147483647"),
    "far below": ([0, -(2**40), 12], "are 0 and -1073741824"),
}


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("name", BAD_OFFSETS)
def test_offsets_that_cut_nothing_are_refused(name, side):
    tensors = [torch.randn(12, 2, 8, requires_grad=True) for _ in range(3)]
    bad, words = BAD_OFFSETS[name]
    good = torch.tensor([0, *[4] * (len(bad) - 2), 12])
    offsets = {"cu_seqlens_q": good, "cu_seqlens_k": good, f"cu_seqlens_{side}": torch.tensor(bad)}
    words = words.replace("query", "key") if side == "k" else words
    with pytest.raises(RuntimeError, match=f"attention: cu_seqlens_{side} .*{words}"):
        attention(*tensors, **offsets)
    if max(bad) < 2**31 and min(bad) >= -(2**30):
        with pytest.raises(RuntimeError, match=words):
            attention(*tensors, **{key: value.int() for key, value in offsets.items()})
    if bad[0] == 0:
        with pytest.raises(RuntimeError, match=r"mean_pool: offsets .* are"):
            F.mean_pool(tensors[0], torch.tensor(bad))


def test_a_longest_sequence_that_is_too_short_is_refused():
    tensors = [torch.randn(12, 2, 8) for _ in range(3)]
    offsets = dict(cu_seqlens_q=torch.tensor([0, 4, 12]), cu_seqlens_k=torch.tensor([0, 7, 12]))
    with pytest.raises(RuntimeError, match="sequence 1 of cu_seqlens_q has 8 tokens, max_seqlen_q is 7"):
        attention(*tensors, **offsets, max_seqlen_q=7, max_seqlen_k=7)
    with pytest.raises(RuntimeError, match="sequence 0 of cu_seqlens_k has 7 tokens, max_seqlen_k is 6"):
        attention(*tensors, **offsets, max_seqlen_q=8, max_seqlen_k=6)
    for bad in (-1, -FAR, FAR, 2**31):
        with pytest.raises(RuntimeError, match="longest sequence"):
            attention(*tensors, **offsets, max_seqlen_q=bad)
    wanted = attention(*tensors, **offsets)
    assert torch.equal(attention(*tensors, **offsets, max_seqlen_q=8, max_seqlen_k=7), wanted)
    assert torch.equal(attention(*tensors, **offsets, max_seqlen_q=2**31 - 1, max_seqlen_k=2**31 - 1), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BAD_OFFSETS)
def test_offsets_on_a_gpu_are_checked_on_request(name):
    script = f"""
import torch
from kernel_pytorch.functional import attention
x = torch.randn(12, 2, 64, device="cuda", dtype=torch.bfloat16)
bad = torch.tensor({BAD_OFFSETS[name][0]}, device="cuda")
try:
    attention(x, x, x, cu_seqlens_q=bad, cu_seqlens_k=bad)
except RuntimeError as error:
    print(error)
good = torch.tensor([0, 12], device="cuda", dtype=torch.int32)
attention(x, x, x, cu_seqlens_q=good, cu_seqlens_k=good)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):  # nobody waits inside a capture
    attention(x, x, x, cu_seqlens_q=good, cu_seqlens_k=good)
print("captured")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"KERNEL_PYTORCH_CHECK": "1"}, capture_output=True, text=True
    )
    assert "attention: cu_seqlens_q" in done.stdout and "captured" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("options", [{}, {"causal": True, "causal_offset": -3}, {"window": (2, 2)}], ids=str)
def test_nan_in_sinks_propagates(options, device):
    for dtype, size in itertools.product(DTYPES if device == "cpu" else DTYPES[2:], (64, 72)):
        for queries, keys in ((9, 12), (1, 300), (150, 200)):  # on a GPU each has a kernel of its own
            leaves = products((1, 2, queries, keys, size), dtype, device=device)
            sinks = torch.tensor([float("nan"), 0.0], device=device, requires_grad=True)
            output, lse = attention(*leaves, sinks=sinks, return_lse=True, **options)
            assert output[:, 0].isnan().all() and lse[:, 0].isnan().all()
            assert not output[:, 1].isnan().any() and not lse[:, 1].isnan().any()
            gradients = torch.autograd.grad(output.float().sum(), [*leaves, sinks])
            assert gradients[3][0].isnan() and not gradients[3][1].isnan()
            seen = kept(queries, keys, options.get("causal_offset", keys - queries), options.get("causal", False),
                        options.get("window", (-1, -1)))  # fmt: skip
            rows, columns = seen.any(1), seen.any(0)
            assert gradients[0][0, 0].isnan().all(-1).cpu()[rows].all()
            assert all(gradient[0, 0].isnan().all(-1).cpu()[columns].all() for gradient in gradients[1:3])
            assert not any(gradient[:, 1].isnan().any() for gradient in gradients[:3])


@pytest.mark.parametrize("empty", ["batch", "heads", "queries", "keys", "none"])
def test_a_bias_of_every_broadcast_over_every_empty_dimension(empty):
    sizes = {"batch": 2, "heads": 2, "queries": 3, "keys": 4, empty: 0}
    sizes.pop("none", None)
    for dtype, ones, rank in itertools.product(DTYPES[:2], itertools.product((False, True), repeat=4), (1, 2, 3, 4)):
        shape = [1 if one else size for one, size in zip(ones, sizes.values(), strict=True)][4 - rank :]
        for kind in ("bias", "mask", "both"):
            leaves = products((*sizes.values(), 8), dtype)
            bias = torch.randn(shape, dtype=dtype).requires_grad_()
            mask = torch.ones(shape, dtype=torch.bool)
            given = (
                dict(bias=bias) if kind == "bias" else dict(mask=mask) if kind == "mask" else dict(bias=bias, mask=mask)
            )
            output = attention(*leaves, **given)
            doubles = [x.detach().double().requires_grad_() for x in (*leaves, bias)]
            q, k, v, b = doubles
            scores = q @ k.transpose(-1, -2) * 8**-0.5
            wanted = torch.softmax(scores + b if "bias" in given else scores, -1) @ v
            torch.testing.assert_close(output.double(), wanted.detach(), atol=1e-5, rtol=1e-5)
            used = [*leaves, bias] if "bias" in given else leaves
            weights = torch.arange(output.numel(), dtype=torch.float64).view(output.shape).cos()
            ours = torch.autograd.grad((output.double() * weights).sum(), used)
            theirs = torch.autograd.grad(
                (wanted * weights).sum(), doubles[: len(used)], allow_unused=True, materialize_grads=True
            )
            for one, other, tensor in zip(ours, theirs, used, strict=True):
                assert one.shape == tensor.shape
                torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)


def test_shapes_with_too_few_or_too_many_dimensions_are_named():
    query, key, value = products((2, 3, 6, 6, 8), torch.float32)
    ids = torch.tensor([0, 0, 1, 1, -1, 1])
    for bad in (torch.tensor(0.5), torch.ones(1, 2, 3)):
        with pytest.raises(RuntimeError, match=r"alibi_slopes has shape .* must be \[heads\] or \[batch, heads\]"):
            attention(query, key, value, alibi_slopes=bad)
    for bad in (torch.tensor(1), ids.expand(1, 2, 6)):
        with pytest.raises(RuntimeError, match=r"query_segment_ids has shape .* must be \[batch, sequence\], or"):
            attention(query, key, value, query_segment_ids=bad)
    shared = attention(query, key, value, query_segment_ids=ids)
    assert torch.equal(shared, attention(query, key, value, query_segment_ids=ids.expand(2, 6)))
    packed = [x[0].transpose(0, 1) for x in (query, key, value)]
    ends = torch.tensor([0, 6])
    ours = attention(*packed, cu_seqlens_q=ends, cu_seqlens_k=ends, query_segment_ids=ids)
    torch.testing.assert_close(ours.transpose(0, 1), shared[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": (37, 0)}])
def test_a_rows_bits_do_not_depend_on_how_many_queries_there_are(dtype, options):
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(2, 8, 40, 32, generator=generator).to(dtype)
    key, value = (torch.randn(2, 2, 1200, 32, generator=generator).to(dtype) for _ in range(2))
    rows = [
        attention(query[:, :, 40 - count :], key, value, batch_invariant=True, **options)[:, :, -1]
        for count in range(1, 41)
    ]
    assert [count for count, row in enumerate(rows, 1) if not torch.equal(row, rows[0])] == []
