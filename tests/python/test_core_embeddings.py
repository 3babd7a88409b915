"""Embeddings of tokens and positions against torch's and against the formula."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch import core  # noqa: E402

nn, F = torch.nn, torch.nn.functional


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "options",
    [{}, {"padding_idx": 3}, {"padding_idx": -1}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}],
    ids=str,
)
def test_embedding_against_torchs(options):
    ours, theirs = core.OptimizedEmbedding(20, 8, **options), nn.Embedding(20, 8, **options)
    assert ours.padding_idx == theirs.padding_idx
    ours.load_state_dict(theirs.state_dict(), strict=True)
    ids = torch.randint(0, 20, (3, 7))
    mine, other = ours(ids), theirs(ids)
    assert torch.equal(mine, other)
    weights = torch.randn_like(other)
    mine.backward(weights)
    other.backward(weights)
    assert ours.weight.grad.is_sparse == theirs.weight.grad.is_sparse
    torch.testing.assert_close(ours.weight.grad.to_dense(), theirs.weight.grad.to_dense(), rtol=1e-5, atol=1e-6)
    nn.init.normal_(ours.weight)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert torch.equal(ours(ids), theirs(ids))


def test_embedding_starts_with_a_zero_for_padding_and_compiles():
    layer = core.OptimizedEmbedding(20, 8, padding_idx=3)
    assert torch.equal(layer.weight[3], torch.zeros(8)) and isinstance(layer, nn.Embedding)
    ids = torch.randint(0, 20, (3, 7))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(ids), layer(ids))
    (got,) = torch.autograd.grad(compiled(ids).sum(), layer.weight)
    assert torch.equal(got[3], torch.zeros(8))
    assert torch.equal(got, torch.autograd.grad(layer(ids).sum(), layer.weight)[0])


@pytest.mark.parametrize("padding_idx", [20, -21])
def test_embedding_refuses(padding_idx):
    with pytest.raises(ValueError, match=rf"padding_idx is {padding_idx}, the table has 20 rows"):
        core.OptimizedEmbedding(20, 8, padding_idx)
    with pytest.raises(RuntimeError, match="20"):
        core.OptimizedEmbedding(20, 8)(torch.tensor([20]))


def turned(x, base=10000.0):
    """The rotation as a product of complex numbers, in float64."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * base ** (-torch.arange(half).double() / half)
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], -1)


@pytest.mark.parametrize("shape", [(9, 8), (2, 9, 8), (2, 3, 9, 8), (2, 3, 2, 9, 8)], ids=str)
@pytest.mark.parametrize("base", [10000.0, 500.0])
def test_rotary(shape, base):
    encoding = core.RotaryPositionalEncoding(8, 32, base)
    x = torch.randn(shape, requires_grad=True)
    cos, sin = encoding(x)
    assert cos.shape == sin.shape == (9, 4)
    output = encoding.apply_rotary_encoding(x, cos, sin)
    torch.testing.assert_close(output, turned(x, base).float())
    assert torch.equal(output, core.rotary_embedding(x, cos, sin))
    weights = torch.randn(shape)
    other = x.detach().clone().requires_grad_()
    torch.testing.assert_close(
        torch.autograd.grad(output, x, weights),
        torch.autograd.grad(turned(other, base).float(), other, weights),
    )
    torch.testing.assert_close(output.norm(dim=-1), x.norm(dim=-1))


def test_rotary_of_strided_and_partly_turned_columns():
    encoding = core.RotaryPositionalEncoding(4, 32)
    x = torch.randn(2, 3, 8, 9).transpose(-1, -2)
    output = core.rotary_embedding(x, *encoding(x))
    torch.testing.assert_close(output[..., :4], turned(x[..., :4]).float())
    assert torch.equal(output[..., 4:], x[..., 4:])


def test_tables_keep_their_precision_and_grow():
    encoding = core.RotaryPositionalEncoding(8, 16)
    exact = [table.clone() for table in encoding(torch.zeros(16, 8))]
    assert not encoding.state_dict() and not list(encoding.parameters())
    encoding.bfloat16()
    assert all(torch.equal(a, b) for a, b in zip(encoding(torch.zeros(16, 8)), exact, strict=True))
    longer = encoding(torch.zeros(40, 8))
    assert longer[0].shape == (40, 4) and torch.equal(longer[0][:16], exact[0])
    assert encoding(torch.zeros(3, 8), seq_len=5)[1].shape == (5, 4)
    empty = core.RotaryPositionalEncoding(8, 16, device="meta").to_empty(device="cpu")
    assert torch.equal(empty.cos_cached, exact[0]) and torch.equal(empty.sin_cached, exact[1])
    stretched = core.RotaryPositionalEncoding(8, 16, scaling="linear", factor=2.0)
    torch.testing.assert_close(stretched.cos_cached[::2], exact[0][:8])
    assert "scaling='linear'" in repr(stretched)


def test_attention_turns_its_heads():
    """Scores depend on distances alone: the same output when query and key move together, another without rotary."""
    layer = core.AttentionLayer(24, 3, 0.0).eval()
    encoding = core.RotaryPositionalEncoding(8, 64)
    x = torch.randn(2, 7, 24)
    cos, sin = encoding(x, seq_len=17)
    at_start = layer(x, rotary=(cos[:7], sin[:7]))
    torch.testing.assert_close(layer(x, rotary=(cos[10:], sin[10:])), at_start, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(layer(x), at_start, atol=1e-3)
    q, k, v = F.linear(x, layer.in_proj_weight, layer.in_proj_bias).view(2, 7, 3, 3, 8).permute(2, 0, 3, 1, 4)
    expected = F.scaled_dot_product_attention(turned(q).float(), turned(k).float(), v)
    torch.testing.assert_close(layer.out_proj(expected.transpose(1, 2).flatten(-2)), at_start, rtol=1e-4, atol=1e-5)
    block = core.OptimizedTransformerBlock(24, 3).eval()
    compiled = torch.compile(
        lambda x: block(x, is_causal=True, rotary=encoding(x)), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(x), block(x, is_causal=True, rotary=(cos[:7], sin[:7])), rtol=1e-4, atol=1e-5)


def test_rotary_refuses():
    with pytest.raises(ValueError, match="embed_dim is 7; it must be even"):
        core.RotaryPositionalEncoding(7)
    with pytest.raises(RuntimeError, match=r"rotary_embedding: x has shape \[8\]"):
        core.rotary_embedding(torch.zeros(8), torch.zeros(1, 4), torch.zeros(1, 4))
    with pytest.raises(RuntimeError):
        core.rotary_embedding(torch.zeros(9, 8), torch.zeros(5, 4), torch.zeros(5, 4))
