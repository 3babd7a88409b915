"""The patterns, in the order in which they are looked for: small parts first, then those that contain them.

A pattern is a file with a function find(context, path, module, call) that returns a Proposal, a Refusal or None. Adding
one is that file and a line here.
"""

from __future__ import annotations

from collections.abc import Collection
from types import ModuleType

from . import (
    activations,
    blocks,
    calls,
    compiler,
    embeddings,
    few_bits,
    graphs,
    linears,
    narrow,
    norms,
    outputs,
    perceptrons,
    projections,
    torch_layers,
    written_attention,
)
from .deferred import deferred_attention, sums
from .hugging_face import transformers_attention, transformers_experts, transformers_loss, transformers_mixers
from .streams import flows, layouts, patches

PATTERNS: tuple[ModuleType, ...] = (
    patches,
    layouts,
    sums,
    few_bits,
    narrow,
    linears,
    norms,
    activations,
    embeddings,
    perceptrons,
    flows,
    transformers_experts,
    transformers_mixers,
    outputs,
    projections,
    written_attention,
    calls,
    torch_layers,
    transformers_attention,
    transformers_loss,
    blocks,
    deferred_attention,
    graphs,
)
# Tried before all others, which are then recorded and timed with what these make of the layout of tensors. Sums are the
# whole model's: where parts are many, no time would be left for them. Where they found nothing, they look again later.
FIRST_PATTERNS: tuple[ModuleType, ...] = (patches, layouts, sums)
# Looked for when those before are in force: what they left.
LATER_PATTERNS: tuple[ModuleType, ...] = (deferred_attention, sums)
# Tried when everything else is in force; the compiler only where `optimize` is asked for it.
LAST_PATTERNS: tuple[ModuleType, ...] = (graphs, compiler)


def names() -> list[str]:
    """The patterns' names, those of their files."""
    return [pattern.__name__.rsplit(".", 1)[1] for pattern in PATTERNS]


def named(wanted: Collection[str] | None, compiles: bool = False) -> tuple[ModuleType, ...]:
    """The patterns that are wanted, in the order of the list; all of them for None, the compiler where asked for."""
    if compiles:
        return (*named(wanted), compiler)
    if wanted is None:
        return PATTERNS
    unknown = sorted(set(wanted) - set(names()))
    if unknown:
        raise ValueError(f"optimize: no pattern is called {', '.join(unknown)}; there are {', '.join(names())}")
    return tuple(pattern for name, pattern in zip(names(), PATTERNS) if name in wanted)
