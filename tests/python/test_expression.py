"""Traced score and mask functions against the same functions on tensors: torch itself is the reference."""

from __future__ import annotations

import math

import pytest
import torch

from kernel_pytorch.expression import Trace, TraceError, evaluate, trace

BATCH, HEADS, QUERIES, KEYS = 2, 3, 9, 140
LENGTH = max(QUERIES, KEYS)


def places():
    sizes = (BATCH, HEADS, QUERIES, KEYS)
    return [torch.arange(size).view([-1 if i == j else 1 for j in range(4)]) for i, size in enumerate(sizes)]


def scores():
    return torch.randn(BATCH, HEADS, QUERIES, KEYS, generator=torch.Generator().manual_seed(0))


def on_tensors(function, *arguments, captured=()):
    result = function(*arguments, *captured)
    return result.expand(BATCH, HEADS, QUERIES, KEYS)


def random(*sizes, dtype=torch.float32):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(1)).to(dtype)


def integers(low, high, *sizes):
    return torch.randint(low, high, sizes, generator=torch.Generator().manual_seed(2))


slopes = random(HEADS).abs()
bias = random(HEADS, 2 * LENGTH)
narrow_bias = random(HEADS, 2 * LENGTH, dtype=torch.bfloat16)
half_table = random(BATCH, LENGTH, dtype=torch.float16)
strided_bias = random(LENGTH, LENGTH, HEADS).permute(2, 1, 0)[:, 1:, ::2]
expanded_bias = random(1, HEADS, 1, 1).expand(BATCH, HEADS, LENGTH, LENGTH)
documents = integers(0, 3, BATCH, LENGTH).sort().values
short_documents = documents.to(torch.int32)
lengths = torch.tensor([5, 90])
temperature = torch.tensor(1.7)
is_global = integers(0, 2, LENGTH).bool()


def buckets(score, b, h, q, k):  # T5's
    distance = q - k
    direction = torch.where(distance < 0, 16, 0)
    distance = torch.abs(distance)
    large = 8 + (torch.log(torch.clamp(distance, min=1) / 8.0) / math.log(128 / 8) * 8).to(torch.int64)
    bucket = direction + torch.where(distance < 8, distance, torch.clamp(large, max=15))
    return score + bias[h, bucket]


SCORE_MODS = {
    "unchanged": lambda s, b, h, q, k: s,
    "constant": lambda s, b, h, q, k: s * 0 + 1.5,
    "alibi": lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(),
    "alibi by formula": lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / HEADS)),
    "soft cap": lambda s, b, h, q, k: 2.0 * torch.tanh(s / 2.0),
    "relative bias": lambda s, b, h, q, k: s + bias[h, q - k + LENGTH],
    "narrow bias": lambda s, b, h, q, k: s + narrow_bias[h, q - k + LENGTH].float(),
    "strided bias": lambda s, b, h, q, k: s + strided_bias[h, q, k // 3],
    "expanded bias": lambda s, b, h, q, k: s + expanded_bias[b, h, q, k],
    "half table": lambda s, b, h, q, k: s * half_table[b, k],
    "negative index": lambda s, b, h, q, k: s + bias[h, q - k],
    "buckets": buckets,
    "causal score": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    "prefix by where": lambda s, b, h, q, k: torch.where((k < lengths[b]) | (k <= q), s, float("-inf")),
    "scalar tensor": lambda s, b, h, q, k: s * temperature,
    "scalar tensor first": lambda s, b, h, q, k: temperature * s - 1,
    "made inside": lambda s, b, h, q, k: s * torch.tensor(0.25),
    "methods": lambda s, b, h, q, k: s.abs().sqrt().clamp(0.1, 1).neg().sigmoid() + k.float(),
    "unary": lambda s, b, h, q, k: torch.erf(s) + torch.sin(s) * torch.cos(s) + torch.exp(-s) + torch.exp2(s),
    "logarithms": lambda s, b, h, q, k: torch.log(s.square() + 1) + torch.log2(s * s + 2) * torch.rsqrt(s**2 + 1),
    "powers": lambda s, b, h, q, k: s**3 + (q - k) ** 2 + (s.abs() + 1) ** -1 + 2.0**s + (s * s + 1) ** 0.5,
    "relu": lambda s, b, h, q, k: torch.relu(s) + torch.nn.functional.relu(-s),
    "division": lambda s, b, h, q, k: s + q / (k + 1) + (q - k) // 3 + (q - k) % 5 + (q - k) % -5 + 7 // (k + 1),
    "float division": lambda s, b, h, q, k: s // 0.5 + s % 0.75 + torch.div(s, 0.3, rounding_mode="floor"),
    "reflected": lambda s, b, h, q, k: 1 - s + 2 * s + 3 / (s.abs() + 1) + (3 - q) + (1 << (k % 8)) + (5 | q) - (7 & k),
    "bits": lambda s, b, h, q, k: s + ((q ^ k) & 7) + ((q << 2) >> 1) + ~k,
    "floor and ceil": lambda s, b, h, q, k: torch.floor(s) + torch.ceil(s) + s.to(torch.int64),
    "min and max": lambda s, b, h, q, k: torch.minimum(s, slopes[h]) + torch.maximum(q, k) + torch.clamp_min(s, 0),
    "alpha": lambda s, b, h, q, k: torch.add(s, q, alpha=2) - torch.sub(s, k, alpha=3),
    "bool to float": lambda s, b, h, q, k: s + (q > k) * 2.0 + (q == k),
    "unused tensor": lambda s, b, h, q, k: s + 0 * bias[h, 0],
}

MASK_MODS = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k <= 4),
    "prefix": lambda b, h, q, k: (k < lengths[b]) | (k <= q),
    "documents": lambda b, h, q, k: documents[b, q] == documents[b, k],
    "documents of 32 bits": lambda b, h, q, k: (short_documents[b, q] == short_documents[b, k]) & (k <= q),
    "dilated": lambda b, h, q, k: ((q - k) % 2 == 0) & torch.logical_not(k > q + 50),
    "global": lambda b, h, q, k: is_global[q] | is_global[k] | ((q - k).abs() < 3),
    "by head": lambda b, h, q, k: torch.logical_or(h == 0, torch.logical_and(q >= k, h != 1)),
    "xor": lambda b, h, q, k: torch.logical_xor(q > k, ~(k < 3)) ^ (h > 1),
    "always": lambda b, h, q, k: (q >= 0) | (k >= 0),
}


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_functions_compute_what_torch_computes(name):
    function, score = SCORE_MODS[name], scores().requires_grad_()
    expected = on_tensors(function, score, *places())
    traced = trace(function)
    result = evaluate(traced.score_mod, score, traced.captured)
    torch.testing.assert_close(result, expected.float(), rtol=2e-5, atol=2e-5)
    if expected.requires_grad and name != "float division":  # which torch does not differentiate
        (slope,) = torch.autograd.grad(expected.sum(), score)
        computed = evaluate(traced.score_mod, score, traced.captured, derivative=True)
        torch.testing.assert_close(computed, slope, rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize("name", MASK_MODS)
def test_mask_functions_compute_what_torch_computes(name):
    traced = trace(mask_mod=MASK_MODS[name])
    result = evaluate(traced.mask_mod, scores(), traced.captured)
    assert result.dtype == torch.bool
    assert torch.equal(result, on_tensors(MASK_MODS[name], *places()))


def test_indices_may_come_one_by_one():
    chained = trace(lambda s, b, h, q, k: s + expanded_bias[b][h, q][k])
    assert chained.score_mod == trace(SCORE_MODS["expanded bias"]).score_mod


def test_captured_tensors_come_as_arguments_and_are_shared_by_both_functions():
    def score_mod(score, b, h, q, k, table, scale):
        return score * scale + table[h, k]

    def mask_mod(b, h, q, k, table, scale):
        return (table[h, k] > -1) & (documents[b, q] == 0)

    table, scale = random(HEADS, KEYS), torch.tensor(2.0)
    both = trace(score_mod, mask_mod, (table, scale))
    assert [tensor is other for tensor, other in zip(both.captured, (table, scale, documents))] == [True] * 3
    assert both.score_mod.splitlines()[:4] == both.mask_mod.splitlines()[:4], "the same captures in both"
    result = evaluate(both.score_mod, scores(), both.captured)
    torch.testing.assert_close(result, on_tensors(score_mod, scores(), *places(), captured=(table, scale)))
    mask = evaluate(both.mask_mod, scores(), both.captured)
    assert torch.equal(mask, on_tensors(mask_mod, *places(), captured=(table, scale)))
    twice = trace(lambda s, b, h, q, k, one, other: s + one[k] + other[q], captured=(documents[0], documents[0]))
    assert len(twice.captured) == 2


def test_a_function_need_not_take_what_only_the_other_reads():
    table = random(HEADS)
    both = trace(lambda s, b, h, q, k, t: s + t[h], lambda b, h, q, k: q >= k, (table,))
    assert evaluate(both.mask_mod, scores(), both.captured).float().mean() < 0.1
    with pytest.raises(TypeError, match="missing 1 required"):
        trace(lambda s, b, h, q, k, t, u: s + t[h] + u[h], captured=(table,))


def test_texts_are_constants_under_compile():
    def plain(s, b, h, q, k, t):
        return s + t[h]

    def compiled(x, t, limit):
        traced = trace(plain, lambda b, h, q, k: q - k < limit, (t,))
        return x + t * ("load 0" in traced.score_mod) * ("int 3" in traced.mask_mod) * len(traced.captured)

    x, table = random(HEADS), random(HEADS)
    run = torch.compile(compiled, fullgraph=True, backend="eager")
    torch.testing.assert_close(run(x, table, 3), x + table)
    closes = torch.compile(lambda x: x * len(trace(SCORE_MODS["alibi"]).captured), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="pass it as captured"):
        closes(x)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda s, b, h, q, k: s if q > k else 0.0, "torch.where"),
        (lambda s, b, h, q, k: max(s, 0.0), "torch.maximum"),
        (lambda s, b, h, q, k: s * (q > k and k > 0), "for `and`"),
        (lambda s, b, h, q, k: s * math.exp(s), "torch's functions"),
        (lambda s, b, h, q, k: s + bias[h], "shape [3, 280] is used with 1 indices"),
        (lambda s, b, h, q, k: s + bias[h, :], "one element at a time"),
        (lambda s, b, h, q, k: s + bias, "index it"),
        (lambda s, b, h, q, k: torch.cumsum(s, 0), "cannot use torch's 'cumsum'"),
        (lambda s, b, h, q, k: s + "1", "not with '1'"),
        (lambda s, b, h, q, k: None, "not with None"),
        (lambda s, b, h, q, k: s + torch.zeros(3, dtype=torch.uint8)[k], "torch.uint8"),
    ],
)
def test_what_cannot_be_traced_is_refused_with_the_cure(function, words):
    with pytest.raises(TraceError) as refusal:
        trace(function)
    assert words in str(refusal.value)


def test_unknown_attributes_are_named():
    with pytest.raises(AttributeError, match="cumsum"):
        trace(lambda s, b, h, q, k: s.cumsum(0))


def test_the_core_says_which_line_is_wrong():
    traced = trace(lambda s, b, h, q, k: s + bias[h, s])
    with pytest.raises(RuntimeError, match=r"line .*: index 1 of captured tensor 0 is a float"):
        evaluate(traced.score_mod, scores(), traced.captured)
    good = trace(SCORE_MODS["alibi"])
    with pytest.raises(RuntimeError, match="captures 1 tensors and 0 are given"):
        evaluate(good.score_mod, scores())


def test_a_function_is_traced_once_for_its_constants():
    runs = []
    note = runs.append  # a builtin method: it keeps functions cacheable

    def window(size, table):
        def mod(score, b, h, q, k):
            note(size)
            return torch.where(q - k < size, score + table[h], 0.0)

        return mod

    first, second = random(HEADS), random(HEADS)
    trace(window(3, first))
    again = trace(window(3, second))
    assert runs == [3]
    assert again.captured[0] is second, "tensors are found again, not remembered"
    assert trace(window(4, first)).score_mod != again.score_mod
    trace(window(3, random(HEADS, 1)[:, 0]))
    assert runs == [3, 4], "the same shape is the same trace"
    with pytest.raises(TraceError):
        trace(window(3, random(HEADS, 2)))
    assert runs == [3, 4, 3]


def test_constants_that_python_takes_for_equal_are_different():
    texts = {trace(lambda s, b, h, q, k, c=constant: s + c).score_mod for constant in (1, 1.0, True, 0.0, -0.0)}
    assert len(texts) == 5


def test_aliased_tensors_do_not_stay_aliased():
    def sum_of(one, other):
        return lambda s, b, h, q, k: s + one[h] + other[h]

    same = random(HEADS)
    assert len(trace(sum_of(same, same)).captured) == 1
    other = same.clone()
    assert [item is known for item, known in zip(trace(sum_of(same, other)).captured, (same, other))] == [True, True]


def test_values_of_tensors_and_attributes_are_not_remembered():
    class Holder:
        factor = 2.0

    holder, number = Holder(), torch.tensor(3.0)
    assert "float 2.0" in trace(lambda s, b, h, q, k: s * holder.factor).score_mod
    scaled = lambda s, b, h, q, k: s * holder.factor  # noqa: E731
    trace(scaled)
    holder.factor = 5.0
    assert "float 5.0" in trace(scaled).score_mod
    looked_at = lambda s, b, h, q, k: s * number.item()  # noqa: E731
    assert "float 3.0" in trace(looked_at).score_mod
    number.fill_(4.0)
    assert "float 4.0" in trace(looked_at).score_mod
    global LIMIT
    limited = lambda s, b, h, q, k: torch.where(q < LIMIT, s, 0.0)  # noqa: E731
    LIMIT = 7
    assert "int 7" in trace(limited).score_mod
    LIMIT = 8
    assert "int 8" in trace(limited).score_mod


LIMIT = 0


def test_a_traced_value_outlives_its_trace_unused():
    kept = []
    trace(lambda s, b, h, q, k: kept.append(s) or s)
    with pytest.raises(TraceError, match="another trace"):
        trace(lambda s, b, h, q, k: s + kept[0])


def test_no_functions_no_programs():
    assert trace() == Trace("", "", ())
