"""The patterns, in the order in which they are looked for: small parts first, then those that contain them.

A pattern is a file with a function find(context, path, module, call) that returns a Proposal, a Refusal or None. Adding
one is that file and a line here.
"""

from __future__ import annotations

from types import ModuleType

from . import activations, blocks, calls, norms, outputs, perceptrons, transformers_attention

PATTERNS: tuple[ModuleType, ...] = (norms, activations, perceptrons, outputs, calls, transformers_attention, blocks)
