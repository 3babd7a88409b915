"""rope for torch: values against the formula, layouts, gradients, compilers, scalings against their publications."""

from __future__ import annotations

import itertools
import math

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch import functional  # noqa: E402

ops = torch.ops.kernel_pytorch
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def turned(x, cos, sin, interleaved):
    """The formula: x [..., heads, head_dim], cos and sin [..., pairs] of each token."""
    pairs = cos.shape[-1]
    x, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    cos, sin = cos[..., None, :], sin[..., None, :]
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :pairs], x[..., pairs:])
    new = (first * cos - second * sin, second * cos + first * sin)
    x = torch.stack(new, -1).flatten(-2) if interleaved else torch.cat(new, -1)
    return torch.cat([x, rest], -1)


def assert_near(actual, exact, dtype):
    torch.testing.assert_close(
        actual.detach().cpu().double(), exact.detach(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 4
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("interleaved", [False, True])
def test_values_and_gradients(dtype, interleaved, device):
    if device == "cuda" and dtype is torch.float64:
        pytest.skip("fp64 is the CPU's")
    generator = torch.Generator().manual_seed(3)
    sizes = [
        (2, 7, 4, 2, 64, 64),
        (1, 5, 3, 3, 128, 128),
        (2, 3, 2, 1, 80, 32),
        (1, 4, 1, 1, 6, 2),
        (3, 9, 2, 2, 36, 36),
    ]
    for (batch, sequence, heads, key_heads, dim, rotary), heads_first, full in itertools.product(
        sizes, (False, True), (False, True)
    ):
        query, key = (torch.randn(batch, sequence, n, dim, generator=generator).to(dtype) for n in (heads, key_heads))
        angles = torch.rand(sequence + 2, rotary // 2, generator=generator) * 6
        positions = torch.randint(0, sequence + 2, (batch, sequence), generator=generator)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        exact = [t.double().requires_grad_() for t in (query, key)]
        wanted = [turned(t, cos.double()[positions], sin.double()[positions], interleaved) for t in exact]
        grads = [torch.randn(t.shape, generator=generator).to(dtype) for t in wanted]
        if full:
            widen = (lambda t: t.repeat_interleave(2, -1)) if interleaved else (lambda t: torch.cat([t, t], -1))
            cos, sin = widen(cos), widen(sin)
        leaves = [t.to(device).requires_grad_() for t in (query, key)]
        views = [t.transpose(1, 2) for t in leaves] if heads_first else leaves
        outputs = functional.rope(
            *views,
            cos.to(device),
            sin.to(device),
            interleaved=interleaved,
            positions=positions.to(device),
            heads_first=heads_first,
            rotary_dim=rotary,
        )
        outputs = [t.transpose(1, 2) for t in outputs] if heads_first else list(outputs)
        for mine, theirs in zip(outputs, wanted, strict=True):
            assert_near(mine, theirs, dtype)
        mine = torch.autograd.grad(outputs, leaves, [g.to(device) for g in grads])
        theirs = torch.autograd.grad(wanted, exact, [g.double() for g in grads])
        for a, b in zip(mine, theirs, strict=True):
            assert_near(a, b, dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_hugging_face_convention(device):
    """cos and sin [batch, sequence, head_dim], heads before the sequence, as models/llama applies them."""
    query, key = torch.randn(2, 4, 9, 32, device=device), torch.randn(2, 2, 9, 32, device=device)
    angles = torch.rand(2, 9, 16, device=device) * 6
    cos, sin = (torch.cat([t, t], -1) for t in (angles.cos(), angles.sin()))
    rotate_half = lambda x: torch.cat([-x[..., 16:], x[..., :16]], -1)  # noqa: E731
    for x, mine in zip((query, key), functional.rope(query, key, cos, sin, heads_first=True), strict=True):
        torch.testing.assert_close(mine, x * cos[:, None] + rotate_half(x) * sin[:, None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_straight_out_of_a_packed_projection_and_in_place(dtype, device):
    packed = torch.randn(2, 11, (4 + 2 + 2) * 64, device=device).to(dtype)
    query, key, value = packed.split([4 * 64, 2 * 64, 2 * 64], -1)
    query, key = query.unflatten(-1, (4, 64)), key.unflatten(-1, (2, 64))
    cos, sin = functional.rope_tables(11, 64, device=device)
    wanted = functional.rope(query.contiguous(), key.contiguous(), cos, sin)
    for mine, theirs in zip(functional.rope(query, key, cos, sin), wanted, strict=True):
        assert torch.equal(mine, theirs)
    kept = value.clone()
    functional.rope_(query, key, cos, sin)
    assert torch.equal(query, wanted[0]) and torch.equal(key, wanted[1]) and torch.equal(value, kept)
    functional.rope_(query, key, cos, sin, inverse=True)
    tolerance = 1e-6 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(query, packed[..., : 4 * 64].unflatten(-1, (4, 64)), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_strides(dtype, device):
    base = torch.randn(2, 6, 4, 33, 2, device=device).to(dtype)
    cos, sin = functional.rope_tables(6, 32, device=device)
    for query in (base[..., 0], base[..., 1:, 0], base[:1, ..., 0].expand(3, 6, 4, 33), base[..., 0].transpose(1, 2)):
        rows = query.shape[1]
        mine = functional.rope(query, None, cos[:rows], sin[:rows])[0]
        wanted = functional.rope(query.contiguous(), None, cos[:rows], sin[:rows])[0]
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_computed_angles_stay_exact_at_late_positions(device):
    query = torch.randn(1, 5, 2, 64, device=device)
    positions = torch.tensor([0, 1, 4095, 131_071, 1_000_003], device=device)
    inverse, scale = functional.rope_frequencies(64, device=device)
    mine, none = functional.rope_from_frequencies(query, None, inverse, positions=positions)
    angles = positions.cpu().double()[:, None] * inverse.cpu().double()
    wanted = turned(query.cpu().double(), angles.cos(), angles.sin(), False)
    assert none is None and scale == 1.0
    torch.testing.assert_close(mine.cpu().double(), wanted, rtol=1e-5, atol=3e-6)


def published_yarn(dim, base, factor, original, beta_fast=32.0, beta_slow=1.0):
    """YaRN (Peng et al., 2023), by parts: equation 23 with the ramp between the two numbers of turns."""
    index = lambda turns: dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))  # noqa: E731
    low, high = max(math.floor(index(beta_fast)), 0), min(math.ceil(index(beta_slow)), dim - 1)
    result = []
    for i in range(dim // 2):
        kept = base ** (-2 * i / dim)
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        result.append(kept / factor * ramp + kept * (1 - ramp))
    return torch.tensor(result, dtype=torch.float64), 0.1 * math.log(factor) + 1


def published_llama3(dim, base, factor, original, low=1.0, high=4.0):
    """As the Llama 3.1 release scales: by wavelength."""
    result = []
    for i in range(dim // 2):
        frequency = base ** (-2 * i / dim)
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            result.append(frequency)
        elif wavelength > original / low:
            result.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            result.append((1 - smooth) * frequency / factor + smooth * frequency)
    return torch.tensor(result, dtype=torch.float64)


def test_scalings_are_the_published_ones():
    def made(**arguments):
        return functional.rope_frequencies(128, dtype=torch.float64, **arguments)

    powers = torch.arange(0, 128, 2, dtype=torch.float64) / 128
    near = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-12, atol=0)  # noqa: E731
    near(made(base=5e5)[0], 5e5**-powers)
    near(made(scaling="linear", factor=4.0)[0], 10000**-powers / 4)
    near(made(scaling="ntk", factor=8.0)[0], (10000 * 8 ** (128 / 126)) ** -powers)
    dynamic = {"scaling": "dynamic", "factor": 2.0, "original_positions": 2048}
    near(made(**dynamic, sequence=1000)[0], 10000**-powers)
    near(made(**dynamic, sequence=8192)[0], (10000 * (2 * 8192 / 2048 - 1) ** (128 / 126)) ** -powers)
    wanted, scale = published_yarn(128, 10000.0, 16.0, 4096)
    yarn, yarn_scale = made(scaling="yarn", factor=16.0, original_positions=4096)
    near(yarn, wanted)
    assert yarn_scale == pytest.approx(scale)
    assert made(scaling="yarn", factor=16.0, original_positions=4096, attention_factor=1.5)[1] == 1.5
    llama3 = made(base=5e5, scaling="llama3", factor=8.0, original_positions=8192)
    near(llama3[0], published_llama3(128, 5e5, 8.0, 8192))
    assert llama3[1] == 1.0
    cos, sin = functional.rope_tables(7, 128, scaling="yarn", factor=16.0, original_positions=4096)
    angles = torch.arange(7, dtype=torch.float64)[:, None] * wanted
    torch.testing.assert_close(cos.double(), angles.cos() * scale, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(sin.double(), angles.sin() * scale, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradcheck(interleaved):
    query, key = (torch.randn(2, 3, n, 8, dtype=torch.float64, requires_grad=True) for n in (2, 1))
    cos, sin = functional.rope_tables(3, 6, dtype=torch.float64, scaling="yarn", factor=4.0, original_positions=16)
    assert torch.autograd.gradcheck(
        lambda q, k: functional.rope(q, k, cos, sin, interleaved=interleaved, rotary_dim=6), (query, key)
    )
    assert torch.autograd.gradcheck(lambda q, k: functional.rope(q, k, cos, sin, rotary_dim=6)[1], (query, key))
    inverse, scale = functional.rope_frequencies(8, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda q: functional.rope_from_frequencies(q, None, inverse, scale=scale)[0], query)


def opcheck_samples():
    cos, sin = functional.rope_tables(5, 8)
    positions = torch.randint(0, 5, (2, 5))
    numbers = (1.0, 0, False, False)
    for dtype in (torch.float32, torch.bfloat16):
        query, key = torch.randn(2, 5, 3, 8).to(dtype), torch.randn(2, 5, 1, 8).to(dtype)
        leaves = [t.clone().requires_grad_() for t in (query, key)]
        yield ops.rope, (query, key, cos, sin, None, None, *numbers)
        yield ops.rope_forward, (*leaves, cos, sin, None, positions, *numbers)
        yield ops.rope_forward, (leaves[0], None, cos, sin, None, None, 1.0, 8, True, False)
        yield ops.rope_backward, (query, key, cos, sin, None, positions, *numbers)
        yield ops.rope_in_place, (query.clone(), key.clone(), cos, sin, None, None, *numbers, False)
    inverse = functional.rope_frequencies(8)[0]
    yield ops.rope, (query, key, None, None, inverse, positions, *numbers)
    table = torch.empty(5, dtype=torch.float64)
    yield ops.rope_frequencies, (table, 1e4, "yarn", 2.0, 64.0, 0.0, 32.0, 1.0, 0.0, 1.0, 4.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op, args", list(opcheck_samples()), ids=lambda v: getattr(v, "__name__", ""))
def test_opcheck(op, args):
    torch.library.opcheck(op.default, args)


def test_compiles_without_a_break_and_maps():
    torch._dynamo.reset()
    cos, sin = functional.rope_tables(5, 16)
    query, key = (torch.randn(2, 5, n, 16, requires_grad=True) for n in (4, 2))
    run = lambda q, k: functional.rope(q * 2, k, cos, sin)  # noqa: E731
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    grads = [torch.randn_like(query), torch.randn_like(key)]
    for mine, theirs in zip(compiled(query, key), run(query, key), strict=True):
        assert torch.equal(mine, theirs)
    mine, theirs = (torch.autograd.grad(f(query, key), (query, key), grads) for f in (compiled, run))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    mapped = torch.func.vmap(lambda q: functional.rope(q, None, cos, sin)[0])(query.detach())
    assert torch.equal(mapped, functional.rope(query.detach(), None, cos, sin)[0])


def call(**changes):
    arguments = {
        "query": torch.randn(2, 5, 3, 8), "key": torch.randn(2, 5, 1, 8), "cos": torch.randn(5, 4),
        "sin": torch.randn(5, 4),
    } | changes  # fmt: skip
    return functional.rope(**arguments)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"query": torch.randn(5, 8)}, r"rope: query has shape \[5, 8\]; it must be \[batch, sequence, heads"),
        ({"key": torch.randn(2, 4, 1, 8)}, r"rope: key has shape \[2, 4, 1, 8\], query has \[2, 5, 3, 8\]"),
        ({"cos": torch.randn(4, 4), "sin": torch.randn(4, 4)}, "rope: cos has 4 rows, the sequence is 5 long"),
        ({"sin": torch.randn(5, 8)}, r"rope: cos is .*, sin is .*; they must have one shape and type"),
        ({"rotary_dim": 10}, "rope: rotary_dim is 10, head_dim is 8; it must be even, positive and at most that"),
        (
            {"rotary_dim": 4, "cos": torch.randn(5, 3), "sin": torch.randn(5, 3)},
            r"rope: cos has shape \[5, 3\], rotary",
        ),
        ({"positions": torch.full((5,), 7)}, r"rope: positions\[0, 0\] is 7, cos has 5 rows"),
        ({"positions": torch.zeros(5)}, "rope: positions is fp32; it must be int64 or int32"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, r"rope: positions has shape \[2, 3\], query has"),
        ({"cos": torch.randn(5, 4).half()}, "rope: cos is fp16, query is bf16; it must be bf16 or fp32"),
    ],
)
def test_errors_name_the_op_both_values_and_the_cure(changes, words):
    if "cos" in changes and changes["cos"].dtype is torch.float16:
        changes = {**changes, "query": torch.randn(2, 5, 3, 8).bfloat16(), "key": None}
    with pytest.raises(RuntimeError, match=words):
        call(**changes)


def test_frequencies_refuse_nonsense():
    with pytest.raises(RuntimeError, match='rope_frequencies: scaling is "stretch"; known are none'):
        functional.rope_frequencies(64, scaling="stretch")
    with pytest.raises(RuntimeError, match="rope: original_positions is 0; this scaling needs"):
        functional.rope_frequencies(64, scaling="yarn", factor=2.0)
    with pytest.raises(RuntimeError, match=r"rope: factor is 0\.5; it must be at least 1"):
        functional.rope_frequencies(64, scaling="linear", factor=0.5)
    with pytest.raises(ValueError, match="rope_frequencies: rotary_dim is 3"):
        functional.rope_frequencies(3)


@pytest.mark.gpu
def test_positions_outside_the_table_are_nan_on_a_gpu():
    cos, sin = functional.rope_tables(5, 64, device="cuda")
    query = torch.randn(1, 2, 2, 64, device="cuda")
    output = functional.rope(query, None, cos, sin, positions=torch.tensor([4, 5], device="cuda"))[0]
    assert output[0, 0].isfinite().all() and output[0, 1].isnan().all()
