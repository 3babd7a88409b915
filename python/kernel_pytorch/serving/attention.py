"""Hugging Face's attention over pages: the layers of a model call `attend` for the batch that is being computed.

A batch is one row of tokens, [1, tokens], of requests behind each other. Each layer writes its new keys and values into
the pages and attends over them, so the model runs without a cache of its own and builds no mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..compat._latent import Expansion, gives_rows, latent_rows
from ..functional import paged_attention
from .pages import PagedCache

NAME = "kernel_pytorch_paged"


@dataclass
class Batch:
    """Where the new tokens of a batch stand."""

    cache: PagedCache
    slots: Tensor  # int64 [tokens]
    block_tables: Tensor  # int32 [requests, pages]
    seq_lens: Tensor  # int32 [requests], new tokens included
    cu_seqlens_q: Tensor | None = None  # int32 [requests + 1]; None: one token each
    max_seqlen_q: int = 1
    batch_invariant: bool = False
    is_fresh: bool = False  # no request has older tokens

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        expansion: Expansion | None = None,
    ) -> Tensor:
        """[tokens, heads, size] of all three -> [tokens, heads, value_size]. A window counts the token itself.

        With an expansion key and value are latent rows and rope rows, [tokens, 1, size].
        """
        scales: dict[str, Any] = self.cache.append(layer, key, value, self.slots)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if expansion is not None:
            scale = query.shape[2] ** -0.5 if scale is None else scale
            if self.is_fresh and self.cu_seqlens_q is not None:
                packed = {"cu_seqlens_q": self.cu_seqlens_q, "max_seqlen_q": self.max_seqlen_q}
                packed |= {"cu_seqlens_k": self.cu_seqlens_q, "max_seqlen_k": self.max_seqlen_q}
                return expansion.attend_expanded(query, key[:, 0], value[:, 0], scale=scale, **packed)
            return expansion.attend_pages(
                query,
                (keys[:, :, 0], values[:, :, 0]),
                self.block_tables,
                self.seq_lens,
                cu_seqlens_q=self.cu_seqlens_q,
                max_seqlen_q=self.max_seqlen_q,
                scale=scale,
                batch_invariant=self.batch_invariant,
            )
        output: Tensor = paged_attention(
            query,
            keys,
            values,
            self.block_tables,
            self.seq_lens,
            cu_seqlens_q=self.cu_seqlens_q,
            max_seqlen_q=self.max_seqlen_q,
            scale=scale,
            window=None if window is None else (window - 1, 0),
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            batch_invariant=self.batch_invariant,
            **scales,
        )
        return output


Layer = Callable[..., Tensor]
_current: ContextVar[Any] = ContextVar("kernel_pytorch_serving_layers", default=None)


@contextlib.contextmanager
def computing(layers: Layer) -> Iterator[None]:
    """While this holds, layers(index, query, key, value, **options) computes the attention of models in this thread."""
    token = _current.set(layers)
    try:
        yield
    finally:
        _current.reset(token)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, tokens, size], key and value alike -> [1, tokens, heads, size]."""
    layers = _current.get()
    if layers is None:
        raise RuntimeError(f'attn_implementation="{NAME}" computes inside kernel_pytorch.serving alone')
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    options: dict[str, Any] = {"scale": scaling, "window": sliding_window, "softcap": softcap, "sinks": s_aux}
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes
    if gives_rows(module):  # in the place of keys and values (latent_rows)
        options["expansion"] = Expansion.of(module)
    index = getattr(module, "layer_idx", getattr(module, "layer_id", None))
    output: Tensor = layers(index, *rows, **options)
    return output[None], None


_mask: ContextVar[Tensor | None] = ContextVar("kernel_pytorch_serving_mask", default=None)


def no_mask(*_: Any, **__: Any) -> Tensor | None:
    """Pages know what a token sees."""
    return _mask.get()


@contextlib.contextmanager
def implementation(model: nn.Module, own: Sequence[Any] = (), *, latent: bool = False) -> Iterator[None]:
    """The model's layers call attention_forward while this holds; those that can give it latent rows if `latent`.
    `own`: what own_layers found, for layers that do not ask which implementation to call."""
    from transformers import AttentionInterface, AttentionMaskInterface  # optional

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, no_mask)
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    before = [(config, config._attn_implementation) for config in configs if hasattr(config, "_attn_implementation")]
    # A model that does more with the mask than hand it on has one that its layers do not read.
    mask = _mask.set(torch.zeros(1, 1, 1, 1) if any(layer.wants_mask for layer in own) else None)
    methods_before = [{n: m for n, m in layer.module.__dict__.items() if n == layer.name} for layer in own]
    try:
        for config, _ in before:
            config._attn_implementation = NAME
        for layer in own:
            layer.module.__dict__[layer.name] = layer.function
        with latent_rows(model) if latent else contextlib.nullcontext():
            yield
    finally:
        _mask.reset(mask)
        for layer, methods in zip(own, methods_before):
            layer.module.__dict__.pop(layer.name, None)
            layer.module.__dict__.update(methods)
        for config, name in before:
            config._attn_implementation = name
