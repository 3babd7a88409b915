"""kernel_pytorch.optimize on Hugging Face's layers of linear attention: the same outputs, caches and tokens."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from test_optimize import always, one_thread, optimize, patterns, untouched  # noqa: E402, F401

import kernel_pytorch  # noqa: E402

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
GATED = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
MODELS = {
    "Qwen3Next": GATED | EXPERTS,
    "OlmoHybrid": {**GATED, "linear_num_key_heads": 4},
    "Mamba2": {
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
        "expand": 2,
        "chunk_size": 16,
    },
    "KimiLinear": {
        **EXPERTS,
        "num_key_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "dense"],
        "linear_num_heads": 2,
        "linear_head_dim": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "bos_token_id": 1,
        "eos_token_id": None,
    },
    "Bamba": MAMBA | {"attn_layer_indices": [1]},
}


def small(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL | MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("A_log"):
            parameter.data.uniform_(-1, 1)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_recognised_with_the_same_results(name, always):  # noqa: F811
    model = small(name)
    prompt = torch.randint(1, 64, (2, 21))
    options = dict(max_new_tokens=4, do_sample=False)
    with torch.no_grad():
        before = model(prompt, use_cache=False).logits
    tokens = model.generate(prompt, **options)
    result = optimize(model, {"input_ids": prompt, "use_cache": False}, patterns=["transformers_mixers"])
    assert patterns(result) == {"linear attention (Hugging Face)"}, result.report
    with torch.no_grad():
        torch.testing.assert_close(model(prompt, use_cache=False).logits, before, rtol=1e-4, atol=1e-5)
    assert model.generate(prompt, **options).equal(tokens)
    kernel_pytorch.restore(model)
    assert untouched(model)
