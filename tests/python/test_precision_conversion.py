"""convert_model to few bits, files of such models, and the packed weights of other libraries."""

from __future__ import annotations

import copy
import json

import pytest

torch = pytest.importorskip("torch")
from kernel_pytorch.core import AttentionLayer, FusedLinearActivation, OptimizedLinear  # noqa: E402
from kernel_pytorch.mixture_of_experts import MoEConfig, MoELayer  # noqa: E402
from torch import nn  # noqa: E402

from kernel_pytorch import functional as F  # noqa: E402
from kernel_pytorch import precision  # noqa: E402


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 64)
        self.attention = AttentionLayer(64, 4, dropout=0.0)
        self.up = FusedLinearActivation(64, 128, activation="gelu")
        self.down = OptimizedLinear(128, 64)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 40, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = x + self.attention(x, is_causal=True)
        return self.head(self.norm(x + self.down(self.up(x, residual=None))))


def rounded_model(model: Model, format: str, embeddings: bool, **options) -> Model:
    """The same model with the values that few bits leave, multiplied as before."""
    names = ["attention.in_proj_weight", "attention.out_proj.weight", "up.weight", "down.weight", "head.weight"]
    names += ["embedding.weight"] * embeddings
    made = Model().eval()
    state = dict(model.state_dict())
    for name in names:
        state[name] = F.quantize_weight(state[name], format, **options).dequantize(torch.float32)
    made.load_state_dict(state)
    return made


@pytest.mark.parametrize(
    ("format", "options"),
    [("nvfp4", {}), ("mxfp4", {}), ("mxfp8", {}), ("int8", {"group": 32}), ("int4", {"group": 64, "asymmetric": True})],
)
@pytest.mark.parametrize("embeddings", [False, True])
def test_every_layer_of_ours_is_converted(format, options, embeddings) -> None:
    torch.manual_seed(0)
    model, ids = Model().eval(), torch.randint(0, 40, (2, 9))
    converted = precision.convert_model(model, format, embeddings=embeddings, inplace=False, **options)
    kinds = {name: type(module).__name__ for name, module in converted.named_modules()}
    assert kinds["attention.in_proj"] == "QuantizedPackedProjection" and kinds["up"] == "QuantizedLinearActivation"
    assert kinds["down"] == kinds["head"] == kinds["attention.out_proj"] == "QuantizedLinear"
    assert (kinds["embedding"] == "QuantizedEmbedding") == embeddings
    weights = [name for name, parameter in converted.named_parameters() if parameter.dim() > 1]
    assert weights == ([] if embeddings else ["embedding.weight"])
    with torch.no_grad():
        torch.testing.assert_close(
            converted(ids), rounded_model(model, format, embeddings, **options)(ids), atol=2e-4, rtol=2e-4
        )
    assert isinstance(model.up, FusedLinearActivation)  # a copy was converted


def test_dropout_residual_and_gradients_of_a_fused_layer() -> None:
    torch.manual_seed(0)
    layer = FusedLinearActivation(32, 48, activation="silu", dropout=0.5)
    converted = precision.convert_model(nn.Sequential(layer), "int8")[0]
    x, residual = torch.randn(6, 32, requires_grad=True), torch.randn(6, 48)
    dropped = converted(x, residual)
    assert 0.2 < float((dropped == residual).float().mean()) < 0.8  # what was dropped leaves the residual
    dropped.sum().backward()
    assert x.grad is not None
    converted.eval()
    weight = converted.dequantize(torch.float32)
    expected = nn.functional.silu(x @ weight.t() + layer.bias) + residual
    torch.testing.assert_close(converted(x, residual), expected, atol=1e-4, rtol=1e-4)


def test_experts_are_kept_as_codes() -> None:
    torch.manual_seed(0)
    layer = MoELayer(32, 64, config=MoEConfig(num_experts=4, top_k=2)).eval()
    x = torch.randn(2, 5, 32)
    values = {
        name: F.quantize_weight(getattr(layer, name).detach().flatten(0, 1), "int8").dequantize(torch.float32)
        for name in ("gate_up", "down")
    }
    before = sum(p.nbytes for p in layer.parameters())
    converted = precision.convert_model(layer, "int8", experts=True, inplace=False)
    with torch.no_grad():
        for name, value in values.items():
            getattr(layer, name).copy_(value.view_as(getattr(layer, name)))
        torch.testing.assert_close(converted(x), layer(x), atol=1e-5, rtol=1e-5)
    assert sum(t.nbytes for t in converted.state_dict().values()) < 0.4 * before
    assert type(precision.convert_model(nn.Sequential(layer), "int8")[0]) is MoELayer  # not without being asked


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "int3", "int4"])
def test_experts_of_odd_sizes_multiply_by_their_codes(format, tmp_path) -> None:
    pytest.importorskip("safetensors")
    torch.manual_seed(0)
    config = MoEConfig(num_experts=3, top_k=2, use_bias=True, activation="swiglu_clamped")
    layer = nn.Sequential(MoELayer(45, 90, config=config)).eval()
    nn.init.normal_(layer[0].gate_up_bias)
    converted = precision.convert_model(layer, format, experts=True, inplace=False)
    moe = converted[0]
    assert moe.gate_up.shape == (3, 180, 45) and {"gate_up.codes", "down.scales"} <= set(moe.state_dict())
    for name in ("gate_up", "down"):
        getattr(layer[0], name).data.copy_(getattr(moe, name).dequantize())
    x = torch.randn(7, 45, requires_grad=True)
    torch.testing.assert_close(converted(x), layer(x), atol=1e-4, rtol=1e-4)
    grads = [torch.autograd.grad(one(x).square().sum(), x)[0] for one in (converted, layer)]
    torch.testing.assert_close(*grads, atol=1e-3, rtol=1e-3)
    precision.save_quantized(converted, tmp_path / "model.safetensors")
    plain = nn.Sequential(MoELayer(45, 90, config=config)).eval()
    again = precision.load_quantized(plain, tmp_path / "model.safetensors")
    with torch.no_grad():
        assert torch.equal(again(x), converted(x))


def test_integer_products_of_a_model(tmp_path) -> None:
    pytest.importorskip("safetensors")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(45, 70), nn.SiLU(), nn.Linear(70, 9)).eval()
    x = torch.randn(2, 5, 45)
    converted = precision.convert_model(model, "int8", activations="int8", inplace=False)
    assert [type(m).__name__ for m in converted] == ["Int8Linear", "SiLU", "Int8Linear"]
    assert float((converted(x) - model(x)).norm() / model(x).norm()) < 0.03
    precision.save_quantized(converted, tmp_path / "model.safetensors")
    for empty in (model, precision.convert_model(model, "int8", activations="int8", inplace=False)):
        again = precision.load_quantized(copy.deepcopy(empty), tmp_path / "model.safetensors")
        with torch.no_grad():
            assert torch.equal(again(x), converted(x))
    assert converted.bfloat16()(x.bfloat16()).dtype is torch.bfloat16
    with pytest.raises(ValueError, match='activations is "int8" with format "int4"'):
        precision.convert_model(model, "int4", activations="int8")


def test_layers_that_skip_names_stay() -> None:
    converted = precision.convert_model(Model(), "int4", skip=("up", "down", "head", "out_proj", "attention"))
    assert not any(isinstance(m, precision.QuantizedLinear) for m in converted.modules())


def test_a_shared_layer_stays_shared_and_fp8_is_a_format() -> None:
    shared = nn.Linear(32, 32)
    converted = precision.convert_model(nn.Sequential(shared, shared), "nvfp4")
    assert converted[0] is converted[1]
    assert isinstance(precision.convert_model(nn.Sequential(nn.Linear(32, 32)), "fp8")[0], precision.FP8LinearLayer)
    converted = precision.convert_model(Model(), "fp8", skip=("head", "attention", "out_proj"))
    kinds = {name: one for name, one in converted.named_modules() if isinstance(one, precision.FP8LinearLayer)}
    assert list(kinds) == ["up", "down"]
    with pytest.raises(ValueError, match="fp3"):
        precision.convert_model(nn.Linear(4, 4), "fp3")


@pytest.mark.parametrize("format", ["nvfp4", "int4", "mxfp8"])
def test_files_come_back_as_they_were(format, tmp_path) -> None:
    pytest.importorskip("safetensors")
    torch.manual_seed(0)
    ids = torch.randint(0, 40, (2, 9))
    model = precision.convert_model(Model().eval(), format, embeddings=True)
    precision.save_quantized(model, tmp_path / "model.safetensors")
    empty = precision.convert_model(Model().eval(), format, embeddings=True)
    again = precision.load_quantized(empty, tmp_path / "model.safetensors")
    with torch.no_grad():
        assert torch.equal(again(ids), model(ids))
    plain = Model().eval()  # linear layers that are not quantised yet
    plain.attention = precision.convert_model(nn.Sequential(plain.attention), format)[0]
    plain.up = precision.convert_model(nn.Sequential(plain.up), format)[0]
    with torch.no_grad():
        assert torch.equal(precision.load_quantized(plain, tmp_path)(ids), model(ids))
    with pytest.raises(KeyError, match="no such layer"):
        precision.load_quantized(nn.Sequential(nn.Linear(4, 4)), tmp_path)


def words_of(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Numbers packed into int32, the lowest bits first, along a dimension."""
    count = 32 // bits
    parts = codes.long().unflatten(dim, (-1, count))
    shifts = (torch.arange(count) * bits).view(-1, *[1] * (codes.dim() - dim - 1))
    words = (parts << shifts).sum(dim + 1)
    return (words & 0xFFFFFFFF).sub((words >> 31 & 1) << 32).to(torch.int32)


def stream_of(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """The same of numbers that may lie in two words, 32 of them in `bits` words."""
    rows = torch.nn.functional.pad(codes.movedim(dim, -1), (0, -codes.shape[dim] % 32)).unflatten(-1, (-1, 32))
    ones = (rows[..., None] >> torch.arange(bits) & 1).flatten(-2).unflatten(-1, (bits, 32))
    words = (ones.long() << torch.arange(32)).sum(-1).flatten(-2)
    return words.sub((words >> 31 & 1) << 32).to(torch.int32).movedim(-1, dim).contiguous()


def written(tmp_path, tensors, config=None):
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({name: t.contiguous() for name, t in tensors.items()}, str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config or {}}))
    return precision.load_quantized(nn.Sequential(nn.Linear(128, 24)), tmp_path)[0]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("groups", ["ascending", "act-order", "one"])
def test_gptq_is_read(bits, version, groups, tmp_path) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 2**bits, (128, 24), generator=generator)
    count = 1 if groups == "one" else 2
    zeros = torch.randint(1, 2**bits, (count, 24), generator=generator)
    scales = torch.rand(count, 24, generator=generator).half() * 0.1 + 0.01
    group = torch.arange(128) // (128 // count)
    if groups == "act-order":
        group = group[torch.randperm(128, generator=generator)]
    stored = zeros if version == "gptq_v2" else zeros - 1
    layer = written(
        tmp_path,
        {
            "0.qweight": stream_of(codes, bits, 0), "0.qzeros": stream_of(stored, bits, 1), "0.scales": scales,
            "0.g_idx": group.int(), "0.bias": torch.ones(24),
        },
        {"bits": bits, "quant_method": "gptq", "checkpoint_format": version},
    )  # fmt: skip
    expected = ((codes - zeros[group]).float() * scales.float()[group]).t()
    torch.testing.assert_close(layer.dequantize(torch.float32), expected)
    torch.testing.assert_close(layer.bias, nn.Parameter(torch.ones(24), False))
    assert (layer.order is not None) == (groups == "act-order") and layer.format == f"int{bits}"
    x = torch.randn(3, 128, generator=generator)
    torch.testing.assert_close(layer(x), x @ expected.t() + 1, atol=1e-3, rtol=1e-3)
    if groups == "act-order":  # our own file keeps the order
        precision.save_quantized(nn.Sequential(layer), tmp_path / "own.safetensors")
        again = precision.load_quantized(nn.Sequential(nn.Linear(128, 24)), tmp_path / "own.safetensors")[0]
        assert torch.equal(again(x), layer(x))


@pytest.mark.parametrize("asymmetric", [False, True])
def test_compressed_tensors_integers_are_read(asymmetric, tmp_path) -> None:
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 16, (24, 128), generator=generator)
    zeros = torch.randint(0, 16, (24, 4), generator=generator) if asymmetric else torch.full((24, 4), 8)
    scales = torch.rand(24, 4, generator=generator) * 0.1 + 0.01
    parts = {
        "0.weight_packed": words_of(codes, 4, 1), "0.weight_scale": scales,
        "0.weight_shape": torch.tensor([24, 128]), "0.bias": torch.zeros(24),
    }  # fmt: skip
    if asymmetric:
        parts["0.weight_zero_point"] = words_of(zeros, 4, 0)
    layer = written(tmp_path, parts)
    group = torch.arange(128) // 32
    expected = (codes - zeros[:, group]).float() * scales[:, group]
    torch.testing.assert_close(layer.dequantize(torch.float32), expected)
    assert (layer.zeros is not None) == asymmetric


@pytest.mark.parametrize("convention", ["divides", "multiplies"])
def test_nvfp4_is_read_in_both_conventions(convention, tmp_path) -> None:
    weight = F.quantize_weight(torch.randn(24, 128), "nvfp4", tensor_scale=torch.tensor([0.003]))
    parts = {"0.weight_scale": weight.scales, "0.bias": torch.zeros(24)}
    if convention == "divides":
        parts |= {"0.weight_packed": weight.codes, "0.weight_global_scale": 1 / torch.tensor([0.003])}
    else:
        parts |= {"0.weight": weight.codes, "0.weight_scale_2": torch.tensor(0.003)}
    layer = written(tmp_path, parts)
    torch.testing.assert_close(layer.dequantize(torch.float32), weight.dequantize(torch.float32), rtol=1e-6, atol=1e-8)


def test_unreadable_weights_are_named(tmp_path) -> None:
    codes, scales = torch.randint(0, 16, (24, 128)), torch.rand(24, 8)
    with pytest.raises(ValueError, match="scale for 16 columns"):
        parts = {"0.weight_packed": words_of(codes, 4, 1), "0.weight_scale": scales, "0.bias": torch.zeros(24)}
        written(tmp_path, parts | {"0.weight_shape": torch.tensor([24, 128])})


def test_transformers_loads_into_few_bits(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    settings = precision.register_huggingface()
    assert settings is precision.register_huggingface()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings("int8"))
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    assert kinds["model.layers.0.mlp.down_proj"] == "QuantizedLinear" and kinds["lm_head"] == "Linear"
    assert model(torch.arange(5)[None]).logits.isfinite().all()
    with pytest.raises(ValueError, match="nvfp5"):
        settings("nvfp5")
    with pytest.raises(TypeError, match="groups"):  # an option that does not exist was ignored
        settings("int4", groups=64)


def test_transformers_loads_experts_into_few_bits(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=3,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    settings = precision.register_huggingface()("int8", experts=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings)
    assert any(isinstance(module, precision.QuantizedExperts) for module in model.modules())
    assert model(torch.arange(5)[None]).logits.isfinite().all()
