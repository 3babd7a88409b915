"""A decoder of the Llama kind (Llama, Mistral, Qwen2, Qwen3 and their like) with little between its products.

A layer is nine kernels besides attention: norm, one product for queries, keys and values, rotary embedding (with the
norms of queries and keys where there are any), the cache's rows, the output product that adds the residual, norm, both
products of the gate with their activation, and the last product, that adds the residual. Recognised by its parts and
believed by its numbers (models.py). The weights of the first product lie next to each other in memory from then on; the
parameters stay what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn

from .._optimize.changes import PackRows
from ..functional import norm_rope, rms_norm, rope
from .attention import Batch
from .pages import LayerShape
from .products import Gate, Product, Products

_FIXED_ANGLES = ("default", "linear", "llama3", "yarn")
_ACTIVATIONS = {"SiLUActivation": "silu", "SiLU": "silu"}


def _is_linear(module: Any) -> bool:
    return type(module) is nn.Linear and not module._forward_hooks and not module._forward_pre_hooks


def _eps_of(norm: Any) -> float | None:
    """Of a root-mean-square norm with a weight alone."""
    if "RMSNorm" not in type(norm).__name__ or [name for name, _ in norm.named_parameters()] != ["weight"]:
        return None
    return getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)


class _Norm:
    def __init__(self, norm: Any) -> None:
        self.weight, self.eps = norm.weight, float(_eps_of(norm) or 0.0)

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class _Layer:
    def __init__(self, layer: Any, options: dict[str, Any], products: Products) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.packs = [PackRows([p.weight for p in projections])]
        if projections[0].bias is not None:
            self.packs.append(PackRows([p.bias for p in projections]))
        for pack in self.packs:
            pack.apply()
        self.size = int(attention.head_dim)
        self.heads, self.key_heads = (p.weight.shape[0] // self.size for p in projections[:2])
        self.options = options
        packed = [pack.packed for pack in self.packs]
        self.qkv = products.add(Product(packed[0], packed[1] if len(packed) > 1 else None))
        self.out = products.add(Product(attention.o_proj.weight, attention.o_proj.bias))
        self.gate = products.add(
            Gate(mlp.gate_proj.weight, mlp.up_proj.weight, _ACTIVATIONS[type(mlp.act_fn).__name__])
        )
        self.down = products.add(Product(mlp.down_proj.weight, mlp.down_proj.bias))
        self.norm_in, self.norm_out = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self.norm_query = _Norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.norm_key = _Norm(attention.k_norm) if hasattr(attention, "k_norm") else None

    def turned(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        query, key = query[None], key[None]
        if self.norm_query is None or self.norm_key is None:
            query, key = rope(query, key, cos, sin)
        else:
            query = norm_rope(query, self.norm_query.weight, cos, sin, eps=self.norm_query.eps)
            key = norm_rope(key, self.norm_key.weight, cos, sin, eps=self.norm_key.eps)
        return query[0], key[0]

    def __call__(self, index: int, hidden: Tensor, cos: Tensor, sin: Tensor, batch: Batch) -> Tensor:
        count = hidden.shape[0]
        parts = self.qkv(self.norm_in(hidden)).view(count, self.heads + 2 * self.key_heads, self.size)
        query, key, value = torch.split(parts, [self.heads, self.key_heads, self.key_heads], 1)
        query, key = self.turned(query, key, cos, sin)
        mixed = batch.attend(index, query, key, value, **self.options)
        hidden = self.out(mixed.view(count, -1), hidden)
        return self.down(self.gate(self.norm_out(hidden)), hidden)


class Fused:
    def __init__(self, model: Any, options: Sequence[dict[str, Any]]) -> None:
        decoder = model.model
        self.products = Products()
        self.embedding, self.rotary = decoder.embed_tokens, decoder.rotary_emb
        self.decoders = [_Layer(*parts, self.products) for parts in zip(decoder.layers, options)]
        self.angles: tuple[Tensor, ...] | None = None
        self.norm = _Norm(decoder.norm)
        self.head = self.products.add(Product(model.lm_head.weight, model.lm_head.bias))
        self.layers = [LayerShape(layer.key_heads, layer.size, layer.size) for layer in self.decoders]

    def keep_angles(self, length: int) -> None:
        """Cosines and sines of all positions as tables, where they do not depend on how long a text is."""
        if getattr(self.rotary, "rope_type", "") not in _FIXED_ANGLES:
            return
        weight = self.embedding.weight
        positions = torch.arange(length, device=weight.device)[None]
        with torch.no_grad():
            self.angles = tuple(part[0].contiguous() for part in self.rotary(weight[:1, None], positions))

    def _angles(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.angles is None:
            cos, sin = self.rotary(hidden, positions[None])
            return cos, sin
        cos, sin = (torch_functional.embedding(positions, table)[None] for table in self.angles)
        return cos, sin

    def logits(self, tokens: Tensor, positions: Tensor, batch: Batch, rows: Tensor | None) -> Tensor:
        hidden = self.embedding(tokens)
        cos, sin = self._angles(hidden, positions)
        for index, layer in enumerate(self.decoders):
            hidden = layer(index, hidden, cos, sin, batch)
        if rows is not None:
            hidden = hidden[rows]
        return self.head(self.norm(hidden))

    def prepare(self, rows: int) -> None:
        """Chooses the faster way of each product for so many rows, by timing it on a GPU."""
        self.products.choose(rows)

    def undo(self) -> None:
        for layer in self.decoders:
            for pack in layer.packs:
                pack.undo()


def _fits(layer: Any) -> bool:
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if attention is None or mlp is None:
        return False
    linears: list[Any] = [getattr(attention, f"{name}_proj", None) for name in "qkvo"]
    linears += [getattr(mlp, f"{name}_proj", None) for name in ("gate", "up", "down")]
    if not all(_is_linear(linear) for linear in linears) or mlp.gate_proj.bias is not None:
        return False
    if mlp.up_proj.bias is not None or len({linear.bias is None for linear in linears[:3]}) != 1:
        return False
    if type(getattr(mlp, "act_fn", None)).__name__ not in _ACTIVATIONS:
        return False
    names = {name for name, _ in layer.named_children()}
    if names != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    heads = {name for name, _ in attention.named_children()} - {"q_proj", "k_proj", "v_proj", "o_proj"}
    if heads not in (set(), {"q_norm", "k_norm"}) or not hasattr(attention, "head_dim"):
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *(getattr(attention, name) for name in heads)]
    return all(_eps_of(norm) is not None for norm in norms)


def recognise(model: Any, options: Sequence[dict[str, Any]]) -> Fused | None:
    """None where a part is not what this file computes; what looks alike and is not, differs in numbers.

    `options`: of each layer's attention, as its own forward gives them.
    """
    decoder = getattr(model, "model", None)
    parts = ("embed_tokens", "rotary_emb", "layers", "norm")
    if decoder is None or not all(hasattr(decoder, name) for name in parts) or not hasattr(model, "lm_head"):
        return None
    if not _is_linear(model.lm_head) or type(decoder.embed_tokens) is not nn.Embedding or _eps_of(decoder.norm) is None:
        return None
    if not all(_fits(layer) for layer in decoder.layers):
        return None
    with torch.no_grad():
        return Fused(model, options)
