"""The layers against the plain torch composition of the same weights: values, gradients, state_dicts both ways."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch import core  # noqa: E402

nn, F = torch.nn, torch.nn.functional


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()


class LinearActivation(nn.Linear):
    def __init__(self, i, o, function, **options):
        super().__init__(i, o, **options)
        self.function = function

    def forward(self, x):
        return self.function(super().forward(x))


class NormActivation(nn.LayerNorm):
    def __init__(self, shape, function, **options):
        super().__init__(shape, **options)
        self.function = function

    def forward(self, x):
        return self.function(super().forward(x))


class PackedSwiGLU(nn.Module):
    def __init__(self, dim, hidden, bias=False):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(dim, 2 * hidden, bias), nn.Linear(hidden, dim, bias)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class SwiGLU(nn.Module):
    def __init__(self, dim, hidden, bias=False):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(dim, hidden, bias), nn.Linear(dim, hidden, bias)
        self.down_proj = nn.Linear(hidden, dim, bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.MultiheadAttention):
    def __init__(self, *args, **options):
        super().__init__(*args, batch_first=True, **options)

    def forward(self, x, key=None, value=None, attn_mask=None):
        key = x if key is None else key
        value = key if value is None else value
        return super().forward(x, key, value, attn_mask=attn_mask, need_weights=False)[0]


class Block(nn.Module):
    def __init__(self, dim, heads, ratio):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2, self.mlp = nn.LayerNorm(dim), SwiGLU(dim, dim * ratio)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


# name: (ours, torch's, shape of x)
PAIRS = {
    "linear": (lambda: core.OptimizedLinear(12, 20), lambda: nn.Linear(12, 20), (3, 5, 12)),
    "linear without bias": (
        lambda: core.OptimizedLinear(12, 20, False, "conservative"),
        lambda: nn.Linear(12, 20, bias=False),
        (12,),
    ),
    "linear relu": (lambda: core.FusedLinearActivation(12, 20), lambda: LinearActivation(12, 20, F.relu), (3, 5, 12)),
    "linear gelu": (
        lambda: core.FusedLinearActivation(12, 20, "gelu"),
        lambda: LinearActivation(12, 20, F.gelu),
        (7, 12),
    ),
    "linear swish without bias": (
        lambda: core.FusedLinearActivation(12, 20, "swish", bias=False),
        lambda: LinearActivation(12, 20, F.silu, bias=False),
        (3, 12),
    ),
    "gelu": (lambda: core.FusedGELU(), lambda: nn.GELU(), (3, 5, 12)),
    "gelu tanh": (lambda: core.FusedGELU("tanh"), lambda: nn.GELU("tanh"), (3, 5, 12)),
    "relu": (lambda: core.FusedReLU(), lambda: nn.ReLU(), (3, 5, 12)),
    "swiglu": (lambda: core.FusedSwiGLU(12, 20), lambda: PackedSwiGLU(12, 20), (3, 5, 12)),
    "swiglu with bias": (lambda: core.FusedSwiGLU(12, bias=True), lambda: PackedSwiGLU(12, 48, True), (5, 12)),
    "norm gelu": (lambda: core.FusedLayerNormActivation(12), lambda: NormActivation(12, F.gelu), (3, 5, 12)),
    "norm silu": (
        lambda: core.FusedLayerNormActivation((5, 12), "silu", bias=False),
        lambda: NormActivation((5, 12), F.silu, bias=False),
        (3, 5, 12),
    ),
    "attention": (lambda: core.AttentionLayer(24, 3, 0.0), lambda: Attention(24, 3), (2, 7, 24)),
    "attention without bias": (
        lambda: core.CompilerOptimizedMultiHeadAttention(24, 3, bias=False),
        lambda: Attention(24, 3, bias=False),
        (2, 7, 24),
    ),
    "attention of one sequence": (
        lambda: core.OptimizedMultiHeadAttention(24, 3, 0.0),
        lambda: Attention(24, 3),
        (7, 24),
    ),
    "mlp": (lambda: core.OptimizedMLP(12, 20), lambda: SwiGLU(12, 20), (3, 5, 12)),
    "mlp with bias": (lambda: core.OptimizedMLP(12, bias=True), lambda: SwiGLU(12, 48, True), (3, 5, 12)),
    "block": (lambda: core.OptimizedTransformerBlock(24, 3, 2, 0.0), lambda: Block(24, 3, 2), (2, 7, 24)),
}
pairs = pytest.mark.parametrize("name", PAIRS)


def make(name):
    """Ours and torch's with the same random weights, loaded from torch's state_dict."""
    ours, theirs, shape = (PAIRS[name][0](), PAIRS[name][1](), PAIRS[name][2])
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs, shape


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5)


@pairs
def test_values_gradients_and_state_dict(name):
    ours, theirs, shape = make(name)
    x = torch.randn(shape)
    mine, other = (x.clone().requires_grad_() for _ in range(2))
    output, expected = ours(mine), theirs(other)
    close(output, expected)
    weights = torch.randn_like(expected)
    got = torch.autograd.grad(output, [mine, *ours.parameters()], weights)
    want = torch.autograd.grad(expected, [other, *theirs.parameters()], weights)
    for (what, _), one, two in zip([("x", None), *ours.named_parameters()], got, want, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4, msg=lambda m, what=what: f"{what}: {m}")
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.3)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    with torch.no_grad():
        close(ours(x), theirs(x))


@pairs
def test_strided_input_and_copies(name):
    ours, theirs, shape = make(name)
    x = torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    with torch.no_grad():
        close(ours(x), theirs(x))
        assert torch.equal(copy.deepcopy(ours)(x), ours(x))
        assert repr(ours).startswith(type(ours).__name__)


@pairs
def test_compiles_without_a_break(name):
    ours, _, shape = make(name)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x = torch.randn(shape, requires_grad=True)
    close(compiled(x), ours(x))
    weights = torch.randn_like(ours(x))
    leaves = [x, *ours.parameters()]
    for one, two in zip(
        torch.autograd.grad(compiled(x), leaves, weights), torch.autograd.grad(ours(x), leaves, weights), strict=True
    ):
        close(one, two)


@pytest.mark.parametrize("name", ["linear gelu", "swiglu with bias", "attention", "block"])
def test_autocast_and_half_precision(name):
    ours, theirs, shape = make(name)
    x = torch.randn(shape)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        under = ours(x)
    exact = theirs(x).detach()
    assert (under.float() - exact).abs().max() < 0.06 * exact.abs().max()
    half = ours.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert (half.float() - exact).abs().max() < 0.06 * exact.abs().max()


def test_cross_attention_masks_and_causality():
    ours, theirs, _ = make("attention")
    ours.eval()
    query, key, value = torch.randn(2, 7, 24), torch.randn(2, 5, 24), torch.randn(2, 5, 24)
    close(ours(query, key, value), theirs(query, key, value))
    close(ours(query, key), theirs(query, key, key))
    seen = torch.rand(7, 5) < 0.6
    seen[:, 0] = True
    close(ours(query, key, value, attn_mask=seen), theirs(query, key, value, attn_mask=~seen))
    added = torch.randn(7, 5)
    close(ours(query, key, value, attn_mask=added), theirs(query, key, value, attn_mask=added))
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    close(ours(query, is_causal=True), theirs(query, attn_mask=~causal))
    partly = torch.rand(7, 7) < 0.6
    partly[:, 0] = True
    close(ours(query, attn_mask=partly, is_causal=True), ours(query, attn_mask=partly & causal))
    stacked, masks = torch.randn(3, 2, 7, 24), torch.rand(3, 2, 1, 7, 7) < 0.6
    masks[..., 0] = True
    one_by_one = [ours(x, attn_mask=mask) for x, mask in zip(stacked, masks, strict=True)]
    close(ours(stacked, attn_mask=masks), torch.stack(one_by_one))
    block, x = core.OptimizedTransformerBlock(24, 3).eval(), torch.randn(2, 7, 24)
    close(block(x, is_causal=True), block(x, attn_mask=causal))
    changed = x.clone()
    changed[:, 4:] += 1
    close(block(changed, is_causal=True)[:, :4], block(x, is_causal=True)[:, :4])


def test_functions():
    x, gate, up = torch.randn(3, 12), torch.randn(20, 12), torch.randn(20, 12)
    close(core.fused_swiglu(x, gate, up), F.silu(x @ gate.T) * (x @ up.T))
    weight, bias = torch.randn(12), torch.randn(12)
    close(core.fused_layer_norm(x, weight, bias), F.layer_norm(x, (12,), weight, bias))
    close(core.fused_layer_norm(x, None, None, 1e-2), F.layer_norm(x, (12,), eps=1e-2))


def test_relu_in_place_overwrites():
    x = torch.randn(4, 5)
    expected = F.relu(x)
    assert core.FusedReLU(inplace=True)(x) is x and torch.equal(x, expected)


DROPPING = {
    "linear": (lambda p: core.FusedLinearActivation(64, 256, "identity", dropout=p), 64),
    "swiglu": (lambda p: core.FusedSwiGLU(64, 256, dropout=p), 64),
    "mlp": (lambda p: core.OptimizedMLP(64, 256, dropout=p), 64),
    "attention": (lambda p: core.AttentionLayer(64, 4, p), 64),
    "block": (lambda p: core.OptimizedTransformerBlock(64, 4, 2, p), 64),
}


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_is_for_training_and_keeps_the_mean(name):
    build, features = DROPPING[name]
    layer, x = build(0.25), torch.randn(2, 16, features)
    with torch.no_grad():
        layer.eval()
        exact = layer(x)
        assert torch.equal(layer(x), exact)
        layer.train()
        first, second = layer(x), layer(x)
        assert not torch.equal(first, exact) and not torch.equal(first, second)
        torch.manual_seed(5)
        third = layer(x)
        torch.manual_seed(5)
        assert torch.equal(layer(x), third)
        if name == "block":  # not linear in what is dropped: its mean is another
            return
        runs = torch.stack([layer(x) for _ in range(200)])
        # A mean of 200 runs is within 6 of its standard errors.
        error = (runs.mean(0) - exact).abs() / (runs.std(0) / 200**0.5 + 1e-6)
        assert error.mean() < 1.1 and (error < 6).all()


def test_dropout_in_a_linear_drops_its_share():
    layer = core.FusedLinearActivation(8, 4096, "identity", dropout=0.25)
    output = layer(torch.randn(16, 8))
    share = (output == 0).double().mean().item()
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / output.numel()) ** 0.5


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: core.OptimizedLinear(4, 4, True, "extreme"), ["extreme", "balanced"]),
        (lambda: core.FusedLinearActivation(4, 4, "mish"), ["mish", "gelu"]),
        (lambda: core.FusedLinearActivation(4, 4, dropout=1.5), ["dropout", "1.5"]),
        (lambda: core.FusedGELU("erf"), ["erf", "tanh"]),
        (lambda: core.FusedLayerNormActivation(4, "mish"), ["mish", "gelu"]),
        (lambda: core.AttentionLayer(10, 3), ["10", "3 heads"]),
        (lambda: core.AttentionLayer(10, 0), ["10", "0 heads"]),
        (lambda: core.OptimizedTransformerBlock(10, 3), ["10", "3 heads"]),
        (lambda: core.AttentionLayer(9, 3, dropout=-0.1), ["dropout", "-0.1"]),
        (lambda: core.OptimizedMLP(9, dropout=2), ["dropout", "2"]),
    ],
)
def test_wrong_constructions(build, words):
    with pytest.raises(ValueError) as raised:
        build()
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize("name", ["linear", "linear gelu", "swiglu", "mlp", "attention", "block"])
def test_wrong_inputs(name):
    ours, _, shape = make(name)
    with pytest.raises(RuntimeError, match=rf"{type(ours).__name__}: (x|query) has shape .*\b{shape[-1]}\b"):
        ours(torch.randn(*shape[:-1], shape[-1] + 1))
    with pytest.raises(RuntimeError, match="has shape"):
        ours(torch.randn(()))


def test_a_block_learns():
    block = core.OptimizedTransformerBlock(16, 2, 2, dropout=0.1).train()
    optimizer = torch.optim.AdamW(block.parameters(), 3e-3)
    x = torch.randn(8, 6, 16)
    target = x.flip(1)
    losses = []
    for _ in range(60):
        loss = (block(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.gpu
@pairs
def test_the_same_on_a_gpu(name):
    ours, _, shape = make(name)
    x, weights = torch.randn(shape, requires_grad=True), None
    results = []
    for device in ("cpu", "cuda"):
        layer = copy.deepcopy(ours).to(device)
        leaf = x.detach().to(device).requires_grad_()
        output = layer(leaf)
        weights = torch.randn_like(output) if weights is None else weights.to(device)
        results.append([output, *torch.autograd.grad(output, [leaf, *layer.parameters()], weights)])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(two.cpu(), one, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_a_captured_block_drops_anew_on_every_replay():
    block, x = core.OptimizedTransformerBlock(64, 4, dropout=0.2).cuda(), torch.randn(2, 16, 64, device="cuda")
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                block(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = block(x)
        replays = []
        for _ in range(2):
            graph.replay()
            replays.append(output.clone())
    torch.cuda.synchronize()
    assert not torch.equal(*replays)
    exact = block.eval()(x)
    assert all((replay - exact).abs().mean() < exact.abs().mean() for replay in replays)


def test_optimization_levels_of_a_linear_layer_have_an_effect() -> None:
    from kernel_pytorch.hardware import device_info

    torch.manual_seed(0)
    x = torch.randn(64, 256, requires_grad=True)
    layers = {
        level: core.OptimizedLinear(256, 64, optimization_level=level)
        for level in ("conservative", "balanced", "aggressive")
    }
    for layer in layers.values():
        layer.load_state_dict(layers["balanced"].state_dict())
    want = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    errors = {level: ((layer(x) - want).norm() / want.norm()).item() for level, layer in layers.items()}
    assert errors["conservative"] < 1e-6 and errors["balanced"] < 1e-6
    if device_info("cpu").cpu.isa in ("v4bf16", "v4amx", "neonbf16", "sve256"):
        assert 1e-4 < errors["aggressive"] < 1e-2
    else:
        assert errors["aggressive"] == errors["balanced"]
    (gradient,) = torch.autograd.grad(layers["aggressive"](x).sum(), x)
    torch.testing.assert_close(gradient, layer.weight.sum(0).expand_as(x), rtol=2e-2, atol=2e-2)
    half = x.detach().bfloat16()
    results = [layer.bfloat16()(half) for layer in layers.values()]
    assert torch.equal(results[0], results[1]) and torch.equal(results[1], results[2])


@pytest.mark.gpu
def test_a_conservative_linear_layer_is_exact_where_torch_is_allowed_tf32() -> None:
    layer = core.OptimizedLinear(512, 512, optimization_level="conservative").cuda()
    x = torch.randn(64, 512, device="cuda")
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        want = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
        assert (layer(x) - want).norm() < 1e-6 * want.norm()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
