"""Self-attention written out, softmax(q k' / sqrt(size)) v, for inference: scores and probabilities are never stored.

A module of one input with query, key and value projections (three, or one packed) and maybe one after them is tried
with the head counts that its attributes name, causal or not, until its numbers agree. Its layers are still called, so
that what became of them stays; in training, where a dropout may stand anywhere, the original runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..._modules import evaluating
from ..._rebind import reached
from ...functional import attention
from ..changes import SetForward, mark
from ..sites import Call, Found, Proposal, Refusal, Way
from ..verify import row_error
from .calls import ATTENTION, runs_attention
from .context import Context, probe, silent, single_input, undisturbed, weight_reason, why_not_plain
from .norms import TOLERANCE, first_name

NAME = "attention"
_SPELLINGS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("wq", "wk", "wv"))


@dataclass(frozen=True)
class Written:
    """Names of the layers, and how their columns are heads."""

    projections: tuple[str, ...]  # three, or one for all
    output: str | None
    heads: int
    causal: bool
    heads_outside: bool  # of a packed one: heads, then query, key, value; else the other way round

    def project(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each [batch, sequence, heads, size]."""
        parts = module._modules
        if len(self.projections) == 3:
            query, key, value = (parts[n](x).view(*x.shape[:2], self.heads, -1) for n in self.projections)
            return query, key, value
        packed = parts[self.projections[0]](x)
        shape = (self.heads, 3) if self.heads_outside else (3, self.heads)
        query, key, value = packed.view(*x.shape[:2], *shape, -1).unbind(3 if self.heads_outside else 2)
        return query, key, value

    def finish(self, module: Any, attended: Tensor) -> Tensor:
        rows = attended.flatten(2)
        return rows if self.output is None else module._modules[self.output](rows)

    def __call__(self, module: Any, x: Tensor) -> Tensor:
        query, key, value = self.project(module, x)
        attended = attention(
            query, key, value, layout="bshd", causal=self.causal, causal_offset=0 if self.causal else None
        )
        return self.finish(module, attended)

    def plainly(self, module: Any, x: Tensor) -> Tensor:
        """The same in torch's functions."""
        query, key, value = (one.transpose(1, 2) for one in self.project(module, x))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        if self.causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).tril()
            scores = scores.masked_fill(~seen, float("-inf"))
        return self.finish(module, (scores.softmax(-1) @ value).transpose(1, 2))


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    x = call.first()
    if x is None or len(call.tensors()) != 1 or x.dim() != 3 or context.trains:
        return None
    if reached(type(module).forward, ATTENTION) or isinstance(module, nn.MultiheadAttention):
        return None  # it calls torch's fused attention already
    candidates = list(_candidates(module, x.shape[-1]))
    if not candidates or not runs_attention(x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1)):
        return None
    found = _recognise(module, candidates, x)
    if found is None:
        return None
    reason = why_not_plain("", module) or weight_reason(module)
    if reason:
        return Refusal(path, NAME, reason)

    context.attentions.add(module)
    original = type(module).forward
    called = (*found.projections, *([found.output] if found.output else []))

    def forward(self: nn.Module, value: Tensor) -> Any:
        known = not self.training and value.dim() == 3 and silent(self, called)
        return found(self, value) if known else original(self, value)

    made = mark(single_input(forward, first_name(module), original))
    source = f"{type(module).__name__}, scores written out, {found.heads} heads{', causal' if found.causal else ''}"
    return Proposal(NAME, path, module, source, [Way("kernel_pytorch attention", lambda: SetForward(module, made))])


def _candidates(module: nn.Module, features: int) -> Iterator[Written]:
    layers = {name: layer for name, layer in module.named_children() if type(layer) is nn.Linear}
    heads = sorted({v for v in vars(module).values() if type(v) is int and 1 <= v <= 256 and features % v == 0})
    triples: list[tuple[str, ...]] = [names for names in _SPELLINGS if all(name in layers for name in names)]
    triples += [(name,) for name, layer in layers.items() if layer.out_features == 3 * layer.in_features]
    for projections in triples:
        if any(layers[name].in_features != features for name in projections):
            continue
        others = [name for name in layers if name not in projections]
        if len(others) > 1:
            continue
        for count in heads:
            for causal in (False, True):
                for outside in (False, True) if len(projections) == 1 else (False,):
                    yield Written(projections, others[0] if others else None, count, causal, outside)


def _recognise(module: nn.Module, candidates: list[Written], x: Tensor) -> Written | None:
    like = next(module.parameters())
    if like.dtype not in TOLERANCE or type(like.data) is not Tensor or like.is_meta:
        return None
    with undisturbed(), evaluating(module):
        inputs = probe(2, 7, x.shape[-1], like=like, scale=2.0)
        try:
            expected = type(module).forward(module, inputs)
        except Exception:  # it takes other inputs: it is not this part
            return None
        if not isinstance(expected, Tensor):
            return None
        for candidate in candidates:
            found = candidate.plainly(module, inputs)
            if found.shape == expected.shape and row_error(found, expected)[1] <= TOLERANCE[like.dtype]:
                return candidate
    return None
