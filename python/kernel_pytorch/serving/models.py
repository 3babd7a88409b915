"""A Hugging Face causal language model as a function of a batch: tokens, positions and pages in, logits out.

Two ways, chosen when the engine starts and checked there by numbers against the model's own forward: `Fused` for
decoders of the Llama kind (fused.py), `Plain` for every model whose layers use Hugging Face's attention interface. What
neither computes as the model does is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .._modules import evaluating
from ..compat._latent import is_latent
from .attention import Batch, computing, implementation
from .fused import Fused, recognise
from .own_attention import own_layers
from .pages import LayerShape, PagedCache

_TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}  # of the logits' norm


class Served(Protocol):
    layers: list[LayerShape]

    def logits(self, tokens: Tensor, positions: Tensor, batch: Batch, rows: Tensor | None) -> Tensor:
        """[rows, vocabulary] of these tokens of the batch; None: of all."""

    def keep_angles(self, length: int) -> None:
        """Positions below this will come."""

    def prepare(self, rows: int) -> None:
        """Batches of so many tokens will come."""


class Plain:
    """The model's own forward, its attention over pages; of latent rows where its layers keep them and `latent`."""

    def __init__(self, model: Any, *, latent: bool = False) -> None:
        self.model, self.is_latent = model, latent
        parameters = inspect.signature(model.forward).parameters
        self.takes_rows = "logits_to_keep" in parameters
        self.takes_positions = "position_ids" in parameters
        self.own = own_layers(model)
        if not self.takes_positions and (not self.own or any(layer.slopes is None for layer in self.own)):
            raise refusal(model, "its forward takes no position_ids")
        self.layers = [shape for shape, _ in attention_of(model, latent=latent)]

    def logits(self, tokens: Tensor, positions: Tensor, batch: Batch, rows: Tensor | None) -> Tensor:
        options: dict[str, Any] = {"logits_to_keep": rows} if self.takes_rows and rows is not None else {}
        if self.takes_positions:
            options["position_ids"] = positions[None]
        with implementation(self.model, self.own, latent=self.is_latent), computing(batch.attend):
            output = self.model(input_ids=tokens[None], use_cache=False, **options)
        logits: Tensor = output.logits[0]
        return logits if rows is None or self.takes_rows else logits[rows]

    def keep_angles(self, length: int) -> None:
        pass

    def prepare(self, rows: int) -> None:
        pass


def refusal(model: nn.Module, reason: str) -> ValueError:
    return ValueError(
        f"generate: {type(model).__name__} cannot be served over pages: {reason}; use the model's own generate"
    )


def attention_of(model: Any, *, latent: bool = False) -> list[tuple[LayerShape, dict[str, Any]]]:
    """What each layer keeps of a token and the options of its attention, by running one token."""
    found: dict[int, tuple[LayerShape, dict[str, Any]]] = {}

    def note(layer: int | None, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if layer is None or layer in found:
            raise refusal(model, "its layers do not number themselves, or one attends twice")
        found[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2]), options
        expansion = options.get("expansion")
        size = value.shape[2] if expansion is None else expansion.values.shape[1]
        return query.new_zeros(query.shape[0], query.shape[1], size)

    if any(name.rpartition(".")[2] == "indexer" for name, _ in model.named_modules()):
        raise refusal(model, "an indexer chooses the keys that its tokens see, which pages do not know of")
    first = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    try:
        with torch.no_grad(), implementation(model, own_layers(model), latent=latent), computing(note):
            model(input_ids=first, use_cache=False)
    except (TypeError, AttributeError) as error:  # attention of its own, which wants a mask
        raise refusal(model, f"its attention does not use Hugging Face's attention interface ({error})") from error
    text = model.config.get_text_config()
    expected = getattr(text, "num_hidden_layers", len(found))
    if sorted(found) != list(range(expected)):
        raise refusal(
            model,
            f"{len(found)} of its {expected} layers use Hugging Face's attention interface "
            "(state space, linear and recurrent layers do not, nor do models with attention of their own)",
        )
    return [found[layer] for layer in range(expected)]


def _keeps_latent_rows(model: Any) -> bool:
    """Whether all layers do, and ask for nothing that attention over such rows lacks."""
    if not any(is_latent(module) for module in model.modules()):
        return False
    wanted = [options for _, options in attention_of(model, latent=True)]
    lacking = ("window", "softcap", "sinks")
    return all("expansion" in options and all(options[name] is None for name in lacking) for options in wanted)


def _sample_tokens(model: Any, count: int) -> Tensor:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randint(0, vocabulary, (count,), generator=generator, device="cpu").to(next(model.parameters()).device)


def _through_pages(served: Served, tokens: Tensor, chunks: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The logits of the last token of each chunk, computed one after the other over pages of 4 tokens."""
    count, page_size = len(tokens), 4
    cache = PagedCache(served.layers, -(-count // page_size), page_size, dtype=dtype, device=tokens.device)
    text = tokens.tolist()
    request, _ = cache.begin(text)
    found, begin = [], 0
    for chunk in chunks:
        end = begin + chunk
        device = tokens.device
        slots = torch.tensor(cache.extend(request, text[begin:end]), device=device)
        batch = Batch(
            cache,
            slots,
            cache.table([request], -(-count // page_size)).to(device),
            torch.tensor([end], dtype=torch.int32, device=device),
            torch.tensor([0, chunk], dtype=torch.int32, device=device),
            chunk,
            is_fresh=begin == 0,
        )
        positions = torch.arange(begin, end, device=device)
        rows = torch.tensor([chunk - 1], device=device)
        found.append(served.logits(tokens[begin:end], positions, batch, rows)[0])
        begin = end
    return torch.stack(found)


def serve(model: Any, *, fused: bool = True) -> Served:
    """The fastest way to compute this model that agrees with its own forward; ValueError where none does."""
    if not hasattr(model, "config") or not hasattr(model, "get_input_embeddings"):
        raise TypeError(f"generate: {type(model).__name__} is no model of Hugging Face's transformers")
    if getattr(model.config, "is_encoder_decoder", False):
        raise refusal(model, "it is an encoder with a decoder")
    dtype = next(model.parameters()).dtype
    if dtype not in _TOLERANCE:
        raise refusal(model, f"its weights are {dtype}; convert them to float32, bfloat16 or float16")
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 64
    chunks = [5, 11, 1, 7, 1, 1][: max(1, min(6, longest // 8))]
    tokens = _sample_tokens(model, sum(chunks))
    with evaluating(model), torch.no_grad():
        ends = torch.tensor(chunks, device=tokens.device).cumsum(0) - 1
        own = model(input_ids=tokens[None], use_cache=False).logits[0, ends].float()
        ways: list[Callable[[], Served | None]] = [lambda: Plain(model)]
        if _keeps_latent_rows(model):
            ways.insert(0, lambda: Plain(model, latent=True))
        if fused:
            ways.insert(0, lambda: recognise(model, [options for _, options in attention_of(model)]))
        differences = []
        for way in ways:
            served = way()
            if served is None:
                continue
            ours = _through_pages(served, tokens, chunks, dtype).float()
            difference = float((ours - own).norm() / own.norm().clamp_min(1e-30))
            if difference <= _TOLERANCE[dtype]:
                return served
            if isinstance(served, Fused):
                served.undo()
            differences.append(difference)
    raise refusal(
        model,
        f"its logits over pages differ from its own by {differences[-1]:.1%} (a score bias, a mask or a cache that "
        "the attention interface does not show)",
    )
