"""Small models of many families for the tests of the compile backend, and the comparison with eager torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from kernel_pytorch.compile_backend.entry import compile_graph
from kernel_pytorch.compile_backend.report import CompileReport
from kernel_pytorch.compile_backend.settings import settings_of
from torch import nn

VOCABULARY = 96
DECODER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
HEADS_OF_16 = {**DECODER, "head_dim": 16}
ENCODER = {**DECODER, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WINDOWS = {"num_hidden_layers": 2, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
TAKE_ALL = {"kernel_pytorch.inner": "eager", "kernel_pytorch.choose": "always"}

# Family: (class of the configuration, its arguments, class of the model).
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", DECODER, "AutoModelForCausalLM"),
    "qwen3": ("Qwen3Config", HEADS_OF_16, "AutoModelForCausalLM"),
    "gemma3": ("Gemma3TextConfig", {**HEADS_OF_16, **WINDOWS}, "AutoModelForCausalLM"),
    "phi3": ("Phi3Config", DECODER, "AutoModelForCausalLM"),
    "olmo2": ("Olmo2Config", DECODER, "AutoModelForCausalLM"),
    "gpt2": (
        "GPT2Config",
        {"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 128}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        "AutoModelForCausalLM",
    ),
    "bert": ("BertConfig", ENCODER, "AutoModelForMaskedLM"),
    "modernbert": (
        "ModernBertConfig",
        {**DECODER, "num_hidden_layers": 2, "local_attention": 8},
        "AutoModelForMaskedLM",
    ),
    "t5": (
        "T5Config",
        {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4, "vocab_size": VOCABULARY}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
        "AutoModelForSeq2SeqLM",
    ),
    "vit": (
        "ViTConfig",
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
        | {"image_size": 32, "patch_size": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "AutoModelForImageClassification",
    ),
}


def model_of(family: str, **more: Any) -> nn.Module:
    """A model with random parameters, none of them neutral: norms of ones and biases of zeros would hide mistakes."""
    import transformers

    config, arguments, kind = FAMILIES[family]
    torch.manual_seed(0)
    config_of_model = getattr(transformers, config)(**{**arguments, **more})
    made: nn.Module = getattr(transformers, kind).from_config(config_of_model)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return made.eval()


def inputs_of(family: str, batch: int = 2, length: int = 12) -> dict[str, Any]:
    torch.manual_seed(1)
    if family == "vit":
        return {"pixel_values": torch.randn(batch, 3, 32, 32), "labels": torch.zeros(batch, dtype=torch.long)}
    ids = torch.randint(1, VOCABULARY, (batch, length))
    return {"input_ids": ids, "labels": ids}


class Compiled:
    """A function or module compiled by the backend, with the report of its graphs."""

    def __init__(self, model: Callable[..., Any], options: dict[str, Any] | None = None, **settings: Any) -> None:
        self.report = CompileReport()
        chosen = settings_of(None, {**TAKE_ALL, **(options or {})})
        self.call = torch.compile(model, backend=lambda m, i: compile_graph(m, i, chosen, self.report), **settings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    @property
    def replaced(self) -> Counter[str]:
        return self.report.replaced

    @property
    def problems(self) -> list[str]:
        return [graph.problem for graph in self.report.graphs if graph.problem]


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    wide = expected.double()
    return float((found.double() - wide).abs().max() / wide.abs().max().clamp_min(1e-3))
