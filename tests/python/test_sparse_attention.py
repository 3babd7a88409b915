"""Sparse attention layers: every pattern against the same layer with the expanded mask, and what they say they did."""

from __future__ import annotations

import copy
import inspect
import warnings

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch.attention import (  # noqa: E402
    DynamicSparseAttention,
    FlashAttention3,
    SparsePattern,
    create_sparse_attention,
)
from kernel_pytorch.core import RotaryPositionalEncoding  # noqa: E402
from test_block_lists import expanded  # noqa: E402

SHAPE = (2, 300, 64)


def lists_of(layer, x):
    """The map of the blocks that the layer chooses for x, as forward does."""
    q, k = layer._heads(layer.q_proj(x)), layer._heads(layer.k_proj(x))
    return layer._blocks(q, k)["block_mask"].block_map()


def make(pattern, **options):
    torch.manual_seed(0)
    options = {"sparsity_ratio": 0.7, "block_size": 16, **options}
    return create_sparse_attention(64, 4, pattern=pattern, **options).eval()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", list(SparsePattern))
def test_every_pattern_is_dense_attention_with_its_mask(pattern, causal):
    layer = make(pattern, causal=causal, kv_heads=2)
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), requires_grad=True)
    block_map = lists_of(layer, x)
    assert 0 < block_map.sum() < block_map.numel()
    mask = expanded(block_map, 16, 300, 300, causal)
    output = layer(x)
    wanted = layer.dense(x, attention_mask=mask)
    torch.testing.assert_close(output, wanted, atol=1e-5, rtol=1e-5)
    tensors = [x, layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]
    for ours, theirs in zip(
        torch.autograd.grad(output.square().sum(), tensors),
        torch.autograd.grad(wanted.square().sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("pattern", list(SparsePattern))
@pytest.mark.parametrize("ratio", [0.5, 0.75, 0.9])
def test_stats_count_what_was_computed(pattern, ratio):
    layer = make(pattern, sparsity_ratio=ratio, causal=True)
    x = torch.randn(2, 1024, 64)
    with torch.no_grad():
        layer(x)
        stats = layer.get_attention_stats()
        block_map = lists_of(layer, x)
    assert stats["blocks_total"] == 2 * 4 * 64 * 65 // 2
    assert stats["blocks_computed"] == int(block_map.expand(2, 4, -1, -1).sum())
    assert stats["actual_sparsity"] >= ratio - 1e-9
    if pattern is not SparsePattern.LEARNED:  # gates may be shut
        assert stats["actual_sparsity"] < ratio + 0.02
    assert "relative_error" not in stats


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", [pattern for pattern in SparsePattern if pattern is not SparsePattern.LEARNED])
def test_ratios_are_reached_at_every_length(pattern, causal):
    """Blocks get smaller until a row can leave out what is asked; where it cannot, the warning says what it can."""
    for tokens in (64, 100, 200, 512, 1000, 3000, 4096):
        heads = torch.randn(1, tokens, 1, 8)
        for ratio in (0.25, 0.5, 0.9, 0.95):
            layer = create_sparse_attention(8, 1, ratio, pattern, causal=causal)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                layer._blocks(heads, heads)
            actual = layer.get_attention_stats()["actual_sparsity"]
            if said:
                assert tokens == 64 and ratio == 0.95 and causal
                assert f"reach {actual:.3f}" in str(said[0].message)
            else:
                assert actual == pytest.approx(ratio, abs=0.02), (tokens, ratio)


def test_a_ratio_that_a_block_size_cannot_reach_is_said_once():
    layer = make(SparsePattern.DYNAMIC_THRESHOLD, sparsity_ratio=0.9, block_size=64)
    x = torch.randn(1, 512, 64)
    with pytest.warns(UserWarning, match=r"sparsity_ratio is 0.9, and 512 x 512 tokens in blocks of 64 reach 0\.5"):
        layer(x)
    assert layer.get_attention_stats()["actual_sparsity"] == pytest.approx(0.55, abs=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x)
    with pytest.raises(ValueError, match=r"sparsity_ratio is 1\.0; use one from 0 to below 1"):
        make(SparsePattern.RANDOM, sparsity_ratio=1.0)


def weights_of(layer, x, causal):
    """The dense attention weights of the layer in double, [heads, queries, keys], and its values."""
    exact = copy.deepcopy(layer).double()
    q, k, v = (exact._heads(p(x.double()))[0].transpose(0, 1) for p in (exact.q_proj, exact.k_proj, exact.v_proj))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return scores.softmax(-1), v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", list(SparsePattern))
def test_the_error_is_bounded_by_the_weight_that_is_left_out(pattern, causal):
    """Left-out weight m of a row: its output is off by at most 2 m times the largest value, whatever the pattern."""
    layer = make(pattern, causal=causal, sparsity_ratio=0.6)
    with torch.no_grad():
        layer.out_proj.weight.copy_(torch.eye(64))
        x = torch.randn(1, 256, 64, generator=torch.Generator().manual_seed(7))
        kept = expanded(lists_of(layer, x), 16, 256, 256, causal)[0].expand(4, -1, -1)
        weights, values = weights_of(layer, x, causal)
        left_out = (weights * ~kept).sum(-1)
        error = (layer(x) - layer.dense(x))[0].double().unflatten(-1, (4, 16)).transpose(0, 1).abs().amax(-1)
        bound = 2 * left_out * values.abs().amax((-2, -1))[:, None]
    assert (error <= bound + 1e-5).all()
    assert left_out.max() > 0.1 and error.max() > 1e-3  # the bound has something to bound


def topics(tokens, count, run, generator):
    """Tokens that belong to topics, in runs; queries of one agree with its keys alone."""
    directions = torch.linalg.qr(torch.randn(64, 64, generator=generator)).Q[:count]
    order = torch.randint(count, (tokens // run,), generator=generator).repeat_interleave(run)
    return 8 * directions[order] + 0.1 * torch.randn(tokens, 64, generator=generator)


@pytest.mark.parametrize("ratio", [0.8, 0.9])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_that_agrees_with_few_keys_loses_less_than_one_percent(causal, ratio):
    """16 topics of one head: a row's weight lies in a sixteenth of the blocks, which a choice by content must find."""
    torch.manual_seed(3)
    x = topics(2048, 16, 16, torch.Generator().manual_seed(11))[None]
    errors = {}
    for pattern in SparsePattern:
        layer = create_sparse_attention(64, 1, ratio, pattern, causal=causal, block_size=16).eval()
        with torch.no_grad():
            for projection in (layer.q_proj, layer.k_proj):
                projection.weight.copy_(torch.eye(64) * 2)
            layer.v_proj.weight.copy_(torch.eye(64))
            if layer.gate is not None:
                layer.gate.offset.fill_(100.0)  # gates open: the ratio alone decides
            errors[pattern] = layer.get_attention_stats(x)["relative_error"]
    assert errors[SparsePattern.DYNAMIC_THRESHOLD] < 0.01, errors
    assert errors[SparsePattern.LEARNED] < 0.01, errors
    for pattern in (
        SparsePattern.RANDOM,
        SparsePattern.STRIDED,
        SparsePattern.LOCAL_GLOBAL,
        SparsePattern.BLOCK_SPARSE,
    ):
        assert errors[pattern] > 0.01, errors  # shape alone does not know where they are


def test_errors_are_measured_on_request():
    layer = make(SparsePattern.DYNAMIC_THRESHOLD, causal=True)
    x = torch.randn(SHAPE)
    with pytest.raises(RuntimeError, match="nothing was computed yet"):
        layer.get_attention_stats()
    stats = layer.get_attention_stats(x)
    with torch.no_grad():
        wanted = (layer(x) - layer.dense(x)).norm() / layer.dense(x).norm()
    assert stats["relative_error"] == pytest.approx(float(wanted), rel=1e-4)
    layer.sparsity_ratio = 0.0
    stats = layer.get_attention_stats(x)
    assert stats["computed_share"] == 1.0 and stats["relative_error"] < 1e-6


def test_content_moves_the_choice_of_dynamic_patterns_alone():
    first, second = torch.randn(1, 512, 64), torch.randn(1, 512, 64)
    for pattern in SparsePattern:
        layer = make(pattern, sparsity_ratio=0.8)
        with torch.no_grad():
            same = torch.equal(lists_of(layer, first), lists_of(layer, second))
        assert same == (pattern not in (SparsePattern.DYNAMIC_THRESHOLD, SparsePattern.LEARNED)), pattern


def test_dynamic_selection_finds_what_matters():
    """Keys in one far block answer the queries of another: the choice by content keeps it, and so the output."""
    layer = make(SparsePattern.DYNAMIC_THRESHOLD, sparsity_ratio=0.9, sinks=0)
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj):
            projection.weight.copy_(8 * torch.eye(64))
        x = 0.1 * torch.randn(1, 1024, 64, generator=torch.Generator().manual_seed(5))
        direction = torch.randn(64, generator=torch.Generator().manual_seed(6)).sign()
        x[:, 160:176] += direction
        x[:, 800:816] += direction
        error = (layer(x) - layer.dense(x)).norm() / layer.dense(x).norm()
        blind = make(SparsePattern.LOCAL_GLOBAL, sparsity_ratio=0.9, sinks=0)
        blind.load_state_dict(layer.state_dict())
        assert bool(lists_of(layer, x)[0, :, 50, 10].all())
        assert not bool(lists_of(blind, x)[0, :, 50, 10].any())
        rows = slice(800, 816)
        lost = (blind(x) - layer.dense(x))[:, rows].norm() / layer.dense(x)[:, rows].norm()
        kept = (layer(x) - layer.dense(x))[:, rows].norm() / layer.dense(x)[:, rows].norm()
    assert kept < 0.05 < lost
    assert error < 1.0


def test_lists_of_fixed_patterns_are_made_once_a_shape():
    layer = make(SparsePattern.RANDOM)
    with torch.no_grad():
        layer(torch.randn(1, 128, 64))
        layer(torch.randn(3, 128, 64))
        assert len(layer._shapes) == 1
        for length in range(16, 16 * 20, 16):
            layer(torch.randn(1, length, 64))
    assert len(layer._shapes) == 16
    other = make(SparsePattern.RANDOM, seed=1)
    x = torch.randn(1, 256, 64)
    assert not torch.equal(lists_of(layer, x), lists_of(other, x))


def test_gates_close_to_the_share_that_is_asked_for():
    """Trained alone, with the loss of the output and of the share; the projections stay."""
    layer = make(SparsePattern.LEARNED, sparsity_ratio=0.75, local=0, sinks=0).train()
    assert layer.gate is not None
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    x = torch.randn(2, 128, 64, generator=torch.Generator().manual_seed(2))
    wanted = layer.dense(x).detach()
    optimizer = torch.optim.Adam(layer.gate.parameters(), lr=0.06)
    shares = []
    for _ in range(15):
        error = (layer(x) - wanted).square().mean()
        loss = error + layer.sparsity_loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shares.append(float(layer.sparsity_loss().detach()))
    assert shares[-1] < 0.2 * shares[0]
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]) != name.startswith("gate."), name
    layer.eval()
    with torch.no_grad():
        assert layer.get_attention_stats(x)["actual_sparsity"] >= 0.75


def test_straight_through_gradient_is_that_of_a_bias_of_the_block():
    layer = make(SparsePattern.LEARNED, causal=True)
    x = torch.randn(1, 64, 64)
    q, k, v = (layer._heads(p(x)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    options = layer._blocks(q.transpose(1, 2), k.transpose(1, 2))
    block_map = options["block_mask"].block_map()
    mask = expanded(block_map, 16, 64, 64, True)
    gates = layer.gate(q.transpose(1, 2), k.transpose(1, 2), 16).sigmoid()
    bias = torch.zeros(1, 4, 4, 4, requires_grad=True)
    wide = bias.repeat_interleave(16, -1).repeat_interleave(16, -2)
    scores = (q @ k.transpose(-1, -2) / 4 + wide).masked_fill(~mask, -torch.inf)
    wanted = layer.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))
    (of_bias,) = torch.autograd.grad(wanted.square().sum(), bias, retain_graph=True)
    wanted_gradients = torch.autograd.grad(gates, list(layer.gate.parameters()), of_bias)
    ours = torch.autograd.grad(layer(x).square().sum(), list(layer.gate.parameters()))
    for mine, other in zip(ours, wanted_gradients, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-3)


def test_parameters_are_a_dense_layers():
    sparse = make(SparsePattern.DYNAMIC_THRESHOLD, sparsity_ratio=0.0, causal=True)
    dense = FlashAttention3(sparse.config)
    dense.load_state_dict(sparse.state_dict())
    x = torch.randn(SHAPE)
    torch.testing.assert_close(sparse(x), dense(x))
    torch.testing.assert_close(sparse.dense(x), dense(x))


def test_signatures_are_the_seeds():
    arguments = list(inspect.signature(create_sparse_attention).parameters.values())[:4]
    assert [a.name for a in arguments] == ["d_model", "num_heads", "sparsity_ratio", "pattern"]
    assert arguments[2].default == 0.9 and arguments[3].default is SparsePattern.DYNAMIC_THRESHOLD
    assert [p.value for p in SparsePattern] == [
        "random", "block_sparse", "strided", "local_global", "dynamic_threshold", "learned",
    ]  # fmt: skip
    layer = create_sparse_attention(d_model=512, num_heads=8, sparsity_ratio=0.9)
    assert isinstance(layer, DynamicSparseAttention)
    assert layer(torch.randn(1, 200, 512)).shape == (1, 200, 512)
    stats = layer.get_attention_stats()
    assert stats["block_size"] == 4 and stats["actual_sparsity"] == pytest.approx(0.9, abs=0.02)


def test_masks_lengths_and_odd_sizes():
    layer = make(SparsePattern.DYNAMIC_THRESHOLD, causal=True)
    x = torch.randn(2, 77, 64)
    kept = torch.rand(2, 1, 77, 77) < 0.7
    lengths = torch.tensor([50, 77], dtype=torch.int32)
    with torch.no_grad():
        mask = expanded(lists_of(layer, x), 16, 77, 77, True)
        wanted = layer.dense(x, attention_mask=mask & kept, key_lengths=lengths)
        ours = layer(x, attention_mask=kept, key_lengths=lengths)
        torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)
        assert layer(torch.randn(2, 0, 64)).shape == (2, 0, 64)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", list(SparsePattern))
def test_packed_sequences_are_as_sparse_as_alone(pattern, causal):
    """Every pattern of a pack is that of its sequences, in outputs, in gradients and in what it says it computed."""
    lengths = (300, 0, 47, 1, 180)
    layer = make(pattern, causal=causal, kv_heads=2)
    x = torch.randn(sum(lengths), 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    rotary = RotaryPositionalEncoding(16, 300)(torch.empty(300, 16))
    output = layer(x, cu_seqlens=ends, max_seqlen=300, rotary=rotary)
    stats = layer.get_attention_stats()
    alone, total, computed = [], 0, 0
    for one in x.split(lengths):
        is_alike = pattern not in (SparsePattern.STRIDED, SparsePattern.RANDOM, SparsePattern.BLOCK_SPARSE)
        if len(one) == 0 or not (is_alike or len(one) == 300):
            continue  # strides of the longest, random numbers of another shape
        alone.append(layer(one[None], rotary=tuple(table[: len(one)] for table in rotary))[0])
        of_one = layer.get_attention_stats()
        total, computed = total + of_one["blocks_total"], computed + of_one["blocks_computed"]
    wanted = torch.cat(alone)
    torch.testing.assert_close(output[: len(wanted)], wanted, atol=1e-5, rtol=1e-5)
    if len(wanted) == len(x):
        assert (stats["blocks_total"], stats["blocks_computed"]) == (total, computed)
    assert stats["actual_sparsity"] > 0.3
    (ours,) = torch.autograd.grad(output[: len(wanted)].square().sum(), x)
    (theirs,) = torch.autograd.grad(wanted.square().sum(), x)
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


def test_packs_find_their_longest_and_are_checked():
    layer = make(SparsePattern.DYNAMIC_THRESHOLD, causal=True)
    x, ends = torch.randn(90, 64), torch.tensor([0, 50, 90])
    with torch.no_grad():
        torch.testing.assert_close(layer(x, cu_seqlens=ends), layer(x, cu_seqlens=ends, max_seqlen=50))
        assert layer.get_attention_stats(x, cu_seqlens=ends)["relative_error"] > 0
    with pytest.raises(ValueError, match=r"pack it as \[tokens, embed_dim\]"):
        layer(x[None], cu_seqlens=ends)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"sparsity_ratio is 1\.5"):
        create_sparse_attention(64, 4, 1.5)
    with pytest.raises(ValueError, match="pattern is 'dense'"):
        create_sparse_attention(64, 4, pattern="dense")
    with pytest.raises(ValueError, match="block_size is 6"):
        create_sparse_attention(64, 4, block_size=6)
    with pytest.raises(RuntimeError, match="there are no gates"):
        make(SparsePattern.RANDOM).sparsity_loss()


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", list(SparsePattern))
def test_patterns_on_the_gpu(pattern):
    layer = make(pattern, causal=True, block_size=128).cuda().bfloat16()
    x = torch.randn(1, 2048, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with torch.no_grad():
        mask = expanded(lists_of(layer, x), 128, 2048, 2048, True)
    output, wanted = layer(x), layer.dense(x, attention_mask=mask)
    torch.testing.assert_close(output, wanted, atol=2e-2, rtol=2e-2)
    (ours,) = torch.autograd.grad(output.float().square().sum(), x)
    (theirs,) = torch.autograd.grad(wanted.float().square().sum(), x)
    assert (ours - theirs).float().norm() / theirs.float().norm() < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", list(SparsePattern))
def test_packs_on_the_gpu(pattern):
    layer = make(pattern, causal=True, block_size=128)
    x = torch.randn(2300, 64, generator=torch.Generator().manual_seed(1))
    ends = torch.tensor([0, 1500, 1500, 1630, 2300])
    with torch.no_grad():
        wanted = layer(x, cu_seqlens=ends, max_seqlen=1500)
        output = layer.cuda().bfloat16()(x.cuda().bfloat16(), cu_seqlens=ends.cuda(), max_seqlen=1500)
    # Blocks whose scores nearly tie may differ between the types.
    limit = 0.3 if pattern in (SparsePattern.DYNAMIC_THRESHOLD, SparsePattern.LEARNED) else 0.02
    assert (output.float().cpu() - wanted).norm() / wanted.norm() < limit
