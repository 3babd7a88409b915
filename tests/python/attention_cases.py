"""Attention of random products with every option, compared with the formula in fp64: output, lse and gradients."""

from __future__ import annotations

import contextlib

import torch
from attention_reference import attend
from kernel_pytorch.functional import attention

# How far a result may be from fp64, of its largest value.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@contextlib.contextmanager
def products_of_fp32(precision):
    """torch's own setting, "ieee" or "tf32"."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = precision
    try:
        yield
    finally:
        matmul.fp32_precision = before


def assert_close(ours, expected, dtype, what=""):
    ours, expected = ours.detach().cpu(), expected.detach().cpu()
    infinite = torch.isinf(expected)
    assert torch.equal(torch.isinf(ours), infinite), what
    ours, expected = ours.double().masked_fill(infinite, 0), expected.double().masked_fill(infinite, 0)
    assert not torch.isnan(ours).any(), what
    limit = TOLERANCE[dtype] * max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
    worst = float((ours - expected).abs().max()) if ours.numel() else 0.0
    assert worst <= limit, f"{what}: {worst} > {limit}"


def leaf(*shape, dtype=torch.float64, generator=None, device="cpu"):
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(device, dtype).requires_grad_()


def to_cpu(option):
    return option.cpu() if isinstance(option, torch.Tensor) else option


def compare(query, key, value, dtype, *, layout="bhsd", **options):
    """Output, lse and gradients by a random weighting of both."""
    generator = torch.Generator().manual_seed(7)
    leaves = {"query": query, "key": key, "value": value}
    leaves |= {name: options[name] for name in ("bias", "sinks") if options.get(name) is not None}
    doubles = {name: tensor.detach().cpu().double().requires_grad_() for name, tensor in leaves.items()}
    formula_options = {name: doubles.get(name, to_cpu(option)) for name, option in options.items()}

    def to_heads(x):
        return x.transpose(1, 2) if layout == "bshd" else x

    expected, expected_lse = attend(*(to_heads(doubles[name]) for name in ("query", "key", "value")), **formula_options)
    output, lse = attention(query, key, value, layout=layout, return_lse=True, **options)
    alone = attention(query, key, value, layout=layout, **options)
    assert torch.equal(alone, output)
    assert output.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(to_heads(output), expected, dtype, "output")
    assert_close(lse, expected_lse, dtype, "lse")
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=generator).to(dtype)
    lse_weights = torch.randn(expected_lse.shape, dtype=torch.float64, generator=generator)

    def gradients(output, lse, leaves):
        finite = torch.where(torch.isinf(lse), 0.0, lse)
        on_device = [weight.to(lse.device) for weight in (weights.double(), lse_weights)]
        loss = (output.double() * on_device[0]).sum() + (finite.double() * on_device[1]).sum()
        return torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)

    grads = zip(
        leaves, gradients(to_heads(output), lse, leaves), gradients(expected, expected_lse, doubles), strict=True
    )
    for name, actual, wanted in grads:
        assert actual.dtype == leaves[name].dtype and actual.shape == leaves[name].shape, name
        assert_close(actual, wanted, dtype, name)


def products(shape, dtype, *, key_heads=None, value_size=None, layout="bhsd", seed=0, device="cpu"):
    batch, heads, queries, keys, size = shape
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, queries, size), (key_heads or heads, keys, size), (key_heads or heads, keys, value_size or size)]
    made = []
    for h, s, d in shapes:
        made.append(
            leaf(batch, *((h, s) if layout == "bhsd" else (s, h)), d, dtype=dtype, generator=generator, device=device)
        )
    return made


def option_values(name, shape, dtype, device="cpu"):
    """The arguments of an option, those that are tensors on the device; leaves where they have a gradient."""
    batch, heads, queries, keys, _ = shape
    generator = torch.Generator().manual_seed(len(name))
    number = torch.float64 if dtype == torch.float64 else torch.float32
    integers = lambda high, *size: torch.randint(-1, high, size, generator=generator)  # noqa: E731
    made = {
        "causal": dict(causal=True),
        "causal_offset": dict(causal=True, causal_offset=0),
        "window": dict(window=(queries // 3, 2)),
        "left": dict(window=(1, -1)),
        "alibi": dict(alibi_slopes=torch.rand(heads, generator=generator, dtype=number)),
        "bias": dict(bias=leaf(batch, heads, queries, keys, dtype=dtype, generator=generator)),
        "bias_heads": dict(bias=leaf(heads, queries, keys, dtype=number, generator=generator)),
        "bias_row": dict(bias=leaf(batch, 1, 1, keys, dtype=dtype, generator=generator)),
        "mask": dict(mask=torch.rand(batch, 1, queries, keys, generator=generator) > 0.4),
        "mask_row": dict(mask=torch.rand(keys, generator=generator) > 0.4),
        "softcap": dict(softcap=1.3),
        "softcap_after": dict(softcap=1.3, softcap_after_bias=True),
        "sinks": dict(sinks=leaf(heads, dtype=number, generator=generator)),
        "segments": dict(query_segment_ids=integers(2, batch, queries), key_segment_ids=integers(2, batch, keys)),
        "lengths": dict(key_lengths=torch.randint(0, keys + 1, (batch,), generator=generator)),
        "scale": dict(scale=-0.4),
    }[name]

    def on_device(option):
        if not isinstance(option, torch.Tensor):
            return option
        return option.detach().to(device).requires_grad_(option.requires_grad)

    return {key: on_device(option) for key, option in made.items()}


ALL_OPTIONS = [
    "causal", "causal_offset", "window", "left", "alibi", "bias", "bias_heads", "bias_row", "mask", "mask_row",
    "softcap", "softcap_after", "sinks", "segments", "lengths", "scale",
]  # fmt: skip
