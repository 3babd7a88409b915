"""kernel_pytorch.compat: the ways in of flash_attn, xformers, flex_attention and transformers, against torch's."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as torch_functional  # noqa: E402
from kernel_pytorch.compat import flash_attn, xformers  # noqa: E402
from kernel_pytorch.compat.flex_attention import flex_attention  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask  # noqa: E402


def sdpa(q, k, v, **options):
    """torch's attention of [batch, sequence, heads, size] tensors."""
    heads = [t.transpose(1, 2) for t in (q, k, v)]
    return torch_functional.scaled_dot_product_attention(*heads, enable_gqa=True, **options).transpose(1, 2)


def random_heads(*shape, gradient=False):
    return torch.randn(*shape, requires_grad=gradient)


def assert_same(actual, expected, inputs=()):
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)
    if inputs:
        ours = torch.autograd.grad(actual.square().sum(), inputs)
        theirs = torch.autograd.grad(expected.square().sum(), inputs)
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


def test_flash_attn_func():
    torch.manual_seed(0)
    q, k, v = (random_heads(2, 17, heads, 16, gradient=True) for heads in (4, 2, 2))
    assert_same(flash_attn.flash_attn_func(q, k, v, causal=True), sdpa(q, k, v, is_causal=True), [q, k, v])
    places = torch.arange(17)
    near = (places[:, None] - places[None, :]).abs() <= 3
    assert_same(flash_attn.flash_attn_func(q, k, v, 0.0, 0.3, False, (3, 3)), sdpa(q, k, v, attn_mask=near, scale=0.3))
    output, lse, probabilities = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    assert lse.shape == (2, 4, 17) and probabilities is None
    assert_same(output, sdpa(q, k, v))


def test_flash_attn_packed():
    torch.manual_seed(1)
    qkv = random_heads(2, 9, 3, 4, 16, gradient=True)
    expected = sdpa(*qkv.unbind(2), is_causal=True)
    assert_same(flash_attn.flash_attn_qkvpacked_func(qkv, causal=True), expected, [qkv])
    kv = qkv[:, :, 1:]
    assert_same(flash_attn.flash_attn_kvpacked_func(qkv[:, :, 0], kv, causal=True), expected)


def test_flash_attn_varlen():
    torch.manual_seed(2)
    lengths = [5, 0, 12, 1]
    starts = [0, *itertools.accumulate(lengths)]
    offsets = torch.tensor(starts, dtype=torch.int32)
    qkv = random_heads(18, 3, 2, 16, gradient=True)
    output = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, offsets, 12, causal=True)
    parts = [sdpa(*qkv[None, a:b].unbind(2), is_causal=True)[0] for a, b in itertools.pairwise(starts) if b > a]
    assert_same(output, torch.cat(parts), [qkv])
    q, kv = qkv[:, 0], qkv[:, 1:]
    assert_same(flash_attn.flash_attn_varlen_kvpacked_func(q, kv, offsets, offsets, 12, 12, causal=True), output)


def test_xformers():
    torch.manual_seed(3)
    q, k, v = (random_heads(2, length, 4, 16, gradient=True) for length in (6, 10, 10))
    attend = xformers.memory_efficient_attention
    assert_same(attend(q, k, v), sdpa(q, k, v), [q, k, v])
    upper_left = torch.ones(6, 10, dtype=torch.bool).tril()
    assert_same(attend(q, k, v, xformers.LowerTriangularMask()), sdpa(q, k, v, attn_mask=upper_left))
    lower_right = torch.ones(6, 10, dtype=torch.bool).tril(4)
    assert_same(attend(q, k, v, xformers.LowerTriangularFromBottomRightMask()), sdpa(q, k, v, attn_mask=lower_right))
    bias = torch.randn(2, 4, 6, 10, requires_grad=True)
    assert_same(attend(q, k, v, bias, scale=0.5), sdpa(q, k, v, attn_mask=bias, scale=0.5), [q, bias])
    assert_same(attend(q[:, :, 0], k[:, :, 0], v[:, :, 0]), sdpa(q[:, :, :1], k[:, :, :1], v[:, :, :1])[:, :, 0])
    with pytest.raises(ValueError, match="attn_bias is a str"):
        attend(q, k, v, "causal")
    with pytest.raises(ValueError, match="needs a batch of 1"):
        attend(q, k, v, xformers.BlockDiagonalMask.from_seqlens([6], [10]))


@pytest.mark.parametrize("causal", [False, True])
def test_xformers_sequences(causal):
    torch.manual_seed(4)
    q_lengths, k_lengths = [3, 4], [5, 4]
    q, k, v = random_heads(1, 7, 2, 16), random_heads(1, 9, 2, 16), random_heads(1, 9, 2, 16)
    mask = xformers.BlockDiagonalMask.from_seqlens(q_lengths, k_lengths)
    mask = mask.make_causal() if causal else mask
    seen = torch.block_diag(
        *(torch.ones(a, b).tril() if causal else torch.ones(a, b) for a, b in zip(q_lengths, k_lengths))
    )
    output = xformers.memory_efficient_attention(q, k, v, mask)
    assert_same(output, sdpa(q, k, v, attn_mask=seen.bool()))


def test_flex_attention_with_block_mask():
    torch.manual_seed(5)
    q, k, v = (torch.randn(2, heads, 300, 16, requires_grad=True) for heads in (4, 2, 2))
    documents = torch.arange(300) // 110

    def causal_document(batch, head, q_index, k_index):
        return (q_index >= k_index) & (documents[q_index] == documents[k_index])

    block_mask = create_block_mask(causal_document, None, None, 300, 300, device="cpu")
    seen = torch.ones(300, 300, dtype=torch.bool).tril() & (documents[:, None] == documents[None, :])
    output = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)
    expected = torch_functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    assert_same(output, expected, [q, k, v])
    capped = flex_attention(q, k, v, lambda s, b, h, i, j: 5 * torch.tanh(s / 5), block_mask, enable_gqa=True)
    assert not torch.allclose(capped, output)
    with pytest.raises(ValueError, match="pass enable_gqa=True"):
        flex_attention(q, k, v)


def small_model(name, **options):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        **options,
    )
    torch.manual_seed(6)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


MODELS = {"Llama": {}, "Gemma2": {"sliding_window": 8, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 16}}


@pytest.mark.parametrize("name", list(MODELS))
def test_transformers(name):
    from kernel_pytorch.compat.transformers import register

    model = small_model(name, **MODELS[name])
    register()
    tokens = torch.randint(0, 97, (2, 21))
    padded = torch.ones(2, 21, dtype=torch.long)
    padded[1, :6] = 0
    for mask in (None, padded):
        losses, gradients, generated = [], [], []
        for implementation in ("eager", "kernel_pytorch"):
            model.set_attn_implementation(implementation)
            logits = model(tokens, attention_mask=mask).logits
            seen = logits if mask is None else logits[padded.bool()]
            loss = seen.square().mean()
            losses.append(seen.detach())
            gradients.append(torch.autograd.grad(loss, model.model.layers[0].self_attn.q_proj.weight)[0])
            out = model.generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
            generated.append(out)
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-6)
        assert torch.equal(generated[0], generated[1])
