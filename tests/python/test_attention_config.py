"""How attention layers are asked for: configs, factories, names, wrong inputs, other libraries' weights."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch.core import AttentionLayer  # noqa: E402
from kernel_pytorch.optimizations.next_gen import create_advanced_flex_attention  # noqa: E402

from kernel_pytorch import attention as A  # noqa: E402

X = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(0))


def same(one, other):
    """Whether two layers compute the same once they have the same weights."""
    other.load_state_dict(one.state_dict())
    with torch.no_grad():
        return torch.allclose(one(X), other(X), atol=1e-5)


def test_local_with_causal_is_causal():
    layer = A.create_attention(64, 4, pattern="local", causal=True, sliding_window_size=4)
    assert layer.config.causal and "causal=True" in repr(layer)
    assert same(layer, A.create_attention(64, 4, pattern="sliding_window", sliding_window_size=4))
    assert not same(layer, A.create_attention(64, 4, pattern="local", sliding_window_size=4))
    assert A.AttentionConfig.from_dict(layer.config.to_dict()) == layer.config


@pytest.mark.parametrize("causal, pattern", [(False, "local"), (True, "sliding_window")])
def test_a_window_with_full_is_a_window(causal, pattern):
    layer = A.create_attention(64, 4, causal=causal, sliding_window_size=3)
    assert layer.config.pattern.value == pattern
    assert same(layer, A.create_attention(64, 4, pattern=pattern, sliding_window_size=3))
    assert not same(layer, A.create_attention(64, 4, causal=causal))


def test_fields_that_a_pattern_has_not_are_refused():
    with pytest.raises(ValueError, match="prefix_length is 3, and pattern 'full' has none; give pattern 'prefix_lm'"):
        A.AttentionConfig(64, 4, prefix_length=3)
    with pytest.raises(ValueError, match="sliding_window_size is 3, and pattern 'prefix_lm' has none"):
        A.AttentionConfig(64, 4, pattern="prefix_lm", prefix_length=2, sliding_window_size=3)


def test_no_layer_is_causal_unless_asked():
    layers = [
        A.create_attention(64, 4),
        A.create_flex_attention(64, 4),
        A.create_sparse_attention(64, 4, 0.0),
        A.create_ring_attention(64, 4),
        A.create_context_parallel_attention(64, 4),
        A.RingAttentionLayer(64, 4),
        A.ContextParallelAttention(64, 4),
        create_advanced_flex_attention(64, 4),
        AttentionLayer(64, 4, dropout=0.0),
    ]
    other = X.clone()
    other[:, -1] += 1
    for layer in layers:
        with torch.no_grad():
            assert not torch.allclose(layer(X)[:, 0], layer(other)[:, 0], atol=1e-5), layer


@pytest.mark.parametrize(
    "make",
    [
        lambda: A.FlashAttention3(64, 8),
        lambda: A.FlashAttention3(embed_dim=64, num_heads=8),
        lambda: A.FlashAttention3(d_model=64, n_heads=8),
        lambda: A.FlashAttention3(A.AttentionConfig(d_model=64, n_heads=8)),
        lambda: A.create_attention(64, 8),
        lambda: A.create_attention(embed_dim=64, num_heads=8),
        lambda: A.create_attention(d_model=64, n_heads=8, use_flash_attention=True),
        lambda: A.create_attention(A.AttentionConfig(64, 8, use_flash_attention=True)),
        lambda: A.FlexAttentionLayer(64, num_heads=8),
        lambda: A.create_flex_attention(embed_dim=64, num_heads=8, pattern="standard"),
        lambda: A.create_flex_attention(d_model=64, n_heads=8),
        lambda: A.DynamicSparseAttention(A.AttentionConfig(64, 8), sparsity_ratio=0.5),
        lambda: A.create_sparse_attention(embed_dim=64, num_heads=8, sparsity=0.5),
        lambda: A.create_ring_attention(64, 8, ring_size=1),
    ],
)
def test_sizes_go_by_their_usual_names(make):
    layer = make()
    assert (layer.embed_dim, layer.num_heads, layer.head_dim) == (64, 8, 8)
    assert layer(X).shape == X.shape
    assert AttentionLayer(64, 8).embed_dim == 64


@pytest.mark.parametrize(
    "name, kind",
    [
        ("flash_attention", A.FlashAttention3),
        ("flash_attention2", A.FlashAttention3),
        ("flash_attention3", A.FlashAttention3),
        ("memory_efficient_attention", A.FlashAttention3),
        ("flex_attention", A.FlexAttentionLayer),
        ("flex_attention_causal", A.FlexAttentionLayer),
        ("dynamic_sparse_attention", A.DynamicSparseAttention),
        ("ring_attention", A.RingAttentionLayer),
    ],
)
def test_implementations(name, kind):
    for layer in (
        A.create_attention(A.AttentionConfig(64, 8, kv_heads=2), implementation=name),
        A.create_attention(A.AttentionConfig(64, 8, kv_heads=2, implementation=name)),
        A.create_attention(64, 8, kv_heads=2, implementation=name),
    ):
        assert type(layer) is kind and layer.config.kv_heads == 2
        assert layer.config.causal == name.endswith("causal")
    window = A.create_attention(64, 8, sliding_window_size=3, implementation="flex_attention_sliding_window")
    assert window.config.pattern is A.AttentionPatterns.SLIDING_WINDOW
    sparse = A.create_attention(64, 8, implementation="dynamic_sparse_attention", sparsity_ratio=0.25, causal=True)
    assert sparse.sparsity_ratio == 0.25 and sparse.config.causal
    assert A.create_attention(64, 8, mask_mod=A.FlexAttentionMaskMods.causal).mask_mod is not None


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda: A.create_attention(64, 8, casual=True),
            "create_attention: there is no argument 'casual'; did you mean",
        ),
        (lambda: A.FlashAttention3(64, 8, casual=True), "FlashAttention3: there is no argument 'casual'; did you mean"),
        (lambda: A.AttentionConfig(64, 8, casual=True), "AttentionConfig: there is no argument 'casual'"),
        (
            lambda: A.create_flex_attention(64, 8, kvheads=1),
            "create_flex_attention: .* 'kvheads'; did you mean 'kv_heads'",
        ),
        (
            lambda: A.create_sparse_attention(64, 8, blocksize=8),
            "create_sparse_attention: .* did you mean 'block_size'",
        ),
        (lambda: A.DynamicSparseAttention(64, 8, blocksize=8), "DynamicSparseAttention: .* did you mean 'block_size'"),
        (lambda: A.create_ring_attention(64, 8, rng_size=1), "create_ring_attention: .* did you mean 'ring_size'"),
        (lambda: A.create_attention(), "create_attention: give an AttentionConfig, or embed_dim and num_heads"),
        (lambda: A.create_attention(64), "create_attention: give an AttentionConfig, or embed_dim and num_heads"),
        (lambda: A.create_attention(64, 8, d_model=64), "create_attention: embed_dim is given twice"),
        (lambda: A.AttentionConfig(d_model=64, embed_dim=64, num_heads=8), "AttentionConfig: embed_dim is given twice"),
        (lambda: A.create_attention(A.AttentionConfig(64, 8), causal=True), "causal belongs into the AttentionConfig"),
        (lambda: A.FlexAttentionLayer(64, 8), "FlexAttentionLayer: score_mod is 8, which is no function"),
    ],
)
def test_wrong_names_name_the_call(make, words):
    with pytest.raises(TypeError, match=words):
        make()


def test_unknown_implementations_and_what_one_has_not():
    with pytest.raises(ValueError, match="implementation is 'spiral'; use one of dynamic_sparse_attention, flash"):
        A.create_attention(64, 8, implementation="spiral")
    with pytest.raises(ValueError, match="head_dim is 16, which ring_attention has not"):
        A.create_attention(64, 8, head_dim=16, implementation="ring_attention")


def test_alibi_is_known_to_every_factory():
    layers = [
        create_advanced_flex_attention(64, 8, "alibi"),
        A.create_flex_attention(64, 8, "alibi"),
        A.create_attention(64, 8, pattern="alibi"),
    ]
    for layer in layers:
        assert layer.config.alibi and layer.config.causal and same(layers[0], layer)
    assert A.create_flex_attention(64, 8, "soft_cap", soft_cap=3.0).config.soft_cap == 3.0


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"causal": True},
        {"pattern": "alibi", "kv_heads": 2},
        {"pattern": "prefix_lm", "prefix_length": 4},
        {"sliding_window_size": 3, "soft_cap": 2.0},
    ],
)
def test_plain_attention_gives_the_same_and_second_derivatives(fields):
    flash, plain = (
        A.create_attention(64, 8, use_flash_attention=on, dtype=torch.float64, **fields) for on in (True, False)
    )
    plain.load_state_dict(flash.state_dict())
    x = X[:1, :6].double().requires_grad_()
    mask = torch.rand(1, 1, 6, 6, generator=torch.Generator().manual_seed(1)) < 0.6
    torch.testing.assert_close(plain(x, attention_mask=mask), flash(x, attention_mask=mask))
    (first,) = torch.autograd.grad(plain(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert second.abs().sum() > 0 and second.isfinite().all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda **fields: A.create_attention(64, 8, **fields),
        lambda **fields: A.create_flex_attention(64, 8, **fields),
        lambda **fields: A.create_sparse_attention(64, 8, 0.0, **fields),
        lambda **fields: A.create_ring_attention(64, 8, **fields),
    ],
)
def test_weights_of_torchs_attention_load(make, bias):
    theirs = torch.nn.MultiheadAttention(64, 8, bias=bias, batch_first=True).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model = torch.nn.ModuleDict({"attention": make(bias=bias)})
    model.load_state_dict({f"attention.{name}": value for name, value in theirs.state_dict().items()})
    with torch.no_grad():
        wanted = theirs(X, X, X, need_weights=False)[0]
        torch.testing.assert_close(model["attention"](X), wanted, rtol=1e-4, atol=1e-5)
    if bias:
        with pytest.raises(RuntimeError, match="in_proj_bias"):
            make(bias=False).load_state_dict(theirs.state_dict())


LAYERS = {
    "FlashAttention3": lambda **o: A.create_attention(64, 8, **o),
    "FlexAttentionLayer": lambda **o: A.create_flex_attention(64, 8, **o),
    "DynamicSparseAttention": lambda **o: A.create_sparse_attention(64, 8, **o),
    "RingAttentionLayer": lambda **o: A.create_ring_attention(64, 8, **o),
    "ContextParallelAttention": lambda **o: A.create_context_parallel_attention(64, 8, **o),
    "AttentionLayer": lambda **o: AttentionLayer(64, 8, **o),
}


@pytest.mark.parametrize("name", list(LAYERS))
def test_wrong_inputs_name_the_layer(name):
    layer = LAYERS[name]()
    with pytest.raises(
        RuntimeError, match=rf"{name}: \w+ has shape \[2, 5, 32\], its last dimension must be 64; build"
    ):
        layer(torch.randn(2, 5, 32))
    if name != "AttentionLayer":  # takes any leading dimensions
        with pytest.raises(RuntimeError, match=rf"{name}: (\w+) has shape \[5, 64\]; give \[batch, sequence, 64\]"):
            layer(torch.randn(5, 64))


@pytest.mark.parametrize("name", list(LAYERS))
def test_a_gpu_that_is_not_there_is_said_in_our_words(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=f"{name}: device is 'cuda', and torch .* finds no CUDA device here; use"):
        LAYERS[name](device="cuda")


@pytest.mark.parametrize("name", ["FlashAttention3", "FlexAttentionLayer", "RingAttentionLayer", "AttentionLayer"])
def test_layers_run_on_the_meta_device(name):
    layer = LAYERS[name](device="meta")
    output = layer(X.to("meta"))
    assert output.device.type == "meta" and output.shape == X.shape and output.dtype == X.dtype
    mask = torch.ones(2, 12, dtype=torch.long, device="meta")
    assert layer(X.to("meta"), attention_mask=mask).shape == X.shape


def test_the_meta_device_needs_no_compiler():
    code = (
        "import sys, torch; from kernel_pytorch.attention import FlashAttention3\n"
        "print(FlashAttention3(64, 8, device='meta')(torch.randn(2, 3, 64, device='meta')).shape)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_mods_of_this_package_are_compiled():
    mods = A.FlexAttentionScoreMods.soft_cap(5.0), A.FlexAttentionMaskMods.sliding_window(4)
    layer = A.create_flex_attention(64, 8, "full", *mods)
    with torch.no_grad():
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(X), layer(X))


@pytest.mark.parametrize(
    "mod, words",
    [
        (lambda score, b, h, q, k: score * q.item(), "its values cannot be looked at: write torch.where"),
        (lambda score, b, h, q, k: torch.tan(score), "cannot use torch's 'tan'; did you mean tanh"),
        (lambda score, b, h, q, k: score.absolut(), "has no 'absolut'; did you mean abs"),
        (lambda score, b, h, q, k: torch.cumsum(score, 0), "docs/expression.md has what score and mask functions"),
    ],
)
def test_what_a_mod_cannot_use_is_said_shortly(mod, words):
    with pytest.raises((TypeError, AttributeError), match=words) as raised:
        A.create_flex_attention(64, 8, score_mod=mod)(X)
    assert len(str(raised.value)) < 400
