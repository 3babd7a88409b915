"""The patterns, in the order in which they are looked for: an earlier one takes a node before a later one sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..model import Match, Refusal, Region
from . import attention, caches, embeddings, gated, linears, losses, norms, rope, shared_inputs

Finder = Callable[[Region], Iterator[Match | Refusal]]

PATTERNS: dict[str, Finder] = {
    "empty_cat": caches.find_empty_cats,
    "attention": attention.find,
    "linear_cross_entropy": losses.find,
    "cross_entropy": losses.find_of_logits,
    "mlp": linears.find_mlps,
    "gated_mlp": linears.find_gated_mlps,
    "gated_linear": linears.find_gated,
    "gated_activation": gated.find,
    "linear_activation": linears.find_activations,
    "linear_residual": linears.find_residuals,
    "linear": linears.find_plain,
    "norm_rope": rope.find_with_norms,
    "rope": rope.find,
    "add_norm": norms.find_with_sum,
    "norm": norms.find,
    "embedding": embeddings.find,
    "linears": shared_inputs.find,
}
