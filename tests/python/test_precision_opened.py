"""Few bits for matrices that are not in nn.Linear: torch's attention and encoders, Conv1D, Hugging Face's experts."""

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from kernel_pytorch import functional as F  # noqa: E402
from kernel_pytorch import precision  # noqa: E402


def encoder(**options) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2).eval()


def gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=100, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def mixture(kind: str):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "vocab_size": 100, "num_local_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("proj_bias"):  # which start as zeros, or as whatever memory held
            nn.init.normal_(parameter)
    return model


def relative(output: torch.Tensor, expected: torch.Tensor) -> float:
    return float((output - expected).norm() / expected.norm())


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 24, "vdim": 20}])
def test_opened_attention_computes_what_torch_does(batch_first, options) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(32, 4, batch_first=batch_first, **options).eval()
    opened = precision.open_layers(copy.deepcopy(attention))
    assert isinstance(opened, precision.OpenMultiheadAttention)
    query = torch.randn(3, 5, 32)
    key, value = torch.randn(3, 7, options.get("kdim", 32)), torch.randn(3, 7, options.get("vdim", 32))
    if not batch_first:
        query, key, value = (one.transpose(0, 1) for one in (query, key, value))
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 4:] = True
    hidden = torch.triu(torch.ones(5, 7, dtype=torch.bool), 2)
    of_heads = torch.randn(12, 5, 7)
    for masks in (
        {}, {"key_padding_mask": padding}, {"attn_mask": hidden}, {"attn_mask": of_heads},
        {"key_padding_mask": padding, "attn_mask": hidden}, {"attn_mask": hidden, "is_causal": True},
    ):  # fmt: skip
        for answer in ({}, {"average_attn_weights": False}, {"need_weights": False}):
            output, weights = opened(query, key, value, **masks, **answer)
            if "is_causal" in masks and "need_weights" in answer:
                answer = {}  # torch then takes the hint for the mask, whatever the mask is
            expected, expected_weights = attention(query, key, value, **masks, **answer)
            torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
            if weights is not None:
                torch.testing.assert_close(weights, expected_weights, atol=1e-5, rtol=1e-5)
    if batch_first:  # without a batch
        mask = {"key_padding_mask": padding[1]}
        one = (query[1], key[1], value[1])
        for found, wanted in zip(opened(*one, **mask), attention(*one, **mask), strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_attention_with_extra_keys_stays() -> None:
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        attention = nn.MultiheadAttention(32, 4, **options)
        assert precision.convert_model(attention, "int4") is attention


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_an_encoder_multiplies_by_codes_in_every_mode(norm_first, padded) -> None:
    model = encoder(norm_first=norm_first)
    x = torch.randn(2, 7, 32)
    padding = torch.arange(7) >= torch.tensor([[7], [4]]) if padded else None
    converted = precision.convert_model(model, "int8", group=32, inplace=False)
    assert sum(isinstance(m, precision.QuantizedLinear) for m in converted.modules()) == 12
    weights = [name for name, parameter in converted.named_parameters() if parameter.dim() > 1]
    assert weights == []
    with torch.no_grad():
        output = converted(x, src_key_padding_mask=padding)
        expected = model(x, src_key_padding_mask=padding)
        if padded:  # torch's fast path has zeros where nothing is
            output, expected = output[~padding], expected[~padding]
        assert 0 < relative(output, expected) < 0.01
        torch.testing.assert_close(converted.train()(x), converted.eval()(x))


def test_layers_in_fp8_are_not_passed_by() -> None:
    model, x = encoder(), torch.randn(2, 7, 32)
    with torch.no_grad():
        expected = model(x)
        converted = precision.convert_model_to_fp8(model)
        in_float8 = converted(x)
        assert 1e-3 < relative(in_float8, expected) < 0.1  # an eval forward took the weights past the layers
        torch.testing.assert_close(converted(x, src_key_padding_mask=torch.zeros(2, 7, dtype=torch.bool)), in_float8)
        restored = precision.restore_from_fp8(converted)
        torch.testing.assert_close(restored(x), expected)
    assert restored.layers[0].activation_relu_or_gelu == 1


def test_conv1d_is_a_linear_layer() -> None:
    model, ids = gpt2(), torch.randint(0, 100, (2, 9))
    expected = logits(model, ids)
    opened = precision.open_layers(copy.deepcopy(model))
    torch.testing.assert_close(logits(opened, ids), expected, atol=1e-5, rtol=1e-5)
    converted = precision.convert_model(model, "int8", inplace=False)
    kinds = [type(one) for name, one in converted.named_modules() if name.endswith(("c_attn", "c_proj", "c_fc"))]
    assert len(kinds) == 8 and set(kinds) == {precision.QuantizedLinear}
    assert relative(logits(converted, ids), expected) < 0.02
    assert [plan.converts for plan in precision.plan_fp8(model) if plan.name.endswith("c_attn")] == [False, False]


@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])  # GptOss: transposed weights, bias, a gate of its own
@pytest.mark.parametrize("format", ["nvfp4", "int8"])
def test_hugging_face_experts_multiply_by_codes(kind, format, tmp_path) -> None:
    pytest.importorskip("safetensors")
    model, ids = mixture(kind), torch.randint(0, 100, (2, 9))
    converted = precision.convert_model(model, format, experts=True, skip=("lm_head",), inplace=False)
    experts = [one for one in converted.modules() if isinstance(one, precision.QuantizedExperts)]
    assert len(experts) == 2
    expected = copy.deepcopy(model)  # the same values, multiplied as before
    for name, one in converted.named_modules():
        if isinstance(one, precision.QuantizedLinear):
            expected.get_submodule(name).weight.data = one.dequantize(torch.float32)
        elif isinstance(one, precision.QuantizedMatrices):
            kept = expected.get_parameter(name)
            values = one.dequantize()
            kept.data = values if values.shape == kept.shape else values.transpose(1, 2).contiguous()
            if kept.shape[1] == kept.shape[2] and kind == "GptOss":
                kept.data = values.transpose(1, 2).contiguous()
    torch.testing.assert_close(logits(converted, ids), logits(expected, ids), atol=1e-4, rtol=1e-4)
    x = torch.randn(5, 64, requires_grad=True)
    chosen = torch.tensor([[0, 1], [3, 2], [1, 4], [2, 0], [4, 4]])  # 4: no expert of this rank
    weights = torch.rand(5, 2)
    output = experts[0](x, chosen, weights)
    output.square().sum().backward()
    assert x.grad[0].abs().sum() > 0 and not output[4].any() and not x.grad[4].any()
    assert experts[0](x[:0], chosen[:0], weights[:0]).shape == (0, 64)
    precision.save_quantized(converted, tmp_path / "model.safetensors")
    for target in (mixture(kind), copy.deepcopy(converted)):
        again = precision.load_quantized(target, tmp_path / "model.safetensors")
        assert torch.equal(logits(again, ids), logits(converted, ids))
    assert torch.equal(logits(pickle.loads(pickle.dumps(converted)), ids), logits(converted, ids))


@pytest.mark.parametrize("make", [encoder, gpt2])
@pytest.mark.parametrize("skip", [(), ("linear1", "c_proj", "q_proj")])
def test_files_of_opened_models(make, skip, tmp_path) -> None:
    pytest.importorskip("safetensors")
    model = make()
    x = torch.randint(0, 64, (2, 9)) if make is gpt2 else torch.randn(2, 9, 32)
    converted = precision.convert_model(copy.deepcopy(model), "nvfp4", skip=skip)
    precision.save_quantized(converted, tmp_path / "model.safetensors")
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    again = precision.load_quantized(model, tmp_path / "model.safetensors")

    def output(of):
        with torch.no_grad():
            result = of(x)
        return getattr(result, "logits", result)

    assert torch.equal(output(again), output(converted))


@pytest.mark.parametrize("make", [encoder, gpt2])
def test_sparsity_fp4_and_adaptive_precision_find_the_same_layers(make) -> None:
    model = make()
    x = torch.randint(0, 64, (2, 9)) if make is gpt2 else torch.randn(2, 9, 32)
    count = {encoder: 12, gpt2: 9}[make]  # of gpt2 the head, too

    def number(made: nn.Module, kind: type) -> int:
        return sum(isinstance(one, kind) for one in made.modules())

    assert number(precision.StructuredSparsity24().apply_to_model(model), precision.Sparse24Linear) == count
    assert number(precision.FP4Quantizer().quantize_module(model), precision.QuantizedLinear) == count
    assert len(precision.analyze_precision_opportunities(model, x)["layers"]) == count
    strategy = precision.AllocationStrategy.GRADIENT_WEIGHTED
    formats = [precision.PrecisionFormat.INT4, precision.PrecisionFormat.INT8]
    ultra = precision.create_ultra_precision_module(
        model, strategy, calibration=[x], precision_formats=formats, target_memory_reduction=0.7
    )
    ultra(x)
    assert number(ultra, precision.QuantizedLinear) == count
    assert number(model, precision.QuantizedLinear) == 0  # a copy was changed


def test_a_model_inside_adaptive_precision_is_saved_as_itself(tmp_path) -> None:
    pytest.importorskip("safetensors")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
    mode = precision.QuantizationMode.STATIC
    ultra = precision.UltraPrecisionModule(
        copy.deepcopy(model), precision.PrecisionConfig(quantization_mode=mode, target_memory_reduction=0.7)
    )
    precision.save_quantized(ultra, tmp_path / "model.safetensors")
    x = torch.randn(3, 64)
    assert torch.equal(precision.load_quantized(model, tmp_path / "model.safetensors")(x), ultra(x))


def test_no_layer_to_choose_for() -> None:
    strategy = precision.AllocationStrategy.GRADIENT_WEIGHTED
    model = precision.create_ultra_precision_module(nn.Sequential(nn.ReLU()), strategy, calibration=[torch.ones(2)])
    assert torch.equal(model(torch.ones(2)), torch.ones(2)) and model.current_allocation == {}


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "int4"])
def test_tables_keep_their_scales_when_types_change(format) -> None:
    table = precision.convert_model(nn.Sequential(nn.Embedding(10, 48)), format, embeddings=True)
    ids = torch.tensor([[1, 9]])
    expected = table(ids)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        rows = table.to(dtype)(ids)
        assert rows.dtype is dtype
        torch.testing.assert_close(rows.float(), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8", "int4", "int3"])
@pytest.mark.parametrize("shape", [(37,), (3, 5, 64), (0, 4, 32), (2, 0), (2, 3, 0), (0,), (1, 2, 3, 40)])
def test_tensors_of_any_rank(format, shape) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made = F.quantize(x, format)
    assert isinstance(made, F.QuantizedTensor) and made.shape == x.shape and made.data is made.codes
    rows = F.quantize_weight(x.reshape(x.shape[:-1].numel(), x.shape[-1]), format)
    assert torch.equal(made.dequantize(torch.float32), rows.dequantize(torch.float32).view(shape))
    if len(shape) == 2:
        return
    with pytest.raises(ValueError, match=r"it must be \[rows, columns\]"):
        F.quantized_matmul(torch.randn(2, shape[-1]), made)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "int4"])
def test_quantised_tensors_travel(format, tmp_path) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    made = F.quantize_weight(x, format, asymmetric=format == "int4")
    torch.save(made.state_dict(), tmp_path / "weight.pt")
    copies = (
        pickle.loads(pickle.dumps(made)), copy.deepcopy(made), made.to("cpu"),
        F.QuantizedTensor.from_state_dict(torch.load(tmp_path / "weight.pt", weights_only=True)),
    )  # fmt: skip
    for one in copies:
        assert torch.equal(one.dequantize(torch.float32), made.dequantize(torch.float32))
        assert one.scales.dtype is made.scales.dtype
    with pytest.raises(TypeError, match="dequantize"):
        made.to(torch.float16)
    layer = precision.QuantizedLinear.from_quantized(made)
    again = pickle.loads(pickle.dumps(nn.Sequential(layer)))[0]
    assert torch.equal(again.dequantize(), layer.dequantize())
    with pytest.raises(TypeError, match="weight is Tensor"):
        F.quantized_matmul(x, x)
    with pytest.raises(TypeError, match="weight is Tensor"):
        F.sparse_matmul(x, x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("options", [{}, {"kdim": 24, "vdim": 20}])
def test_opened_layers_train_whatever_mode_they_were_opened_in(mode, options) -> None:
    attention = nn.MultiheadAttention(32, 4, **options)
    attention.out_proj.bias.requires_grad_(False)
    models = [attention, *([gpt2()] if not options else [])]
    for model in models:
        frozen = sum(not one.requires_grad for one in model.parameters())
        with mode():
            opened = precision.open_layers(model)
        assert opened is not attention
        assert sum(not one.requires_grad for one in opened.parameters()) == frozen
        assert not any(one.is_inference() for one in opened.parameters())
    opened = precision.open_layers(nn.MultiheadAttention(32, 4, **options))
    sum((one * one).sum() for one in opened.parameters()).backward()
    assert all(one.grad is not None for one in opened.parameters())


def test_integer_masks_are_refused_as_torch_refuses_them() -> None:
    opened = precision.open_layers(nn.MultiheadAttention(8, 2, batch_first=True))
    x = torch.randn(2, 3, 8)
    for name, mask in (("attn_mask", torch.eye(3).long()), ("key_padding_mask", torch.ones(2, 3).int())):
        with pytest.raises(TypeError, match=f"OpenMultiheadAttention: {name} is torch.int.*it is bool"):
            opened(x, x, x, **{name: mask})


def test_large_scores_stay_finite_in_fp16() -> None:
    attention = nn.MultiheadAttention(64, 1, bias=False, batch_first=True)
    with torch.no_grad():
        for rows in (*attention.in_proj_weight.chunk(3), attention.out_proj.weight):
            nn.init.eye_(rows)
    opened, x = precision.open_layers(attention).half(), torch.full((1, 2, 64), 40.0).half()
    assert (x[0] @ x[0].t()).isinf().all()  # 64 * 40 * 40; divided by 8 it is in fp16's range
    torch.testing.assert_close(opened(x, x, x)[0], x)


def test_modules_with_hooks_are_not_opened() -> None:
    def register(name, module) -> None:
        getattr(module, name)(lambda *_: None)

    kinds = (
        "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
        "register_full_backward_pre_hook",
    )  # fmt: skip
    for kind in kinds:
        for part in ("", "out_proj"):
            attention = nn.MultiheadAttention(32, 4)
            register(kind, attention.get_submodule(part))
            assert precision.open_layers(attention) is attention, (kind, part)
        model = gpt2()
        register(kind, model.transformer.h[0].attn.c_attn)
        names = [name for name, one in precision.open_layers(model).named_modules() if type(one).__name__ == "Conv1D"]
        assert names == ["transformer.h.0.attn.c_attn"], kind


def test_the_fast_path_stays_off_while_one_layer_is_of_this_library() -> None:
    model, x = encoder(), torch.randn(2, 7, 32)
    converted = precision.convert_model(model, "int8", skip=("self_attn", "linear2"))
    assert isinstance(converted.layers[0].self_attn, nn.MultiheadAttention)
    with torch.no_grad():
        expected = converted(x)
        again = precision.restore_from_fp8(precision.convert_model_to_fp8(converted))
        torch.testing.assert_close(again(x), expected)
