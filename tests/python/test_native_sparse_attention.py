"""native_sparse_attention and lightning_indexer against their definitions in fp64 torch operations."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch.attention import NativeSparseAttention  # noqa: E402

from kernel_pytorch import functional as F  # noqa: E402


def choose(importance: Any, place: int, o: dict[str, int]) -> list[int]:
    """Blocks of one token, of the compressed probabilities summed over a group."""
    candidates, ratio = place // o["block_size"] + 1, o["block_size"] // o["stride"]
    spans = o["compress"] // o["stride"]
    local = [j for j in range(candidates - 1, -1, -1) if j >= candidates - o["local"]]
    forced = local + [j for j in range(min(o["first"], candidates)) if j not in local]
    scores = {
        j: sum(
            float(importance[c])
            for stride in range(j * ratio, (j + 1) * ratio)
            for c in range(max(0, stride - spans + 1), min(stride + 1, len(importance)))
        )
        for j in range(candidates)
        if j not in forced
    }
    rest = sorted(scores, key=lambda j: (-scores[j], j))
    return sorted((forced + rest)[: o["blocks"]])


def reference(query: Any, key: Any, value: Any, gates: Any, lists: Any = None, window: int = 512, **o: Any) -> Any:
    """Dense attention with a mask for each branch; returns the output and the lists."""
    (batch, queries, heads, size), (_, keys, key_heads, _) = query.shape, key.shape
    group, offset = heads // key_heads, keys - queries
    count = (keys - o["compress"]) // o["stride"] + 1 if keys >= o["compress"] else 0
    blocks = [slice(c * o["stride"], c * o["stride"] + o["compress"]) for c in range(count)]
    means = [torch.stack([x[:, one].mean(1) for one in blocks], 1) if count else x[:, :0] for x in (key, value)]
    places = torch.arange(queries)[:, None] + offset

    def attend(k: Any, v: Any, keep: Any) -> Any:
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, k) * size**-0.5
        weights = scores.masked_fill(~keep, -torch.inf).softmax(-1)
        weights = torch.where(keep.any(-1, keepdim=True), weights, 0)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v), weights

    ends = torch.arange(count) * o["stride"] + o["compress"] - 1
    compressed, weights = attend(*means, (ends <= places)[None, None])
    if lists is None:
        importance = weights.detach().unflatten(1, (key_heads, group)).sum(2)
        lists = torch.full((batch, queries, key_heads, o["blocks"]), -1)
        for b in range(batch):
            for q in range(max(0, -offset), queries):
                for h in range(key_heads):
                    found = choose(importance[b, h, q][ends <= q + offset], q + offset, o)
                    lists[b, q, h, : len(found)] = torch.tensor(found)
    of_block = torch.arange(keys) // o["block_size"]
    listed = (lists[..., None] == of_block).any(3).transpose(1, 2).repeat_interleave(group, 1)
    seen = torch.arange(keys) <= places
    selected, _ = attend(key, value, listed & seen)
    near, _ = attend(key, value, (seen & (torch.arange(keys) > places - window))[None, None])
    output = sum(g[..., None] * x for g, x in zip(gates, (compressed, selected, near)) if g is not None)
    return output, lists


def inputs(
    batch: int, queries: int, keys: int, heads: int, key_heads: int, size: int, dtype: Any, values: int = 0
) -> Any:
    torch.manual_seed(queries + heads)
    shapes = (queries, heads, size), (keys, key_heads, size), (keys, key_heads, values or size)
    tensors = [torch.randn(batch, *shape, dtype=dtype) for shape in shapes]
    return tensors, torch.rand(batch, queries, heads, 3, dtype=dtype)


PAPER = dict(block_size=16, blocks=4, compress=8, stride=4, first=1, local=2)
EJ = dict(block_size=8, blocks=3, compress=8, stride=8, first=0, local=1)


def ours(form: str, o: dict[str, int]) -> dict[str, Any]:
    given = dict(form=form, block_size=o["block_size"], blocks=o["blocks"])
    return given if form == "ejkernel" else given | dict(compress_block=o["compress"], compress_stride=o["stride"])


@pytest.mark.parametrize("form,o", [("paper", PAPER), ("ejkernel", EJ)])
@pytest.mark.parametrize("sizes", [(2, 45, 45, 4, 2, 24), (1, 6, 60, 3, 3, 16), (1, 40, 9, 4, 1, 8)])
def test_values_lists_and_gradients(form: str, o: dict[str, int], sizes: tuple[int, ...]) -> None:
    tensors, gates = inputs(*sizes, torch.float64, values=12)
    leaves = [x.requires_grad_() for x in (*tensors, gates)]
    expected, lists = reference(*leaves[:3], leaves[3].unbind(-1), window=13, **o)
    direction = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves, direction)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 3e-5), (torch.bfloat16, 3e-2)):
        typed = [x.detach().to(dtype).requires_grad_() for x in leaves]
        # 16-bit scores may change places: the lists are given.
        given = dict(block_indices=lists) if dtype is torch.bfloat16 else {}
        output, chosen = F.native_sparse_attention(
            *typed[:3], gates=typed[3], window=13, return_indices=True, **ours(form, o), **given
        )
        assert output.dtype is dtype and chosen.dtype is torch.int32
        if not given:
            assert torch.equal(chosen.long(), lists)
        torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
        for one, other in zip(torch.autograd.grad(output, typed, direction.to(dtype)), wanted):
            torch.testing.assert_close(one.double(), other, atol=4 * tolerance, rtol=4 * tolerance)


def test_branches_can_be_left_out_and_weighted_by_numbers() -> None:
    tensors, _gates = inputs(1, 50, 50, 4, 2, 16, torch.float64)
    options = dict(window=7, **ours("paper", PAPER))
    for which in range(3):
        only = [None] * 3
        only[which] = torch.full((1, 50, 4), 0.5, dtype=torch.float64)
        expected, _ = reference(*tensors, only, window=7, **PAPER)
        numbers = [None if g is None else 0.5 for g in only]
        torch.testing.assert_close(F.native_sparse_attention(*tensors, gates=numbers, **options), expected)
    assert not F.native_sparse_attention(*tensors, gates=(None, None, None)).any()


def test_given_lists_are_read_in_any_order_and_what_is_not_there_is_skipped() -> None:
    tensors, _ = inputs(1, 40, 40, 2, 1, 8, torch.float32)
    lists = torch.full((1, 40, 1, 3), -1)
    lists[0, :, 0, 0], lists[0, 10:, 0, 2] = 1000, 0
    output = F.native_sparse_attention(*tensors, gates=(None, 1.0, None), block_indices=lists, block_size=8)
    assert not output[:, :10].any()
    k, v = (x[:, :8].repeat_interleave(2, 2).transpose(1, 2) for x in tensors[1:])
    dense = torch.nn.functional.scaled_dot_product_attention(tensors[0].transpose(1, 2)[:, :, 10:], k, v)
    torch.testing.assert_close(output[:, 10:], dense.transpose(1, 2))


def test_compressed_rows_can_be_given_and_have_gradients() -> None:
    tensors, gates = inputs(1, 45, 45, 2, 2, 8, torch.float64)
    options = dict(window=5, **ours("paper", PAPER))
    means = [torch.stack([x[:, c * 4 : c * 4 + 8].mean(1) for c in range(10)], 1) for x in tensors[1:]]
    means = [x.requires_grad_() for x in means]
    given = F.native_sparse_attention(
        *tensors, gates=gates, compressed_key=means[0], compressed_value=means[1], **options
    )
    torch.testing.assert_close(given, F.native_sparse_attention(*tensors, gates=gates, **options))

    def of(k: Any, v: Any) -> Any:
        lists = torch.randint(0, 3, (1, 45, 2, 2), generator=torch.Generator().manual_seed(1))
        return F.native_sparse_attention(
            *tensors, gates=gates, compressed_key=k, compressed_value=v, block_indices=lists, **options
        )

    assert torch.autograd.gradcheck(of, means)


def test_packed_sequences_are_those_alone() -> None:
    tensors, gates = inputs(1, 90, 90, 4, 2, 16, torch.float32)
    ends = [0, 33, 33, 34, 80]
    options = dict(window=6, **ours("paper", PAPER))
    leaves = [x.requires_grad_() for x in tensors]
    packed, lists = F.native_sparse_attention(
        *leaves, gates=gates, cu_seqlens=torch.tensor(ends), return_indices=True, **options
    )
    assert not packed[:, 80:].any()
    grads = torch.autograd.grad(packed.square().sum(), leaves)
    for begin, end in itertools.pairwise(ends):
        alone = [x[:, begin:end].detach().requires_grad_() for x in tensors]
        output, its_lists = F.native_sparse_attention(*alone, gates=gates[:, begin:end], return_indices=True, **options)
        torch.testing.assert_close(packed[:, begin:end], output)
        assert torch.equal(lists[:, begin:end], its_lists)
        for one, other in zip(torch.autograd.grad(output.square().sum(), alone), grads):
            torch.testing.assert_close(other[:, begin:end], one, atol=1e-5, rtol=1e-5)


def test_equal_scores_take_the_smaller_block() -> None:
    query, key = torch.ones(1, 64, 1, 4), torch.ones(1, 64, 1, 4)
    _, lists = F.native_sparse_attention(
        query, key, key, gates=(None, 1.0, None), block_size=4, blocks=4, form="ejkernel", return_indices=True
    )
    assert lists[0, 63, 0].tolist() == [0, 1, 2, 15]
    assert lists[0, 2, 0].tolist() == [0, -1, -1, -1]


def test_odd_inputs() -> None:
    empty = torch.randn(1, 0, 2, 8, requires_grad=True)
    out = F.native_sparse_attention(empty, empty, empty, gates=torch.zeros(1, 0, 2, 3))
    assert out.shape == (1, 0, 2, 8)
    assert torch.autograd.grad(out.sum(), empty)[0].shape == empty.shape
    tensors, gates = inputs(2, 33, 33, 4, 2, 8, torch.float32)
    wide = [
        torch.randn(x.shape[0], x.shape[2], x.shape[1], 3 * x.shape[3])[..., ::3]
        .copy_(x.transpose(1, 2))
        .transpose(1, 2)
        for x in tensors
    ]
    torch.testing.assert_close(
        F.native_sparse_attention(*wide, gates=gates), F.native_sparse_attention(*tensors, gates=gates)
    )
    for change, words in (
        (dict(form="flash"), "form"),
        (dict(compress_stride=5), "divide"),
        (dict(block_size=24), "divide"),
        (dict(block_size=0), "block_size"),
        (dict(window=0), "window"),
        (dict(local_blocks=0), "local_blocks"),
        (dict(compressed_key=tensors[1]), "both or neither"),
        (dict(gates=(1.0, 1.0)), "three"),
        (dict(gates=gates[..., :2]), r"\[batch, queries, heads, 3\]"),
        (dict(cu_seqlens=torch.tensor([0, 33])), "batch is 1"),
    ):
        with pytest.raises(RuntimeError, match=words):
            F.native_sparse_attention(*tensors, **{"gates": gates} | change)
    with pytest.raises(RuntimeError, match="must be a multiple"):
        F.native_sparse_attention(tensors[0][:, :, :3], *tensors[1:], gates=gates[:, :, :3])


def test_compile_and_vmap() -> None:
    tensors, gates = inputs(2, 40, 40, 2, 2, 8, torch.float32)
    call = lambda q, k, v, g: F.native_sparse_attention(q, k, v, gates=g, window=5, **ours("paper", PAPER))  # noqa: E731
    expected = call(*tensors, gates)
    torch.testing.assert_close(torch.compile(call, backend="aot_eager", fullgraph=True)(*tensors, gates), expected)
    mapped = torch.func.vmap(call)(*(x[:, None] for x in tensors), gates[:, None])
    torch.testing.assert_close(mapped[:, 0], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_what_is_multiplied(dtype: Any) -> None:
    tensors, gates = inputs(1, 40, 40, 2, 2, 8, torch.float32)
    options = dict(window=5, **ours("paper", PAPER))
    means = [torch.stack([x[:, c * 4 : c * 4 + 8].mean(1) for c in range(9)], 1) for x in tensors[1:]]
    lists = torch.randint(0, 3, (1, 40, 2, 2))
    leaves = [x.requires_grad_() for x in (tensors[0].to(dtype), *tensors[1:], gates)]
    with torch.autocast("cpu", dtype):
        output = F.native_sparse_attention(
            *leaves[:3],
            gates=leaves[3],
            compressed_key=means[0],
            compressed_value=means[1],
            block_indices=lists,
            **options,
        )
    assert output.dtype == dtype
    expected = F.native_sparse_attention(
        *(x.to(dtype) for x in leaves[:3]), gates=leaves[3], compressed_key=means[0].to(dtype),
        compressed_value=means[1].to(dtype), block_indices=lists, **options,
    )  # fmt: skip
    assert torch.equal(output, expected)
    grads = torch.autograd.grad(output.float().sum(), leaves)
    assert [x.dtype for x in grads] == [dtype, torch.float32, torch.float32, torch.float32]


def test_layer_trains_and_counts_its_gates() -> None:
    layer = NativeSparseAttention(
        32, 4, num_kv_heads=2, block_size=8, blocks=3, window=6, compress_block=8, compress_stride=4
    )
    x = torch.randn(2, 50, 32, requires_grad=True)
    layer(x).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())
    other = NativeSparseAttention(
        32, 4, num_kv_heads=2, block_size=8, blocks=3, window=6, compress_block=8, compress_stride=4
    )
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(x), layer(x))
    causal = layer(x[:, :20])
    torch.testing.assert_close(causal, layer(x)[:, :20], atol=1e-5, rtol=1e-5)
    for tokens in (0, 1, 7):  # none, one, less than a block
        x = torch.randn(2, tokens, 32, requires_grad=True)
        output = layer(x)
        assert output.shape == x.shape
        assert torch.autograd.grad(output.sum(), x)[0].shape == x.shape
    with pytest.raises(ValueError, match="num_kv_heads"):
        NativeSparseAttention(32, 4, num_kv_heads=3)


def indexed(query: Any, key: Any, weights: Any, top: int, scale: Any = None) -> Any:
    scores = torch.einsum("bqhd,bkd->bqhk", query.double(), key.double()).relu()
    scores = (weights.double()[..., None] * scores).sum(2)
    scores = scores if scale is None else scores * scale[:, None].double()
    queries, keys = scores.shape[1:]
    seen = torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries
    scores = scores.masked_fill(~seen, -torch.inf)
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :top]
    order = torch.where(seen.expand_as(scores).gather(-1, order), order, keys).sort(-1).values
    missing = torch.full((*order.shape[:2], top - order.shape[-1]), keys)
    order = torch.cat([order, missing], -1)
    return torch.where(order == keys, -1, order).int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_indexer_takes_the_best_keys(dtype: Any) -> None:
    torch.manual_seed(0)
    for queries, keys, heads, size, top in (
        (40, 40, 4, 32, 9),
        (3, 130, 5, 20, 64),
        (20, 7, 1, 8, 30),
        (1, 300, 2, 16, 1),
    ):
        query = torch.randint(-2, 3, (2, queries, heads, size)).to(dtype)
        key, weights = (
            torch.randint(-2, 3, (2, keys, size)).to(dtype),
            torch.randint(-3, 4, (2, queries, heads)).float(),
        )
        scale = torch.randint(1, 3, (2, keys)).float()
        assert torch.equal(
            F.lightning_indexer(query, key, weights, top_k=top, key_scale=scale),
            indexed(query, key, weights, top, scale),
        )


def test_indexer_in_pages_feeds_attention_over_latent_rows() -> None:
    torch.manual_seed(1)
    tables, lengths = torch.tensor([[3, 0, 5], [1, 4, 2]]), torch.tensor([11, 7])
    pages, latent = torch.randn(6, 4, 8), torch.randn(6, 4, 24)
    query, weights = torch.randn(2, 1, 2, 8), torch.rand(2, 1, 2)
    slots = F.lightning_indexer(query, pages, weights, top_k=4, key_lengths=lengths, block_tables=tables)
    heads = torch.randn(2, 3, 24)
    output = F.mla_decode(heads, latent, indices=slots[:, 0], head_size_v=16)
    for b in range(2):
        order = (tables[b][:, None] * 4 + torch.arange(4)).flatten()[: lengths[b]]
        chosen = indexed(query[b : b + 1], pages.flatten(0, 1)[order][None], weights[b : b + 1], 4)[0, 0]
        assert torch.equal(slots[b, 0].long(), order[chosen.long()])
        rows = latent.flatten(0, 1)[slots[b, 0].long()]
        probabilities = (heads[b] @ rows.T * 24**-0.5).softmax(-1)
        torch.testing.assert_close(output[b], probabilities @ rows[:, :16])
    with pytest.raises(RuntimeError, match="key_lengths is missing"):
        F.lightning_indexer(query, pages, weights, block_tables=tables)
    with pytest.raises(RuntimeError, match="has page 9"):
        F.lightning_indexer(query, pages, weights, key_lengths=lengths, block_tables=tables + 6)


def test_indexer_feeds_the_selected_branch() -> None:
    tensors, _ = inputs(1, 30, 30, 2, 1, 8, torch.float32)
    keys, weights = torch.randn(1, 30, 4), torch.rand(1, 30, 2)
    indices = F.lightning_indexer(torch.randn(1, 30, 2, 4), keys, weights, top_k=30)
    output = F.native_sparse_attention(
        *tensors, gates=(None, 1.0, None), block_indices=indices[:, :, None], block_size=1
    )
    k, v = (x.repeat_interleave(2, 2).transpose(1, 2) for x in tensors[1:])
    dense = torch.nn.functional.scaled_dot_product_attention(tensors[0].transpose(1, 2), k, v, is_causal=True)
    torch.testing.assert_close(output, dense.transpose(1, 2))
