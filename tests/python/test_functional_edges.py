"""Edges that random calls found (tests/fuzz): shapes that are refused, not read as others; empty ones that run."""

from __future__ import annotations

import pytest
import torch

from kernel_pytorch import functional as F


@pytest.mark.parametrize("shape", [(6, 4), (24,), (4, 6, 1)])
def test_as_many_targets_in_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    logits, target = torch.randn(4, 6, 9), torch.zeros(shape, dtype=torch.long)
    words = r"target has shape .* it must be \[4, 6\]"
    with pytest.raises(ValueError, match=f"cross_entropy: {words}"):
        F.cross_entropy(logits, target)
    with pytest.raises(ValueError, match=f"cross_entropy: {words}"):
        F.cross_entropy_(logits.clone(), target)
    with pytest.raises(ValueError, match=f"cross_entropy: {words}"):
        F.cross_entropy_partials(logits, target, vocabulary=9, first_column=0)
    with pytest.raises(ValueError, match=f"linear_cross_entropy: {words}"):
        F.linear_cross_entropy(torch.randn(4, 6, 5), torch.randn(9, 5), target)


def test_the_sum_over_no_rows_is_zero() -> None:
    hidden = torch.randn(0, 5, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(9, 5, dtype=torch.bfloat16, requires_grad=True)
    loss = F.linear_cross_entropy(hidden, weight, torch.zeros(0, dtype=torch.long), reduction="sum")
    loss.backward()
    assert loss.dtype == torch.float32 and float(loss.detach()) == 0
    assert hidden.grad.shape == (0, 5) and not weight.grad.any()


@pytest.mark.parametrize("shape", [(324, 5), (174, 3), (2, 1, 1), (173,)])
def test_scales_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    codes = F.quantize(torch.randn(174, 127)).codes
    with pytest.raises(ValueError, match="dequantize: codes have shape"):
        F.dequantize(codes, torch.ones(shape))


@pytest.mark.parametrize("margin", [33, -33, 2**32, 2**40, -(2**40)])
def test_a_margin_does_not_wrap_around(margin: int) -> None:
    with pytest.raises(RuntimeError, match="quantize: margin is"):
        F.quantize(torch.randn(4, 4), margin=margin)
    with pytest.raises(RuntimeError, match="quantize: margin is"):
        F.rms_norm_quantized(torch.randn(4, 4), margin=margin)


@pytest.mark.parametrize("function", [F.rope, F.rope_])
@pytest.mark.parametrize("heads", [(0, 3), (3, 0), (0, 0)])
def test_rope_of_no_heads(function: object, heads: tuple[int, int]) -> None:
    query, key = (torch.randn(2, 5, count, 8) for count in heads)
    cos, sin = F.rope_tables(5, 8)
    expected = [F.rope(x, None, cos, sin)[0] for x in (query, key)]
    turned = function(query, key, cos, sin)  # type: ignore[operator]
    for actual, wanted in zip(turned or (query, key), expected):
        assert torch.equal(actual, wanted)


def test_frequencies_are_taken_in_the_type_of_the_angles() -> None:
    query = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    inverse, scale = F.rope_frequencies(8, dtype=torch.float64)
    exact = F.rope(query, None, *F.rope_tables(5, 8, dtype=torch.float64))[0]
    torch.testing.assert_close(F.rope_from_frequencies(query, None, inverse, scale=scale)[0], exact)
    narrow = torch.stack([inverse, inverse], 1).float()[:, 0]  # fp32, and not contiguous
    torch.testing.assert_close(F.rope_from_frequencies(query, None, narrow)[0], exact, rtol=1e-6, atol=1e-6)


def test_masks_and_halves_that_do_not_fit_are_named() -> None:
    for function in (F.softmax, F.log_softmax, F.softmax_, F.log_softmax_):
        with pytest.raises(RuntimeError, match=r"softmax: mask has shape \[3, 7\], x has \[2, 7\]"):
            function(torch.randn(2, 7), mask=torch.ones(3, 7, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"interleave_gate_up: gate has shape \[3, 4\], up has \[5, 4\]"):
        F.interleave_gate_up(torch.randn(3, 4), torch.randn(5, 4))
    with pytest.raises(ValueError, match=r"matmul: a has shape \[3, 2, 4\], b has \[5, 4, 2\]"):
        F.matmul(torch.randn(3, 2, 4), torch.randn(5, 4, 2))


def test_products_over_nothing() -> None:
    for a, b in (((2, 3, 0), (0,)), ((2, 3, 0), (0, 5)), ((0, 3, 4), (4, 5))):
        product = F.matmul(torch.randn(a), torch.randn(b))
        assert torch.equal(product, torch.matmul(torch.randn(a), torch.randn(b)))


def test_biases_of_two_types() -> None:
    gate, up = (torch.randn(4, 8, dtype=torch.bfloat16) for _ in range(2))
    one, two = torch.randn(8, dtype=torch.bfloat16), torch.randn(8)
    mixed = F.gated_activation(gate, up, "silu", gate_bias=one, up_bias=two)
    assert torch.equal(mixed, F.gated_activation(gate, up, "silu", gate_bias=one.float(), up_bias=two))


def test_every_element_of_an_expanded_bias_has_its_gradient() -> None:
    query, key, value = torch.randn(3, 3, 2, 5, 8, dtype=torch.float64).unbind(0)
    gradients = []
    for dense in (True, False):
        bias = torch.arange(10.0, dtype=torch.float64).view(1, 2, 5, 1).expand(3, 2, 5, 5)
        bias = (bias.contiguous() if dense else bias).detach().requires_grad_()
        (F.attention(query, key, value, bias=bias) * value).sum().backward()
        gradients.append(bias.grad)
    assert gradients[0][1:].any()
    torch.testing.assert_close(gradients[1], gradients[0])
