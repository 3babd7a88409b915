"""The one rule of attention masks: every layer and function reads every type and shape as a matrix written out does."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch.attention import (  # noqa: E402
    AttentionConfig,
    DynamicSparseAttention,
    FlashAttention3,
    FlexAttentionLayer,
    create_context_parallel_attention,
    create_ring_attention,
)
from kernel_pytorch.attention.distributed import context_parallel_attention  # noqa: E402
from kernel_pytorch.compat.transformers import attention_forward  # noqa: E402
from kernel_pytorch.core import AttentionLayer, OptimizedTransformerBlock  # noqa: E402

from kernel_pytorch import functional as F  # noqa: E402

BATCH, HEADS, ROWS, WIDTH = 3, 4, 10, 32

LAYERS = {
    "flash": lambda: FlashAttention3(AttentionConfig(WIDTH, HEADS)),
    "plain": lambda: FlashAttention3(AttentionConfig(WIDTH, HEADS, use_flash_attention=False)),
    "flex": lambda: FlexAttentionLayer(AttentionConfig(WIDTH, HEADS)),
    "sparse": lambda: DynamicSparseAttention(WIDTH, HEADS, sparsity_ratio=0.0),
    "ring": lambda: create_ring_attention(WIDTH, HEADS),
    "ring in chunks": lambda: create_ring_attention(WIDTH, HEADS, chunk_size=3),
    "context parallel": lambda: create_context_parallel_attention(WIDTH, HEADS),
    "core": lambda: AttentionLayer(WIDTH, HEADS, dropout=0.0),
    "block": lambda: OptimizedTransformerBlock(WIDTH, HEADS, dropout=0.0),
}


def _kept():
    generator = torch.Generator().manual_seed(5)
    rows = torch.rand(BATCH, HEADS, ROWS, ROWS, generator=generator) < 0.7
    rows[..., 0] = True  # every query sees something
    keys = torch.arange(ROWS)[None] < torch.tensor([[10], [7], [4]])
    return rows, keys


def _masks():
    """name -> (the mask, the matrix that it stands for: [batch, heads, queries, keys] of numbers to add)."""
    rows, keys = _kept()
    generator = torch.Generator().manual_seed(6)
    added = torch.randn(BATCH, HEADS, ROWS, ROWS, generator=generator)

    def hidden(kept):
        return torch.zeros(kept.shape).masked_fill(~kept, -math.inf)

    of_keys = hidden(keys)[:, None, None]
    return {
        "bool [B,S]": (keys, of_keys),
        "int64 [B,S]": (keys.long(), of_keys),
        "int32 [B,S]": (keys.int(), of_keys),
        "uint8 [B,S]": (keys.byte(), of_keys),
        "additive [B,S]": (hidden(keys), of_keys),
        "bf16 additive [B,S]": (hidden(keys).bfloat16(), of_keys),
        "bool [B,1,1,S]": (keys[:, None, None], of_keys),
        "int64 [B,1,1,S]": (keys.long()[:, None, None], of_keys),
        "additive [B,1,1,S]": (hidden(keys)[:, None, None], of_keys),
        "bool [S,S]": (rows[0, 0], hidden(rows[0, 0])),
        "additive [S,S]": (added[0, 0], added[0, 0]),
        "bool [1,S]": (keys[1:2], hidden(keys[1:2])),
        "bool [B,1,S,S]": (rows[:, :1], hidden(rows[:, :1])),
        "int64 [B,1,S,S]": (rows[:, :1].long(), hidden(rows[:, :1])),
        "additive [B,1,S,S]": (added[:, :1], added[:, :1]),
        "bool [B,H,S,S]": (rows, hidden(rows)),
        "additive [B,H,S,S]": (added, added),
        "additive [H,S,S]": (added[0], added[0]),
        "bool [1,1,S,S]": (rows[:1, :1], hidden(rows[:1, :1])),
        "additive [B,H,S,1]": (added[..., :1], added[..., :1]),
    }


def _written_out(layer, x, matrix):
    attention = layer.attn if isinstance(layer, OptimizedTransformerBlock) else layer
    normed = layer.norm1(x) if isinstance(layer, OptimizedTransformerBlock) else x
    if isinstance(attention, AttentionLayer):
        packed = torch.nn.functional.linear(normed, attention.in_proj_weight, attention.in_proj_bias)
        parts = packed.chunk(3, -1)
    else:
        parts = [project(normed) for project in (attention.q_proj, attention.k_proj, attention.v_proj)]
    q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
    scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS) + matrix
    attended = attention.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))
    if attention is layer:
        return attended
    x = x + attended
    return x + layer.mlp(layer.norm2(x))


@pytest.mark.parametrize("mask_name", list(_masks()))
@pytest.mark.parametrize("name", list(LAYERS))
def test_layers_read_every_mask_alike(name, mask_name):
    torch.manual_seed(0)
    layer, x = LAYERS[name]().eval(), torch.randn(BATCH, ROWS, WIDTH)
    mask, matrix = _masks()[mask_name]
    with torch.no_grad():
        wanted = _written_out(layer, x, matrix)
        torch.testing.assert_close(layer(x, attention_mask=mask), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask_name", list(_masks()))
def test_functions_read_every_mask_alike(mask_name):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, BATCH, HEADS, ROWS, 8).unbind(0)
    mask, matrix = _masks()[mask_name]
    wanted = (q @ k.transpose(-1, -2) / math.sqrt(8) + matrix).softmax(-1) @ v
    outputs = {
        "attention": F.attention(q, k, v, attention_mask=mask),
        "of parts": context_parallel_attention(q, k, v, layout="bhsd", attention_mask=mask, key_chunk=3),
        "of one": context_parallel_attention(q, k, v, layout="bhsd", attention_mask=mask),
    }
    if mask.dim() > 2 or mask.shape[0] == ROWS:  # `mask` broadcasts
        outputs["mask"] = F.attention(q, k, v, mask=mask)
    if mask.dim() == 4:
        module = torch.nn.Module()
        outputs["transformers"] = attention_forward(module, q, k, v, mask, is_causal=False)[0].transpose(1, 2)
    for name, output in outputs.items():
        torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_mask_bias_and_attention_mask_hold_together():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, BATCH, HEADS, ROWS, 8).unbind(0)
    rows, keys = _kept()
    bias = torch.randn(HEADS, ROWS, ROWS, requires_grad=True)
    scores = q @ k.transpose(-1, -2) / math.sqrt(8) + bias
    wanted = scores.masked_fill(~(rows & keys[:, None, None]), -math.inf).softmax(-1) @ v
    output = F.attention(q, k, v, mask=rows, bias=bias, attention_mask=keys.long())
    torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-5)
    ours, theirs = (torch.autograd.grad(one.square().sum(), bias)[0] for one in (output, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", list(LAYERS))
def test_masks_go_by_three_names(name):
    layer, x = LAYERS[name]().eval(), torch.randn(BATCH, ROWS, WIDTH)
    mask = _kept()[1]
    with torch.no_grad():
        wanted = layer(x, attention_mask=mask)
        assert not torch.allclose(wanted, layer(x), atol=1e-4)
        for alias in ("attn_mask", "mask"):
            assert torch.equal(layer(x, **{alias: mask}), wanted)
            assert torch.equal(layer(x, **{alias: None}), layer(x))
            with pytest.raises(TypeError, match=f"attention_mask and {alias} are one argument"):
                layer(x, attention_mask=mask, **{alias: mask})


@pytest.mark.parametrize("name", list(LAYERS))
def test_what_could_be_two_things_is_refused_with_both_forms(name):
    layer, x = LAYERS[name]().eval(), torch.randn(ROWS, ROWS, WIDTH)  # batch == queries
    mask = torch.rand(ROWS, ROWS) < 0.7
    mask[:, 0] = True
    with torch.no_grad():
        for one in (mask, mask.float()):
            with pytest.raises(ValueError, match=r"both 10; give mask\[:, None, None, :\] .* mask\[None, None\]"):
                layer(x, attention_mask=one)
        of_keys, of_rows = layer(x, attention_mask=mask[:, None, None, :]), layer(x, attention_mask=mask[None, None])
        assert not torch.allclose(of_keys, of_rows, atol=1e-4)
        torch.testing.assert_close(layer(x, attention_mask=mask.long()), of_keys)  # a tokenizer's is of keys
        with pytest.raises(ValueError, match=r"batch and heads are both 4; give mask\[None\] .* mask\[:, None\]"):
            layer(x[:HEADS], attention_mask=torch.ones(HEADS, ROWS, ROWS).bool())


@pytest.mark.parametrize("name", list(LAYERS))
@pytest.mark.parametrize(
    "mask, words",
    [
        (torch.full((BATCH, ROWS), 2), "torch.int64 and holds 2; integers say 1"),
        (torch.full((BATCH, 1, 1, ROWS), -10000), "torch.int64 and holds -10000; integers say 1"),
        (torch.ones(BATCH, ROWS, dtype=torch.complex64), "torch.complex64; give bool"),
        (torch.ones(ROWS).bool(), r"shape \[10\]; give \[batch, keys\] = \[3, 10\]"),
        (torch.ones(BATCH, ROWS + 1).bool(), r"shape \[3, 11\]: 11 keys, there are 10"),
        (torch.ones(BATCH + 2, ROWS).bool(), r"shape \[5, 10\]; give \[batch, keys\] = \[3, 10\]"),
        (torch.ones(ROWS, ROWS).long(), r"shape \[10, 10\]; give .* \(not of integers\)"),
        (torch.ones(BATCH, 2, ROWS, ROWS).bool(), r": 2 heads, there are 4"),
        (torch.ones(BATCH, ROWS, ROWS).bool(), r"\[heads, queries, keys\] with 4 heads. Give mask\[:, None\]"),
    ],
)
def test_other_masks_are_refused_by_the_layers_name(name, mask, words):
    layer = LAYERS[name]()
    owner = layer.attn if name == "block" else layer
    with pytest.raises(ValueError, match=f"{type(owner).__name__}: attention_mask .*{words}"):
        layer(torch.randn(BATCH, ROWS, WIDTH), attention_mask=mask)


def test_packs_count_sequences_as_batch():
    torch.manual_seed(1)
    layer = DynamicSparseAttention(WIDTH, HEADS, sparsity_ratio=0.0).eval()
    x, ends = torch.randn(14, WIDTH), torch.tensor([0, 10, 14])
    keys = torch.rand(2, 10) < 0.6
    keys[:, 0] = True
    with torch.no_grad():
        output = layer(x, cu_seqlens=ends, max_seqlen=10, attention_mask=keys.long())
        first = layer(x[None, :10], attention_mask=keys[:1])[0]
        second = layer(x[None, 10:], attention_mask=keys[1:, :4])[0]
    torch.testing.assert_close(output, torch.cat([first, second]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["flash", "core"])
def test_masks_are_traced(name, dynamic):
    torch._dynamo.reset()
    layer, x = LAYERS[name]().eval(), torch.randn(BATCH, ROWS, WIDTH)
    with torch.no_grad():
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for mask in (_kept()[1].long(), _kept()[0], _kept()[0][0, 0].float()):
            torch.testing.assert_close(compiled(x, attn_mask=mask), layer(x, attention_mask=mask))


@pytest.mark.gpu
def test_nonzero_integers_keep_on_the_gpu_without_waiting():
    layer = FlashAttention3(AttentionConfig(64, HEADS), device="cuda", dtype=torch.bfloat16).eval()
    x = torch.randn(BATCH, ROWS, 64, device="cuda", dtype=torch.bfloat16)
    keys = _kept()[1].cuda()
    with torch.no_grad():
        wanted = layer(x, attention_mask=keys)
        torch.cuda.set_sync_debug_mode("error")
        try:
            output = layer(x, attention_mask=keys.long() * 7)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(output, wanted)
