"""Score and mask functions, captured tensors with gradients, and block masks, against torch's flex_attention formula:
the same functions on whole tensors."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from attention_reference import attend  # noqa: E402
from kernel_pytorch.functional import attention  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask, noop_mask  # noqa: E402

BATCH, HEADS, QUERIES, KEYS = 2, 4, 30, 40


def products(dtype=torch.float64, key_heads=2):
    shapes = [(BATCH, HEADS, QUERIES, 8), (BATCH, key_heads, KEYS, 8), (BATCH, key_heads, KEYS, 8)]
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*s, dtype=torch.float64, generator=generator).to(dtype).requires_grad_() for s in shapes]


def places():
    sizes = (BATCH, HEADS, QUERIES, KEYS)
    return [torch.arange(size).view([-1 if i == j else 1 for j in range(4)]) for i, size in enumerate(sizes)]


def formula(query, key, value, score_mod=None, mask_mod=None, captured=()):
    group = HEADS // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).transpose(-1, -2) * query.shape[-1] ** -0.5
    if score_mod is not None:
        scores = score_mod(scores, *places(), *captured)
    mask = None if mask_mod is None else mask_mod(*places(), *captured)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    dead = torch.isinf(scores).all(-1, keepdim=True)
    probabilities = torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    return probabilities @ value.repeat_interleave(group, 1)


def compare(leaves, ours, expected, **tolerance):
    torch.testing.assert_close(ours, expected.to(ours.dtype), **tolerance)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(4)).to(ours.dtype)
    grads = (torch.autograd.grad((output * weights).sum(), leaves) for output in (ours, expected.to(ours.dtype)))
    for actual, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(actual, wanted, **tolerance)


def capped(score, batch, head, query, key):
    return 2.0 * torch.tanh(score / 2.0)


def sloped(score, batch, head, query, key):
    return score - torch.abs(query - key) * 2.0 ** (-2.0 * (head + 1))


def doubled_near(score, batch, head, query, key):
    return torch.where((query - key) % 3 == 0, score * 2.0, score)


@pytest.mark.parametrize("score_mod", [capped, sloped, doubled_near])
def test_score_mods(score_mod):
    leaves = products()
    compare(leaves, attention(*leaves, score_mod=score_mod), formula(*leaves, score_mod=score_mod))


def test_captured_tensors_have_gradients_however_they_are_captured():
    leaves = products()
    table = torch.randn(HEADS, 2 * KEYS, dtype=torch.float64, requires_grad=True)
    gain = torch.rand(QUERIES, dtype=torch.float64, requires_grad=True)

    def closed(score, batch, head, query, key):
        return score * gain[query] + table[head, query - key + KEYS]

    def given(score, batch, head, query, key, table, gain):
        return score * gain[query] + table[head, query - key + KEYS]

    expected = formula(*leaves, score_mod=closed)
    everything = [*leaves, table, gain]
    compare(everything, attention(*leaves, score_mod=closed), expected)
    compare(everything, attention(*leaves, score_mod=given, captured=(table, gain)), formula(*leaves, score_mod=closed))
    compare([table], attention(*leaves, score_mod=given, captured=(table, gain.detach())), formula(*leaves, closed))


def test_captured_fp32_table_of_a_bf16_call():
    leaves = products(torch.bfloat16)
    table = torch.randn(HEADS, KEYS, requires_grad=True)

    def biased(score, batch, head, query, key, table):
        return score + table[head, key]

    ours = attention(*leaves, score_mod=biased, captured=(table,))
    expected = formula(*(x.double() for x in leaves), biased, captured=(table.double(),))
    (grad,) = torch.autograd.grad(ours.float().square().sum(), table)
    (wanted,) = torch.autograd.grad(expected.square().sum(), table)
    assert grad.dtype == torch.float32
    torch.testing.assert_close(ours.double(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(grad, wanted, atol=5e-2, rtol=5e-2)


def test_mask_mods_with_score_mods_and_options():
    leaves = products()
    documents = torch.randint(0, 3, (BATCH, KEYS), generator=torch.Generator().manual_seed(5)).sort(-1).values

    def same_document(batch, head, query, key):
        return (documents[batch, query] == documents[batch, key]) & (query >= 2)

    ours = attention(*leaves, mask_mod=same_document, score_mod=capped)
    compare(leaves, ours, formula(*leaves, score_mod=capped, mask_mod=same_document))
    assert (ours[:, :, :2] == 0).all()
    mask = same_document(*places())
    both = attention(*leaves, mask_mod=same_document, causal=True, window=(7, -1))
    compare(leaves, both, attend(*leaves, mask=mask, causal=True, window=(7, -1))[0])


def causal(batch, head, query, key):
    return query >= key


def striped(batch, head, query, key):
    return ((query // 3 + key // 5 + head) % 2 == 0) | (query == key)


@pytest.mark.parametrize("mask_mod", [causal, striped])
@pytest.mark.parametrize("block", [8, (16, 8)])
def test_block_masks_of_torch(mask_mod, block):
    leaves = products()
    block_mask = create_block_mask(mask_mod, BATCH, HEADS, QUERIES, KEYS, device="cpu", BLOCK_SIZE=block)
    compare(leaves, attention(*leaves, block_mask=block_mask), formula(*leaves, mask_mod=mask_mod))
    ours = attention(*leaves, block_mask=block_mask, mask_mod=lambda b, h, q, k: k % 2 == 0, score_mod=capped)
    compare(leaves, ours, formula(*leaves, capped, lambda b, h, q, k: mask_mod(b, h, q, k) & (k % 2 == 0)))
    shared = create_block_mask(mask_mod if mask_mod is causal else noop_mask, None, None, QUERIES, KEYS, device="cpu")
    expected = formula(*leaves, mask_mod=causal if mask_mod is causal else None)
    compare(leaves, attention(*leaves, block_mask=shared), expected)


def test_compile_with_captured_tensors():
    leaves = products(torch.float32)
    table = torch.randn(HEADS, KEYS, requires_grad=True)

    def biased(score, batch, head, query, key, table):
        return torch.tanh(score + table[head, key])

    def run(q, k, v, table):
        return attention(q * 2, k, v, score_mod=biased, mask_mod=lambda b, h, q, k, _: q >= k, captured=(table,))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    compare([*leaves, table], compiled(*leaves, table), run(*leaves, table), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*leaves, table), run(*leaves, table))


def test_errors():
    query, key, value = products()
    with pytest.raises(RuntimeError, match="it must give one bool"):
        attention(query, key, value, mask_mod=lambda b, h, q, k: q + k)
    with pytest.raises(ValueError, match="there is no score_mod or mask_mod that reads them"):
        attention(query, key, value, captured=(query,))
    with pytest.raises(RuntimeError, match="counts of key blocks have shape"):
        block_mask = create_block_mask(causal, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
        attention(query, key, value, block_mask=block_mask)
    with pytest.raises(RuntimeError, match=r"torch\.func does not see captured"):
        table = torch.ones(KEYS, dtype=torch.float64)
        mod = lambda s, b, h, q, k, t: s + t[k]  # noqa: E731
        torch.func.grad(lambda q: attention(q, key, value, score_mod=mod, captured=(table,)).sum())(query)
