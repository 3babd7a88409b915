"""Hugging Face's own `generate`, or any server around a transformers model, on this library's pages.

    cache = huggingface_cache.PagesCache(batch=4, max_tokens=4096, dtype=torch.float8_e4m3fn)
    model.set_attn_implementation(huggingface_cache.NAME)
    model.generate(ids, attention_mask=mask, past_key_values=cache)

The two interfaces that transformers has for this: a `Cache`, whose layers keep keys and values in pages (also in FP8),
and an attention function that writes new rows into them and attends over pages, so that nothing is ever gathered and no
mask is built. Prompts are padded on the left, as `generate` wants them; padding is never written. Beam search, which
copies rows of the cache, is refused. `serving.generate` batches continuously; this is for who keeps his own loop.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from kernel_pytorch import functional

NAME = "kernel_pytorch_pages"


class PagesLayer(CacheLayerMixin):
    """Keys and values of one layer. Request r owns the pages r * n up to (r + 1) * n."""

    def __init__(self, batch: int, max_tokens: int, page_size: int, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.batch, self.page_size, self.dtype = batch, page_size, dtype
        self.pages = -(-max_tokens // page_size)
        self.columns = 0  # of the padded batch so far

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if key_states.shape[0] != self.batch:
            raise ValueError(f"PagesCache: made for a batch of {self.batch}, the model has {key_states.shape[0]}")
        device, dtype = key_states.device, self.dtype or key_states.dtype
        rows = self.batch * self.pages, self.page_size, key_states.shape[1]
        self.keys = torch.zeros(*rows, key_states.shape[3], dtype=dtype, device=device)
        self.values = torch.zeros(*rows, value_states.shape[3], dtype=dtype, device=device)
        self.lengths = torch.zeros(self.batch, dtype=torch.int32, device=device)
        self.tables = torch.arange(rows[0], dtype=torch.int32, device=device).view(self.batch, self.pages)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.columns + key_states.shape[2] > self.pages * self.page_size:
            raise ValueError(
                f"PagesCache: {self.columns + key_states.shape[2]} tokens; make it with a larger max_tokens"
            )
        self.columns += key_states.shape[2]
        key_states.kernel_pytorch_pages = self  # type: ignore[attr-defined]
        return key_states, value_states

    def attend(self, query: Tensor, key: Tensor, value: Tensor, is_token: Tensor | None, **options: Any) -> Tensor:
        """[batch, heads, new tokens, size] of all three -> [batch, new tokens, heads, size]."""
        batch, _, count, _ = query.shape
        rows = [tensor.transpose(1, 2).reshape(batch * count, tensor.shape[1], -1) for tensor in (query, key, value)]
        if is_token is None:
            is_token = torch.ones(batch, count, dtype=torch.bool, device=query.device)
        place = self.lengths[:, None] + is_token.cumsum(1) - 1
        first = torch.arange(batch, device=query.device)[:, None] * (self.pages * self.page_size)
        slots = torch.where(is_token, first + place, -1).reshape(-1)
        functional.append_kv(rows[1], rows[2], self.keys, self.values, slots)
        self.lengths = (self.lengths + is_token.sum(1)).to(torch.int32)
        output = functional.paged_attention(rows[0], self.keys, self.values, self.tables, self.lengths, **options)
        return output.view(batch, count, *output.shape[1:])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return self.pages * self.page_size

    def reset(self) -> None:
        self.columns = 0
        if self.is_initialized:
            self.lengths.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise NotImplementedError("PagesCache: beam search copies rows; use transformers' DynamicCache for it")


class PagesCache(Cache):
    def __init__(self, batch: int, max_tokens: int, page_size: int = 64, dtype: torch.dtype | None = None) -> None:
        """`max_tokens`: of a request, padding included; `dtype`: None is the model's, float8_e4m3fn is half of bf16."""
        make: Any = lambda: PagesLayer(batch, max_tokens, page_size, dtype)  # noqa: E731
        super().__init__(layer_class_to_replicate=make)


def _attention(
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
    **_: Any,
) -> tuple[Tensor, None]:
    layer = getattr(key, "kernel_pytorch_pages", None)
    if layer is None:
        raise RuntimeError(f'attn_implementation="{NAME}" needs past_key_values=PagesCache(...), and use_cache')
    output = layer.attend(
        query,
        key,
        value,
        None if attention_mask is None else attention_mask[:, -query.shape[2] :].bool(),
        scale=scaling,
        window=None if sliding_window is None else (sliding_window - 1, 0),
        softcap=softcap,
        sinks=s_aux,
    )
    return output, None


def _padding(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor | None:
    """What the attention function gets: which columns are tokens."""
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError("kernel_pytorch_pages: a mask of its own; give [batch, tokens], padded on the left")
    if attention_mask is not None and bool((attention_mask[:, :-1] > attention_mask[:, 1:]).any()):
        raise ValueError("kernel_pytorch_pages: padding behind tokens; pad prompts on the left")
    return attention_mask


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _padding)


def main() -> int:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        pad_token_id=0,
        eos_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(1, 256, (3, 9))
    mask = torch.ones_like(ids)
    mask[1, :4] = mask[2, :7] = 0
    settings: dict[str, Any] = dict(attention_mask=mask, max_new_tokens=12, do_sample=False)
    own = model.generate(ids, **settings)
    model.set_attn_implementation(NAME)
    pages = model.generate(ids, past_key_values=PagesCache(batch=3, max_tokens=32, page_size=4), **settings)
    assert torch.equal(own, pages), "other tokens than transformers' own cache gives"
    coded = PagesCache(batch=3, max_tokens=32, page_size=4, dtype=torch.float8_e4m3fn)
    same = (model.generate(ids, past_key_values=coded, **settings) == own)[:, 9:].float().mean()
    print(f"the same tokens as transformers' own cache; in FP8 {same:.0%} of them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
