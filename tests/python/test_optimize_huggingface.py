"""kernel_pytorch.optimize on Hugging Face models built from configurations: all verify, and all come back exactly."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from optimize_models import HUGGING_FACE  # noqa: E402
from test_optimize import always, one_thread, optimize, patterns, untouched  # noqa: E402, F401

import kernel_pytorch  # noqa: E402

EXPECTED = {
    "llama": {"rms_norm", "gated mlp", "residual + norm", "attention (Hugging Face)"},
    "gpt2": {"layer_norm", "mlp", "residual + norm", "attention (Hugging Face)"},
    "bert": {"layer_norm", "linear + activation", "linear + residual + norm", "attention (Hugging Face)"},
    "t5": {"rms_norm", "gated mlp", "attention (Hugging Face)"},
    "vit": {"layer_norm", "mlp", "residual + norm", "attention (Hugging Face)"},
    "gemma": {"rms_norm", "gated mlp", "residual + norm", "attention (Hugging Face)"},
    "mixtral": {"rms_norm", "residual + norm", "attention (Hugging Face)"},
}


def tensors(output):
    return [value for value in output.values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("goal", ["inference", "train"])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_optimises_verifies_and_restores(name, goal, always):  # noqa: F811
    torch.manual_seed(0)
    model, inputs = HUGGING_FACE[name]()
    model.eval()
    implementation = model.config._attn_implementation
    names, parameters = list(model.state_dict()), dict(model.named_parameters())
    before = tensors(model(**inputs))
    model.train(goal == "train")
    result = optimize(model, inputs, goal=goal)
    assert patterns(result) >= EXPECTED[name], result.report
    assert all(one["ok"] for one in result.report.data["numerics"])
    assert list(model.state_dict()) == names
    assert all(parameter is parameters[key] for key, parameter in model.named_parameters())
    model.eval()
    for mine, theirs in zip(tensors(model(**inputs)), before):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    kernel_pytorch.restore(model)
    assert untouched(model)
    assert model.config._attn_implementation == implementation
    for mine, theirs in zip(tensors(model(**inputs)), before):
        assert torch.equal(mine, theirs)


def test_generation_uses_what_the_sample_did_not_show(always):  # noqa: F811
    torch.manual_seed(0)
    model, inputs = HUGGING_FACE["llama"]()
    model.eval()
    prompt = inputs["input_ids"]
    options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    before = model.generate(prompt, **options)
    optimize(model, inputs)
    assert torch.equal(model.generate(prompt, **options), before)  # with a cache, one token at a time


@pytest.mark.parametrize(
    "name, options",
    [("llama", {}), ("mistral", {"sliding_window": 3}), ("gemma2", {"head_dim": 16, "sliding_window": 3})],
)
def test_probabilities_for_whoever_asks(name, options, always):  # noqa: F811
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        name, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, pad_token_id=0, **options,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(1, 64, (2, 7))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][1, :2] = 0  # padding
    with torch.no_grad():
        before = model(**inputs, output_attentions=True)
        assert "attention (Hugging Face)" in patterns(optimize(model, {"input_ids": ids}))
        after = model(**inputs, output_attentions=True)
    seen = inputs["attention_mask"].bool()
    torch.testing.assert_close(after.logits[seen], before.logits[seen], rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(after.attentions, before.attentions, strict=True):
        rows = seen[:, None].expand(mine.shape[:3])
        torch.testing.assert_close(mine[rows], theirs[rows], rtol=1e-4, atol=1e-5)


def test_gradient_checkpointing_and_hidden_states(always):  # noqa: F811
    torch.manual_seed(0)
    model, inputs = HUGGING_FACE["llama"]()
    model.train()
    model.gradient_checkpointing_enable()
    optimize(model, inputs, goal="train")
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.eval()
    assert len(model(**inputs, output_hidden_states=True).hidden_states) == 3


@pytest.mark.parametrize(
    ("name", "path"), [("gpt2", "h.0.attn"), ("llama", "layers.0.self_attn"), ("bert", "layer.0.attention.self")]
)
def test_attention_is_timed_by_one_of_its_layers(name, path):
    """In a step of the whole model its gain would be lost; with a mask or a cache it could not be run by itself."""
    from kernel_pytorch._optimize.patterns.context import Context
    from kernel_pytorch._optimize.patterns.hugging_face import transformers_attention
    from kernel_pytorch._optimize.record import record

    model, inputs = HUGGING_FACE[name]()
    inputs = {key: value for key, value in inputs.items() if key not in ("attention_mask", "use_cache")}
    no_cache = {} if name == "bert" else {"use_cache": False}

    def found(**more):
        recording = record(model, lambda: model(**inputs, **more))
        context = Context(model, "train", "exact", torch.device("cpu"), recording)
        return transformers_attention.find(context, "", model, recording.call("")).timed

    assert found(**no_cache).endswith(path)
    length = inputs["input_ids"].shape[1]
    mask = torch.ones(inputs["input_ids"].shape[0], length, dtype=torch.long)
    mask[0, : length // 2] = 0
    assert found(attention_mask=mask, **no_cache) == ""
    assert name == "bert" or found(use_cache=True) == ""
