"""Lists of blocks and their selection: against attention with the expanded mask, torch's BlockMask, and brute force."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as torch_functional  # noqa: E402
from kernel_pytorch.functional import attention, block_lists, select_blocks, select_by_scores  # noqa: E402


def expanded(block_map, block_size, queries, keys, causal):
    """The mask of scores that a map of blocks means, [batch, heads, queries, keys]."""
    rows, columns = (block_size, block_size) if isinstance(block_size, int) else block_size
    mask = block_map.repeat_interleave(rows, -2).repeat_interleave(columns, -1)[..., :queries, :keys]
    if causal:
        mask = mask & torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril(keys - queries)
    return mask


def random_inputs(batch, heads, key_heads, queries, keys, size, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = (heads, queries), (key_heads, keys), (key_heads, keys)
    return [torch.randn(batch, h, n, size, generator=generator).to(dtype).requires_grad_() for h, n in shapes]


def check_against_dense(q, k, v, lists, block_map, block_size, causal, tolerance=2e-5):
    mask = expanded(block_map, block_size, q.shape[2], k.shape[2], causal)
    ours = attention(q, k, v, causal=causal, block_mask=lists)
    dense = [x.detach().double().requires_grad_() for x in (q, k, v)]
    theirs = torch_functional.scaled_dot_product_attention(*dense, attn_mask=mask, enable_gqa=True)
    theirs = torch.where(mask.any(-1, keepdim=True), theirs, 0.0)  # a row that sees nothing is 0 here
    torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=tolerance)
    grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9))
    for mine, other in zip(
        torch.autograd.grad(ours, (q, k, v), grad), torch.autograd.grad(theirs, dense, grad.double()), strict=True
    ):
        torch.testing.assert_close(mine.double(), other, atol=5 * tolerance, rtol=5 * tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block_size", [16, (32, 16), (64, 128)])
def test_lists_of_a_map_mean_its_mask(block_size, causal):
    q, k, v = random_inputs(2, 4, 2, 200, 300, 32)
    rows, columns = (block_size, block_size) if isinstance(block_size, int) else block_size
    generator = torch.Generator().manual_seed(1)
    block_map = torch.rand(2, 4, -(-200 // rows), -(-300 // columns), generator=generator) < 0.3
    block_map[1, 2, 0] = False  # a row without a block
    lists = block_lists(block_map, block_size)
    assert torch.equal(lists.block_map(), block_map)
    assert torch.equal(lists.counts(), block_map.sum(-1, dtype=torch.int32))
    check_against_dense(q, k, v, lists, block_map, block_size, causal)


def test_one_map_for_all_heads_and_batches():
    q, k, v = random_inputs(2, 4, 4, 100, 100, 16)
    block_map = torch.rand(1, 1, 7, 7, generator=torch.Generator().manual_seed(2)) < 0.5
    check_against_dense(q, k, v, block_lists(block_map, 16), block_map, 16, False)


def test_full_and_partial_blocks_are_those_of_torch():
    from torch.nn.attention.flex_attention import create_block_mask

    def window(b, h, q, k):
        return (q >= k) & (q - k < 100)

    theirs = create_block_mask(window, None, None, 300, 300, device="cpu", BLOCK_SIZE=32)
    dense = window(0, 0, torch.arange(320)[:, None], torch.arange(320)[None]) & (torch.arange(320) < 300)
    tiles = dense[:, :].unflatten(0, (10, 32)).unflatten(2, (10, 32)).transpose(1, 2).flatten(2)
    inside = torch.arange(320).view(10, 32)[:, :1] + 32 <= 300  # torch pads: a tile past the end is partial
    state = tiles.any(-1).to(torch.int8) + (tiles.all(-1) & inside & inside.T).to(torch.int8)
    ours = block_lists(state[None, None], 32)
    for name in ("kv_num_blocks", "q_num_blocks", "full_kv_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for name in ("kv", "q", "full_kv", "full_q"):
        counts, mine, other = (getattr(x, name + end) for x, end in
                               ((ours, "_num_blocks"), (ours, "_indices"), (theirs, "_indices")))  # fmt: skip
        for row, count in enumerate(counts[0, 0].tolist()):
            assert mine[0, 0, row, :count].tolist() == sorted(other[0, 0, row, :count].tolist()), name


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("layout", "key_heads"), [("bhsd", 4), ("bshd", 2)])
def test_selection_keeps_the_blocks_that_agree(causal, layout, key_heads):
    q, k, v = random_inputs(2, 4, key_heads, 256, 256, 16, seed=3)
    given = [x.transpose(1, 2) for x in (q, k)] if layout == "bshd" else [q, k]
    lists = select_blocks(
        *given, sparsity=0.5, block_size=16, causal=causal, layout=layout, key_parts=2, sinks=0, local=0
    )
    pooled = q.unflatten(2, (16, 16)).mean(3)
    parts = k.unflatten(2, (32, 8)).mean(3).repeat_interleave(4 // key_heads, 1)
    scores = (pooled @ parts.transpose(-1, -2)).unflatten(-1, (16, 2)).amax(-1)
    seen = torch.ones(16, 16, dtype=torch.bool).tril() if causal else torch.ones(16, 16, dtype=torch.bool)
    kept = lists.block_map()
    assert not (kept & ~seen).any()
    assert kept.diagonal(dim1=-2, dim2=-1).all()
    assert kept.float().sum() <= 0.5 * seen.sum() * 8
    assert kept.float().sum() > 0.5 * seen.sum() * 8 - 8  # the largest share that fits
    rest = ~torch.eye(16, dtype=torch.bool)
    worst_kept = scores.masked_fill(~(kept & rest), torch.inf).amin(-1)
    best_left = scores.masked_fill(kept | ~seen, -torch.inf).amax(-1)
    assert (worst_kept > best_left).all()
    check_against_dense(q, k, v, lists, kept, 16, causal)


def test_every_row_keeps_the_same_number_until_it_has_no_more():
    scores = torch.rand(1, 1, 40, 40, generator=torch.Generator().manual_seed(0))
    lists = select_by_scores(scores, 40 * 16, 40 * 16, sparsity=0.75, block_size=16, causal=True)
    counts = lists.counts()[0, 0]
    most = int(counts.max())
    allowed = torch.minimum(torch.arange(1, 41), torch.tensor(most))
    assert ((counts == allowed) | (counts == allowed - 1)).all()
    assert 0.74 * 820 <= 820 - counts.sum() <= 0.77 * 820
    assert lists.block_map()[0, 0, :, 0].all()  # the sink


def test_inference_needs_no_transposed_lists():
    q, k, v = random_inputs(1, 2, 2, 128, 128, 16)
    both = select_blocks(q, k, sparsity=0.5, block_size=16)
    one = select_blocks(q, k, sparsity=0.5, block_size=16, gradients=False)
    assert one.q_indices is None and torch.equal(one.kv_indices, both.kv_indices)
    with torch.no_grad():
        assert torch.equal(attention(q, k, v, block_mask=one), attention(q, k, v, block_mask=both))
    with pytest.raises(ValueError, match="q_indices, which gradients need"):
        attention(q, k, v, block_mask=one)


def test_selection_in_a_compiled_function():
    q, k, v = (x.detach() for x in random_inputs(1, 2, 2, 96, 96, 16))

    def run(q, k, v):
        return attention(q, k, v, block_mask=select_blocks(q, k, sparsity=0.5, block_size=16), causal=True)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), run(q, k, v))


def test_bad_arguments_are_named():
    q, k, _ = (x.detach() for x in random_inputs(1, 2, 2, 64, 64, 16))
    with pytest.raises(ValueError, match="cut into 3 parts"):
        select_blocks(q, k, block_size=16, key_parts=3)
    with pytest.raises(ValueError, match='layout is "sbhd"'):
        select_blocks(q, k, layout="sbhd")
    with pytest.raises(RuntimeError, match="sparsity is 2"):
        select_blocks(q, k, sparsity=2.0, block_size=16)
    with pytest.raises(RuntimeError, match="must be"):
        select_by_scores(torch.rand(1, 1, 3, 3), 64, 64, block_size=16)
    with pytest.raises(RuntimeError, match="convert it to int8"):
        block_lists(torch.ones(1, 1, 2, 2), 16)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_the_gpu_makes_the_lists_of_the_cpu(causal):
    generator = torch.Generator().manual_seed(4)
    states = torch.randint(0, 3, (2, 3, 70, 45), generator=generator).to(torch.int8)
    for name, mine in vars(block_lists(states.cuda(), 16)).items():
        other = getattr(block_lists(states, 16), name)
        assert torch.equal(mine.cpu(), other) if isinstance(mine, torch.Tensor) else mine == other, name
    whole = [torch.randint(-3, 4, (2, 4, 1000, 64), generator=generator).float() * 16 for _ in range(2)]
    for dtype in (torch.float32, torch.bfloat16):  # means of whole multiples of the block: exact in every order
        q, k = (x.to(dtype) for x in whole)
        ours = select_blocks(q.cuda(), k.cuda(), sparsity=0.7, block_size=16, causal=causal, key_parts=1)
        theirs = select_blocks(q, k, sparsity=0.7, block_size=16, causal=causal, key_parts=1)
        assert torch.equal(ours.block_map().cpu(), theirs.block_map())
        assert ours.q_indices is not None and torch.equal(ours.q_indices.cpu(), theirs.q_indices)
