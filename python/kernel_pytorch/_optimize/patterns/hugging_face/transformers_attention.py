"""Hugging Face models: their own switch for attention, set to our provider, masks included."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ....compat._latent import as_they_are, is_latent
from ....compat.transformers import register
from ...changes import SetAttribute, Several
from ...sites import Call, Found, Proposal, Refusal, Way
from ..context import Context

NAME = "attention (Hugging Face)"


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    if not is_pretrained(module) or _has_parent(context, path):
        return None
    if not any(getattr(module, name, False) for name in ("_supports_sdpa", "_supports_attention_backend")):
        return Refusal(path, NAME, f"{type(module).__name__} says that its attention cannot be exchanged")
    configs = _configs(module)
    before = sorted({str(config._attn_implementation) for config in configs})
    if before == ["kernel_pytorch"]:
        return None

    def change() -> Several:
        register()
        latent = [part for part in module.modules() if is_latent(part)]  # decoding absorbs their expansion
        return Several(
            *(SetAttribute(config, "_attn_implementation_internal", "kernel_pytorch") for config in configs),
            *(SetAttribute(part, "expand_kv", as_they_are) for part in latent),
        )

    source, way = f"attn_implementation={', '.join(before)}", Way("kernel_pytorch attention", change)
    return Proposal(NAME, path, module, source, [way], timed=_one_attention(context, path, module))


def _one_attention(context: Context, path: str, module: nn.Module) -> str:
    """The path of an attention layer that can be timed by itself, or "": one that gets no mask, which would be another
    with our provider, and no cache, which would grow."""
    for name, part in module.named_modules():
        kind, inside = type(part).__name__, [type(child).__name__ for child in part.modules()][1:]
        found = f"{path}.{name}".strip(".")
        call = context.recording.call(found)
        if call is None or "Attention" not in kind or any("Attention" in other for other in inside):
            continue
        leaves = pytree.tree_leaves((call.args, call.kwargs))
        plain = all(leaf is None or isinstance(leaf, (Tensor, int, float, str)) for leaf in leaves)
        return found if plain and all(leaf.dim() < 4 for leaf in leaves if isinstance(leaf, Tensor)) else ""
    return ""


def _has_parent(context: Context, path: str) -> bool:
    """Whether a model around this one is Hugging Face's: the outermost sets the switch for all of it."""
    parents = [".".join(path.split(".")[:i]) for i in range(path.count(".") + 1)] if path else []
    return any(is_pretrained(context.model.get_submodule(parent)) for parent in parents)


def is_pretrained(module: nn.Module) -> bool:
    """Whether it is a model of Hugging Face's. Asked of the file that defines them, if somebody loaded it: asking the
    package would load it, which takes seconds and raises where an optional library does not fit."""
    models: Any = sys.modules.get("transformers.modeling_utils")
    return models is not None and isinstance(module, models.PreTrainedModel)


def _configs(module: nn.Module) -> list[Any]:
    """Every configuration that a part of the model reads, each once."""
    found: dict[int, Any] = {}
    kind: Any = sys.modules["transformers.modeling_utils"].PreTrainedConfig
    for part in module.modules():
        config = getattr(part, "config", None)
        if isinstance(config, kind):
            found[id(config)] = config
    return list(found.values())
