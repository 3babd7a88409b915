"""kernel_pytorch.functional.attention against plain torch in fp64: values and gradients of every option, alone and
together, in every layout and type; rows that see nothing, empty tensors, errors."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from attention_cases import (  # noqa: E402
    ALL_OPTIONS,
    assert_close,
    compare,
    leaf,
    option_values,
    products,
    products_of_fp32,
)
from attention_reference import attend  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from kernel_pytorch._ops.attention import attention_options  # noqa: E402
from kernel_pytorch.functional import attention  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("shape", [(2, 4, 9, 12, 16), (1, 2, 33, 17, 40)], ids=str)
def test_plain_in_every_type_and_layout(shape, layout, dtype):
    compare(*products(shape, dtype, layout=layout), dtype, layout=layout)
    compare(*products(shape, dtype, key_heads=1, value_size=24, layout=layout), dtype, layout=layout, causal=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALL_OPTIONS)
def test_every_option(name, dtype):
    shape = (2, 4, 13, 18, 8)
    compare(*products(shape, dtype, key_heads=2), dtype, **option_values(name, shape, dtype))


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(*(st.integers(1, n) for n in (3, 2, 40, 40, 3))),
    st.integers(1, 3),
    st.sampled_from(["bhsd", "bshd"]),
    st.sampled_from([torch.float64, torch.float32]),
    st.sets(st.sampled_from(ALL_OPTIONS), max_size=5),
)
def test_options_together(sizes, group, layout, dtype, names):
    batch, key_heads, queries, keys, eighths = sizes
    shape = (batch, key_heads * group, queries, keys, 8 * eighths)
    options = {}
    for name in sorted(names):
        options |= option_values(name, shape, dtype)
    compare(*products(shape, dtype, key_heads=key_heads, layout=layout), dtype, layout=layout, **options)


def test_against_scaled_dot_product_attention():
    query, key, value = products((2, 4, 21, 21, 32), torch.float32)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(attention(query, key, value), sdpa(query, key, value), atol=2e-6, rtol=1e-5)
    ours, theirs = attention(query, key, value, causal=True), sdpa(query, key, value, is_causal=True)
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)
    short = query[:, :, :9]
    ours, theirs = attention(short, key, value, causal=True, causal_offset=0), sdpa(short, key, value, is_causal=True)
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


def test_strided_inputs_and_the_layout_of_results():
    qkv = torch.randn(2, 11, 3, 4, 16, requires_grad=True)
    views = [qkv[:, :, i].transpose(1, 2) for i in range(3)]
    output = attention(*views, causal=True)
    assert output.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(output, attention(*(v.contiguous() for v in views), causal=True), atol=1e-6, rtol=1e-5)
    (grad,) = torch.autograd.grad(output.square().sum(), qkv)
    copies = [v.detach().clone().requires_grad_() for v in views]
    expected = torch.autograd.grad(attention(*copies, causal=True).square().sum(), copies)
    for i in range(3):
        torch.testing.assert_close(grad[:, :, i].transpose(1, 2), expected[i], atol=1e-5, rtol=1e-5)
    wide = torch.randn(1, 2, 16, 5).transpose(2, 3)  # the last dimension is not dense
    torch.testing.assert_close(attention(wide, wide, wide), attention(*(wide.contiguous(),) * 3))
    summed = attention(*copies)
    (from_sum,) = torch.autograd.grad(summed.sum(), copies[0], retain_graph=True)  # its gradient has strides of 0
    (from_ones,) = torch.autograd.grad(summed, copies[0], torch.ones_like(summed))
    torch.testing.assert_close(from_sum, from_ones)


def test_a_bias_that_is_expanded_gets_the_sum():
    query, key, value = products((2, 3, 5, 7, 8), torch.float64)
    base = leaf(3, 1, 7)
    compare(query, key, value, torch.float64, bias=base)
    expanded = attention(query, key, value, bias=base.expand(2, 3, 5, 7))
    grads = torch.autograd.grad(expanded.square().sum(), base)
    expected = torch.autograd.grad(attention(query, key, value, bias=base).square().sum(), base)
    torch.testing.assert_close(grads, expected)
    column = leaf(2, 3, 5, 1)  # the same for all keys: changes nothing, and has no gradient but rounding
    shifted = attention(query, key, value, bias=column)
    torch.testing.assert_close(shifted, attention(query, key, value))
    assert torch.autograd.grad(shifted.square().sum(), column)[0].abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_single_calls(causal, dtype):
    lengths_q, lengths_k = [5, 0, 9, 1], [7, 3, 9, 0]
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(n), sum(n)]) for n in (lengths_q, lengths_k))
    generator = torch.Generator().manual_seed(1)
    query = leaf(sum(lengths_q) + 2, 4, 8, dtype=dtype, generator=generator)
    key, value = (leaf(sum(lengths_k) + 3, 2, 8, dtype=dtype, generator=generator) for _ in range(2))
    sinks = leaf(4, dtype=torch.float64 if dtype == torch.float64 else torch.float32, generator=generator)
    options = dict(causal=causal, sinks=sinks, window=(4, 4))
    output, lse = attention(
        query,
        key,
        value,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=9,
        max_seqlen_k=9,
        return_lse=True,
        **options,
    )
    unbounded = attention(query, key, value, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    torch.testing.assert_close(output, unbounded)
    assert lse.shape == (4, 17) and (output[15:] == 0).all() and torch.isinf(lse[:, 15:]).all()
    parts = []
    for i in range(4):
        q = query[cu_q[i] : cu_q[i + 1]].double().transpose(0, 1)[None]
        k, v = (x[cu_k[i] : cu_k[i + 1]].double().transpose(0, 1)[None] for x in (key, value))
        expected, _ = attend(q, k, v, **(options | dict(sinks=sinks.double())))
        parts.append(expected[0].transpose(0, 1))
    expected = torch.cat(parts)
    assert_close(output[:15], expected, dtype, "output")
    leaves = [query, key, value, sinks]
    weights = torch.randn(15, 4, 8, generator=generator).double()
    ours = torch.autograd.grad((output[:15].double() * weights).sum(), leaves)
    formula = torch.autograd.grad((expected * weights).sum(), leaves)
    for one, other in zip(ours, formula, strict=True):
        assert_close(one, other, dtype, "gradient")


def test_dropout_is_repeatable_and_backward_uses_the_same_mask():
    query, key, value = products((2, 2, 20, 40, 8), torch.float64)
    seed = torch.tensor([12, 34])
    eye = torch.eye(40, dtype=torch.float64).expand(2, 2, 40, 40)
    dropped = attention(query, key, eye, dropout_p=0.25, seed=seed)  # the probabilities themselves
    kept = attention(query, key, eye)
    factors = dropped / kept
    assert ((factors.detach() - 4 / 3).abs().lt(1e-7) | (factors == 0)).all()
    assert 0.6 < (factors != 0).double().mean() < 0.9
    output = attention(query, key, value, dropout_p=0.25, seed=seed)
    expected, _ = attend(query, key, value, keep_probabilities=factors.detach())
    torch.testing.assert_close(output, expected)
    leaves = [query, key, value]
    for ours, formula in zip(
        torch.autograd.grad(output.sin().sum(), leaves), torch.autograd.grad(expected.sin().sum(), leaves), strict=True
    ):
        torch.testing.assert_close(ours, formula)
    torch.manual_seed(3)
    first = attention(query, key, value, dropout_p=0.5)
    assert not torch.equal(first, attention(query, key, value, dropout_p=0.5))
    torch.manual_seed(3)
    assert torch.equal(first, attention(query, key, value, dropout_p=0.5))


def test_rows_that_see_nothing_and_empty_tensors():
    query, key, value = products((2, 2, 6, 4, 8), torch.float32)
    output, lse = attention(query, key, value, causal=True, return_lse=True)
    assert (output[:, :, :2] == 0).all() and (lse[:, :, :2] == -torch.inf).all()
    grads = torch.autograd.grad(output.sum() + lse[:, :, 2:].sum(), [query, key, value])
    assert all(torch.isfinite(grad).all() for grad in grads) and (grads[0][:, :, :2] == 0).all()
    for shape in ((0, 2, 4, 4, 8), (2, 2, 0, 4, 8), (2, 2, 4, 0, 8)):
        q, k, v = products(shape, torch.float32)
        output, lse = attention(q, k, v, return_lse=True)
        assert output.shape == q.shape and (output == 0).all() and (lse == -torch.inf).all()
        for grad, tensor in zip(torch.autograd.grad(output.sum(), [q, k, v]), [q, k, v], strict=True):
            assert grad.shape == tensor.shape and (grad == 0).all()


def test_autocast_and_determinism():
    query, key, value = products((1, 2, 16, 16, 8), torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, lse = attention(query, key, value, return_lse=True)
    assert output.dtype == torch.bfloat16 and lse.dtype == torch.float32
    (grad,) = torch.autograd.grad(output.float().sum(), query)
    assert grad.dtype == torch.float32
    grads = [torch.autograd.grad(attention(query, key, value, deterministic=True).sum(), key)[0] for _ in range(5)]
    assert all(torch.equal(grads[0], other) for other in grads)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(layout="sbhd"), 'layout is "sbhd"'),
        (dict(softcap=-1.0), "softcap is -1.0"),
        (dict(window=(-3, 0)), r"the window is \(-3, 0\)"),
        (dict(window=(3,)), r"window is \(3,\); it must be \(left, right\)"),
        (dict(dropout_p=2.0), "dropout_p is 2"),
        (dict(bias=torch.zeros(3, 5)), r"bias has shape \[2, 2, 3, 5\]; it must be \[2, 2, 6, 4\]"),
        (dict(mask=torch.zeros(6, 4, dtype=torch.complex64)), r"mask is torch.complex64; give bool \(True keeps\)"),
        (dict(mask=torch.full((6, 4), 2)), "mask is torch.int64 and holds 2; integers say 1"),
        (dict(bias=torch.zeros(6, 4, dtype=torch.long)), "bias is torch.int64; give floating numbers"),
        (dict(sinks=torch.zeros(3)), r"sinks has shape \[3\]; it must be \[2\]"),
        (dict(cu_seqlens_q=torch.tensor([0, 6])), "packed sequences"),
        (dict(alibi_slopes=torch.ones(2, requires_grad=True)), "alibi_slopes require a gradient"),
        (dict(key_lengths=torch.tensor([1])), r"key_lengths has shape \[1\]; it must be \[2\]"),
        (dict(seed=torch.zeros(3, dtype=torch.int64), dropout_p=0.1), r"seed has shape \[3\]"),
    ],
)
def test_errors(options, words):
    query, key, value = products((2, 2, 6, 4, 8), torch.float32)
    with pytest.raises((RuntimeError, ValueError), match=words):
        attention(query, key, value, **options)


def test_errors_of_products():
    query, key, value = products((2, 3, 6, 4, 8), torch.float32)
    with pytest.raises(RuntimeError, match="query has 3 heads, key has 2"):
        attention(query, key[:, :2], value[:, :2])
    with pytest.raises(RuntimeError, match="for one sequence add a batch of 1"):
        attention(query[0], key[0], value[0])
    with pytest.raises(RuntimeError, match="key is bf16, query is fp32"):
        attention(query, key.bfloat16(), value)
    grad = torch.autograd.grad(attention(query, key, value).sum(), query, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="its gradient has no derivative of its own"):
        torch.autograd.grad(grad.sum(), key)


def test_tf32_is_for_fp32_on_a_gpu():
    """None asks torch, an answer of the caller's goes first, and nothing else is ever rounded."""

    def allows(device, dtype=torch.float32, **options):
        query = torch.empty(1, 2, 8, 64, device=device, dtype=dtype)
        return attention_options(query, query, **options).allow_tf32

    for torch_allows in ("ieee", "tf32"):
        with FakeTensorMode(allow_non_fake_inputs=True), products_of_fp32(torch_allows):
            assert allows("cuda") == (torch_allows == "tf32")
            assert allows("cuda", allow_tf32=True) and not allows("cuda", allow_tf32=False)
            assert not allows("cpu", allow_tf32=True) and not allows("cuda", torch.bfloat16, allow_tf32=True)
    tensors = [x.detach() for x in products((1, 2, 20, 30, 16), torch.float32)]
    assert torch.equal(attention(*tensors, allow_tf32=True), attention(*tensors))
