"""attention_fp8: what rounding to e4m3 leaves of attention, against the same rounding written in torch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from attention_reference import attend  # noqa: E402
from kernel_pytorch.attention import AttentionConfig, FlashAttention3, FP8AttentionConfig  # noqa: E402

from kernel_pytorch import functional  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x [batch, heads, rows, size] to e4m3, 128 rows to a power of two."""
    blocks = []
    for block in x.float().split(128, dim=2):
        largest = block.abs().amax((2, 3), keepdim=True)
        scale = torch.exp2(torch.ceil(torch.log2(largest / 448)))
        scale = torch.where(largest > 0, scale, torch.ones_like(scale))
        blocks.append((block / scale).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(blocks, 2).double()


def tensors(device: str, dtype: torch.dtype, shape=(2, 4, 150, 64), key_heads=2, keys=300, value_size=64):
    generator = torch.Generator().manual_seed(3)
    batch, _heads, _queries, size = shape
    sizes = (shape, (batch, key_heads, keys, size), (batch, key_heads, keys, value_size))
    return [torch.randn(one, generator=generator).to(device, dtype) for one in sizes]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 9)}, {"causal": True, "window": (200, 0)}])
def test_it_is_attention_of_rounded_operands(device, dtype, options) -> None:
    query, key, value = tensors(device, dtype)
    output, lse = functional.attention_fp8(query, key, value, return_lse=True, **options)
    expected, expected_lse = attend(rounded(query), rounded(key), rounded(value), **options)
    assert output.dtype is dtype and lse.dtype is torch.float32
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-3, rtol=2e-3)
    # On Hopper probabilities are rounded to four bits; elsewhere to value's type.
    allowed = 2.0**-4 if device == "cuda" else {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    assert float((output.double() - expected).abs().max()) < allowed * float(expected.abs().max())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [128, 80])
def test_a_rotation_spreads_what_stands_out(device, size) -> None:
    query, key, value = tensors(device, torch.bfloat16, (1, 2, 200, size), value_size=size)
    for x in (query, key):
        x[..., ::16] *= 20
    query = (query.float() / 20).to(query.dtype)
    expected, lse = attend(query.double(), key.double(), value.double(), causal=True)

    def error(**options) -> float:
        output = functional.attention_fp8(query, key, value, causal=True, **options)
        return float((output.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())

    assert error(rotate=True) < 0.7 * error()
    found = functional.attention_fp8(query, key, value, causal=True, rotate=True, return_lse=True)[1]
    assert float((found.double() - lse).abs().mean()) < 0.15  # of about 12: the rotation leaves scores in place


@pytest.mark.parametrize("device", DEVICES)
def test_layouts_strides_and_groups(device) -> None:
    query, key, value = tensors(device, torch.bfloat16, (2, 6, 70, 128), key_heads=3, keys=130, value_size=64)
    plain = functional.attention_fp8(query, key, value, causal=True)
    turned = [x.transpose(1, 2).contiguous() for x in (query, key, value)]
    again = functional.attention_fp8(*turned, causal=True, layout="bshd")
    assert torch.equal(again.transpose(1, 2), plain)
    wide = torch.randn(2, 70, 6, 3 * 128, device=device, dtype=torch.bfloat16)
    slices = [wide[..., i * 128 : (i + 1) * 128] for i in range(3)]  # rows of a packed projection
    packed = functional.attention_fp8(*slices, layout="bshd")
    whole = functional.attention_fp8(*(x.contiguous() for x in slices), layout="bshd")
    assert torch.equal(packed, whole)


def test_rows_that_see_nothing_and_values_that_are_none() -> None:
    query, key, value = tensors("cpu", torch.float32, (1, 1, 20, 16), key_heads=1, keys=8, value_size=8)
    output, lse = functional.attention_fp8(query, key, value, causal=True, return_lse=True)
    assert torch.equal(output[:, :, :12], torch.zeros(1, 1, 12, 8)) and lse[0, 0, :12].isinf().all()
    value[0, 0, 3, 2] = torch.nan
    assert functional.attention_fp8(query, key, value)[0, 0, :, 2].isnan().all()
    zeros = functional.attention_fp8(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8))
    assert torch.equal(zeros, torch.zeros(1, 1, 4, 8))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layout": "sbhd"}, "sbhd"),
        ({"window": (1, 2, 3)}, "window"),
        ({"query": torch.randn(1, 1, 4, 8, dtype=torch.float64)}, "fp64|float64|dtype"),
        ({"key": torch.randn(1, 1, 4, 9)}, "size"),
        ({"query": torch.randn(1, 1, 4, 264), "key": torch.randn(1, 1, 4, 264)}, "256"),
    ],
)
def test_bad_arguments_are_named(change, words) -> None:
    given = {name: torch.randn(1, 1, 4, 8) for name in ("query", "key", "value")} | change
    with pytest.raises(Exception, match=words):
        functional.attention_fp8(given.pop("query"), given.pop("key"), given.pop("value"), **given)


def test_there_is_no_gradient() -> None:
    x = torch.randn(1, 1, 4, 8, requires_grad=True)
    with pytest.raises(Exception, match="attention_fp8"):
        functional.attention_fp8(x, x, x).sum().backward()


def test_a_layer_multiplies_in_fp8_where_its_config_says_so() -> None:
    torch.manual_seed(0)
    fp8 = FP8AttentionConfig(use_fp8=True, sequence_length_threshold=20, rotate=True)
    config = AttentionConfig(64, 4, causal=True, fp8_config=fp8)
    assert AttentionConfig.from_dict(config.to_dict()) == config
    layer, plain = FlashAttention3(config), FlashAttention3(AttentionConfig(64, 4, causal=True))
    plain.load_state_dict(layer.state_dict())
    long, short = torch.randn(2, 24, 64), torch.randn(2, 12, 64)
    with torch.no_grad():
        heads = [layer._heads(one(long)) for one in (layer.q_proj, layer.k_proj, layer.v_proj)]
        attended = functional.attention_fp8(*heads, causal=True, layout="bshd", rotate=True)
        assert torch.equal(layer(long), layer.out_proj(attended.flatten(-2)))
        assert not torch.equal(layer(long), plain(long))
        assert torch.equal(layer(short), plain(short))  # shorter than the threshold
        lengths = torch.tensor([24, 20], dtype=torch.int32)
        assert torch.equal(layer(long, key_lengths=lengths), plain(long, key_lengths=lengths))  # FP8 has no lengths
    assert torch.equal(layer(long), plain(long))  # with a gradient
    layer(long).sum().backward()
