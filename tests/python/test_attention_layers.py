"""kernel_pytorch.attention: layers and score mods against attention written out in double."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch.attention import (  # noqa: E402
    AttentionConfig,
    AttentionPatterns,
    FlashAttention3,
    FlexAttentionLayer,
    FlexAttentionMaskMods,
    FlexAttentionScoreMods,
    alibi_slopes,
    create_attention,
    create_flex_attention,
)
from kernel_pytorch.functional import attention  # noqa: E402
from kernel_pytorch.optimizations.next_gen import create_advanced_flex_attention  # noqa: E402

DOUBLE = torch.float64


def written_out(layer, x, change=lambda scores, q, k: scores, key=None):
    """What the layer computes, with whole score matrices."""
    key = x if key is None else key
    config = layer.config
    q = layer.q_proj(x).unflatten(-1, (config.num_heads, -1)).transpose(1, 2)
    k, v = (
        p(key)
        .unflatten(-1, (config.kv_heads, -1))
        .transpose(1, 2)
        .repeat_interleave(config.num_heads // config.kv_heads, 1)
        for p in (layer.k_proj, layer.v_proj)
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(config.head_dim)
    places = torch.arange(x.shape[1])[:, None] + key.shape[1] - x.shape[1], torch.arange(key.shape[1])[None, :]
    weights = change(scores, *places).softmax(-1).nan_to_num(0.0)
    return layer.out_proj((weights @ v).transpose(1, 2).flatten(-2))


def keeping(kept):
    return lambda scores, q, k: scores.masked_fill(~kept(q, k), -math.inf)


PATTERNS = {
    "full": ({}, lambda scores, q, k: scores),
    "causal": ({}, keeping(lambda q, k: k <= q)),
    "sliding_window": ({"sliding_window_size": 3}, keeping(lambda q, k: (k <= q) & (q - k < 3))),
    "local": ({"sliding_window_size": 4}, keeping(lambda q, k: (q - k).abs() < 4)),
    "prefix_lm": ({"prefix_length": 5}, keeping(lambda q, k: (k < 5) | (k <= q))),
}


@pytest.mark.parametrize("pattern", list(PATTERNS))
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_patterns(pattern, kv_heads):
    options, change = PATTERNS[pattern]
    torch.manual_seed(0)
    layer = create_attention(32, 4, pattern=pattern, kv_heads=kv_heads, bias=True, dtype=DOUBLE, **options)
    x = torch.randn(2, 11, 32, dtype=DOUBLE, requires_grad=True)
    output = layer(x)
    expected = written_out(layer, x, change)
    torch.testing.assert_close(output, expected)
    gradients = torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])
    wanted = torch.autograd.grad(expected.square().sum(), [x, *layer.parameters()])
    torch.testing.assert_close(gradients, wanted)


def test_cross_attention_and_masks():
    torch.manual_seed(1)
    layer = FlashAttention3(AttentionConfig(24, 3), dtype=DOUBLE)
    x, memory = torch.randn(2, 5, 24, dtype=DOUBLE), torch.randn(2, 9, 24, dtype=DOUBLE)
    torch.testing.assert_close(layer(x, memory), written_out(layer, x, key=memory))
    seen = torch.rand(2, 1, 5, 9) < 0.6
    expected = written_out(layer, x, lambda scores, q, k: scores.masked_fill(~seen, -math.inf), memory)
    torch.testing.assert_close(layer(x, memory, attention_mask=seen), expected)
    added = torch.randn(3, 5, 9, dtype=DOUBLE, requires_grad=True)
    output = layer(x, memory, attention_mask=added)
    expected = written_out(layer, x, lambda scores, q, k: scores + added, memory)
    torch.testing.assert_close(output, expected)
    (gradient,) = torch.autograd.grad(output.square().sum(), added)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.square().sum(), added)[0])
    lengths = torch.tensor([9, 4], dtype=torch.int32)
    short = layer(x, memory, key_lengths=lengths)[1:]
    torch.testing.assert_close(short, written_out(layer, x[1:], key=memory[1:, :4]))


def test_soft_cap_alibi_and_next_gen_names():
    torch.manual_seed(2)
    layer = create_advanced_flex_attention(32, 4, "alibi", enable_gqa=True, soft_cap=3.0, dtype=DOUBLE)
    assert layer.config.kv_heads == 1 and layer.config.causal
    x = torch.randn(1, 7, 32, dtype=DOUBLE)
    slopes = alibi_slopes(4).double()[:, None, None]

    def change(scores, q, k):
        scores = 3.0 * torch.tanh(scores / 3.0) - slopes * (q - k).abs()
        return scores.masked_fill(k > q, -math.inf)

    torch.testing.assert_close(layer(x), written_out(layer, x, change))
    assert create_advanced_flex_attention(32, 4, "standard").config.pattern is AttentionPatterns.FULL
    assert create_advanced_flex_attention(32, 4, "soft_cap").config.soft_cap == 50.0


def test_alibi_slopes_are_those_of_the_paper():
    torch.testing.assert_close(alibi_slopes(8), 2.0 ** -torch.arange(1.0, 9.0))
    assert alibi_slopes(12).shape == (12,) and alibi_slopes(12)[8] == 2.0**-0.5


MODS = {
    "causal": (lambda: FlexAttentionScoreMods.causal, keeping(lambda q, k: k <= q)),
    "local": (lambda: FlexAttentionScoreMods.local(3), keeping(lambda q, k: (q - k).abs() < 3)),
    "sliding_window": (
        lambda: FlexAttentionScoreMods.sliding_window(3),
        keeping(lambda q, k: (q >= k) & (q - k < 3)),
    ),
    "causal_sliding_window": (
        lambda: FlexAttentionScoreMods.causal_sliding_window(3),
        keeping(lambda q, k: (q >= k) & (q - k < 3)),
    ),
    "alibi": (
        lambda: FlexAttentionScoreMods.alibi(4),
        lambda scores, q, k: scores - alibi_slopes(4).double()[:, None, None] * (q - k).abs(),
    ),
    "document": (
        lambda: FlexAttentionScoreMods.document_masking(torch.arange(9) // 4),
        keeping(lambda q, k: q // 4 == k // 4),
    ),
    "prefix_lm": (lambda: FlexAttentionScoreMods.prefix_lm(4), keeping(lambda q, k: (k < 4) | (k <= q))),
    "soft_cap": (lambda: FlexAttentionScoreMods.soft_cap(2.0), lambda scores, q, k: 2.0 * torch.tanh(scores / 2.0)),
}


@pytest.mark.parametrize("name", list(MODS))
def test_score_mods(name):
    make, change = MODS[name]
    torch.manual_seed(3)
    layer = create_flex_attention(32, 4, score_mod=make(), dtype=DOUBLE)
    x = torch.randn(2, 9, 32, dtype=DOUBLE, requires_grad=True)
    output, expected = layer(x), written_out(layer, x, change)
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)  # slopes and constants are fp32
    gradient = torch.autograd.grad(output.square().sum(), x)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.square().sum(), x)[0], rtol=1e-6, atol=1e-6)


def test_relative_position_bias_trains_its_table():
    torch.manual_seed(4)
    table = torch.nn.Parameter(torch.randn(4, 7))
    layer = FlexAttentionLayer(
        AttentionConfig(32, 4), FlexAttentionScoreMods.relative_position_bias(table), dtype=torch.float32
    )
    x = torch.randn(2, 9, 32)
    output = layer(x)
    expected = written_out(layer, x, lambda scores, q, k: scores + table[:, (k - q).clamp(-3, 3) + 3])
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    gradient = torch.autograd.grad(output.square().sum(), table)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.square().sum(), table)[0], rtol=1e-3, atol=1e-4)


def test_mask_mods_skip_and_equal_score_mods():
    torch.manual_seed(5)
    q, k, v = torch.randn(3, 2, 4, 150, 16).unbind(0)
    ids = torch.randint(0, 3, (2, 150))
    pairs = [
        (FlexAttentionMaskMods.causal, FlexAttentionScoreMods.causal),
        (FlexAttentionMaskMods.sliding_window(20), FlexAttentionScoreMods.sliding_window(20)),
        (FlexAttentionMaskMods.local(20), FlexAttentionScoreMods.local(20)),
        (FlexAttentionMaskMods.prefix_lm(33), FlexAttentionScoreMods.prefix_lm(33)),
        (FlexAttentionMaskMods.document(ids), FlexAttentionScoreMods.document_masking(ids)),
    ]
    for mask_mod, score_mod in pairs:
        by_mask, by_score = attention(q, k, v, mask_mod=mask_mod), attention(q, k, v, score_mod=score_mod)
        torch.testing.assert_close(by_mask, by_score)


def test_configs():
    config = AttentionConfig(64, 4, causal=True)
    assert config.pattern is AttentionPatterns.CAUSAL and config.head_dim == 16 and config.kv_heads == 4
    assert AttentionConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match="embed_dim is 65, which 4 heads cannot share"):
        AttentionConfig(65, 4)
    with pytest.raises(ValueError, match="num_heads is 4, kv_heads 3"):
        AttentionConfig(64, 4, kv_heads=3)
    with pytest.raises(ValueError, match="'sliding_window' needs sliding_window_size"):
        AttentionConfig(64, 4, pattern="sliding_window")
    with pytest.raises(ValueError, match="pattern is 'spiral'; use one of full, causal"):
        AttentionConfig(64, 4, pattern="spiral")
    with pytest.raises(TypeError, match="causal belongs into the AttentionConfig"):
        create_attention(config, causal=True)
