"""Lists of blocks of packed sequences: each sequence by itself, with the expanded mask, is the judge."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from kernel_pytorch.functional import attention, block_lists, select_blocks, select_by_scores  # noqa: E402
from test_block_lists import expanded, random_inputs  # noqa: E402


def random_pack(heads, key_heads, lengths, size, seed=0, dtype=torch.float32, key_lengths=None):
    """Packed q, k, v and where the sequences begin; some tokens at the end belong to nobody."""
    generator = torch.Generator().manual_seed(seed)
    ends = [torch.tensor([0, *one]).cumsum(0).to(torch.int32) for one in (lengths, key_lengths or lengths)]
    shapes = (heads, ends[0]), (key_heads, ends[1]), (key_heads, ends[1])
    tensors = [torch.randn(int(e[-1]) + 5, h, size, generator=generator).to(dtype).requires_grad_() for h, e in shapes]
    return tensors, ends


def check_pack_against_sequences(tensors, ends, lists, block_size, causal, tolerance=2e-5):
    """Every sequence by itself, with the mask that its lists mean, against the pack: outputs and gradients."""
    longest = [int(e.diff().max()) for e in ends]
    packed = {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1], "max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
    ours = attention(*tensors, causal=causal, block_mask=lists, **packed)
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    block_map, group = lists.block_map(), tensors[0].shape[1] // tensors[1].shape[1]
    theirs = torch.zeros(ours.shape, dtype=torch.float64, device=ours.device)
    for i in range(len(ends[0]) - 1):
        (a, b), (c, d) = ((int(e[i]), int(e[i + 1])) for e in ends)
        q, k, v = leaves[0][a:b], leaves[1][c:d], leaves[2][c:d]
        k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        mask = expanded(block_map[min(i, block_map.shape[0] - 1)], block_size, b - a, d - c, causal)
        scores = (q.transpose(0, 1) @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
        weights = torch.where(mask.any(-1, keepdim=True), scores.softmax(-1), 0.0)
        theirs = torch.cat([theirs[:a], (weights @ v).transpose(0, 1), theirs[b:]])
    torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=tolerance)
    grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9)).to(ours)
    grads = torch.autograd.grad(ours, tensors, grad), torch.autograd.grad(theirs, leaves, grad.double())
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine.double(), other, atol=5 * tolerance, rtol=5 * tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block_size", [16, (32, 16), (64, 128)])
@pytest.mark.parametrize("shared", [False, True])
def test_lists_of_packed_sequences(block_size, causal, shared):
    tensors, ends = random_pack(4, 2, (150, 0, 33, 1, 90), 16, key_lengths=(170, 20, 5, 1, 90))
    rows, columns = (block_size, block_size) if isinstance(block_size, int) else block_size
    shape = (1 if shared else 5, 1 if shared else 4, -(-150 // rows), -(-170 // columns))
    block_map = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    block_map[-1, -1, 0] = False  # a row without a block
    check_pack_against_sequences(tensors, ends, block_lists(block_map, block_size), block_size, causal)


def test_lists_with_segment_ids():
    q, k, v = random_inputs(2, 4, 2, 200, 200, 16)
    ids = torch.tensor([0] * 70 + [1] * 5 + [2] * 100 + [-1] * 25).expand(2, -1)
    block_map = torch.rand(2, 4, 13, 13, generator=torch.Generator().manual_seed(2)) < 0.6
    mask = (
        expanded(block_map, 16, 200, 200, True)
        & (ids[:, None, :, None] == ids[:, None, None])
        & (ids != -1)[:, None, None]
    )
    options = {"causal": True, "query_segment_ids": ids}
    ours, theirs = attention(q, k, v, block_mask=block_lists(block_map, 16), **options), attention(q, k, v, mask=mask)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for mine, other in zip(
        torch.autograd.grad(ours.square().sum(), (q, k, v)), torch.autograd.grad(theirs.square().sum(), (q, k, v)),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_selection_of_a_pack_is_that_of_its_sequences(causal):
    lengths, key_lengths = (300, 0, 47, 130, 16), (280, 40, 47, 210, 1)
    (q, k, _), ends = random_pack(4, 2, lengths, 16, seed=3, key_lengths=key_lengths)
    options = {"sparsity": 0.6, "block_size": 16, "causal": causal, "key_parts": 2}
    lists = select_blocks(
        q, k, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], max_seqlen_q=300, max_seqlen_k=280, **options
    )
    kept = lists.block_map()
    assert kept.shape == (5, 4, 19, 18)
    for i, (queries, keys) in enumerate(zip(lengths, key_lengths, strict=True)):
        rows = q[int(ends[0][i]) :][:queries][None], k[int(ends[1][i]) :][:keys][None]
        alone = select_blocks(*rows, layout="bshd", **options).block_map()[0]
        wanted = torch.zeros_like(kept[i])
        wanted[:, : alone.shape[1], : alone.shape[2]] = alone
        assert torch.equal(kept[i], wanted), i
    tensors, ends = random_pack(4, 2, lengths, 16, seed=3, key_lengths=key_lengths)
    check_pack_against_sequences(tensors, ends, lists, 16, causal)


def test_bad_packs_are_named():
    (q, k, v), ends = random_pack(2, 2, (40, 20), 16)
    with pytest.raises(ValueError, match="without the longest sequence"):
        select_blocks(q, k, cu_seqlens_q=ends[0])
    with pytest.raises(ValueError, match=r"pack it as \[tokens, heads, size\]"):
        select_blocks(q[None], k[None], cu_seqlens_q=ends[0], max_seqlen_q=40, max_seqlen_k=40)
    with pytest.raises(RuntimeError, match="it must be \\[2, 2, 3\\], where batch and heads may be 1"):
        attention(
            q, k, v, block_mask=block_lists(torch.ones(3, 2, 3, 3, dtype=torch.bool), 16),
            cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], max_seqlen_q=40, max_seqlen_k=40,
        )  # fmt: skip
    with pytest.raises(RuntimeError, match="lengths has shape"):
        select_by_scores(torch.rand(2, 1, 4, 4), 64, 64, block_size=16, query_lengths=torch.ones(3, dtype=torch.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block_size", [128, (128, 64), 32])
def test_packed_lists_on_the_gpu(causal, block_size):
    lengths, key_lengths = (900, 0, 130, 1, 500, 64), (1000, 20, 130, 7, 300, 64)
    tensors, ends = random_pack(4, 2, lengths, 64, dtype=torch.bfloat16, key_lengths=key_lengths)
    tensors = [x.detach().cuda().requires_grad_() for x in tensors]
    ends = [e.cuda() for e in ends]
    rows, columns = (block_size, block_size) if isinstance(block_size, int) else block_size
    for batch in (1, 6):
        block_map = torch.rand(batch, 4, -(-900 // rows), -(-1000 // columns)) < 0.5
        lists = block_lists(block_map.cuda(), block_size)
        check_pack_against_sequences(tensors, ends, lists, block_size, causal, tolerance=1.5e-2)
    options = {"sparsity": 0.6, "block_size": block_size, "causal": causal, "max_seqlen_q": 900, "max_seqlen_k": 1000}
    whole = [(x.detach() * 4).round() for x in tensors[:2]]  # sums are exact in every order
    ours = select_blocks(*whole, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], key_parts=1, **options)
    cpu = [x.cpu() for x in (*whole, *ends)]
    theirs = select_blocks(*cpu[:2], cu_seqlens_q=cpu[2], cu_seqlens_k=cpu[3], key_parts=1, **options)
    assert torch.equal(ours.counts().cpu(), theirs.counts())


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_uneven_lists_on_the_gpu(causal):
    """Longest first changes no result: lists of very different lengths, ends that hang over, against the CPU's."""
    q, k, v = random_inputs(2, 8, 4, 2450, 2700, 64, dtype=torch.bfloat16)
    share = torch.rand(2, 8, 20, 1, generator=torch.Generator().manual_seed(3)) ** 4
    block_map = torch.rand(2, 8, 20, 22, generator=torch.Generator().manual_seed(4)) < share
    block_map[:, :, 5] = True  # a row that sees all, a column that all see
    block_map[:, :, :, 0] = True
    grad = torch.randn(2, 8, 2450, 64).bfloat16()
    results = []
    for device in ("cpu", "cuda"):
        tensors = [x.detach().to(device).requires_grad_() for x in (q, k, v)]
        output = attention(*tensors, causal=causal, block_mask=block_lists(block_map.to(device), 128))
        results.append([x.float().cpu() for x in (output, *torch.autograd.grad(output, tensors, grad.to(device)))])
    for mine, other in zip(*results, strict=True):
        assert (mine - other).norm() / other.norm() < 0.01
