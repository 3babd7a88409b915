"""Blocks: x + attention(norm(x)), then x + mlp(norm(x)): the first sum becomes part of the second norm's pass, the
second part of the MLP's last product. Where norms or scales stand behind attention and MLP (Gemma 2 and 3, GLM-4,
DINOv2), the second sum stays.

How a block calls its attention is learnt from the sample: which of its own arguments go through under which name.
A call that brings something the sample did not show is the original's. Under autocast the norms write the products'
type, where the sample shows that nothing but products takes it (narrowing.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..._modules import evaluating
from ..changes import SetForward, mark
from ..sites import Call, Found, Proposal, Refusal, Way
from . import float8
from .context import Context, is_plain, silent, weight_reason, why_not_plain
from .deferred.summed import Summed
from .narrowing import narrow_type, takes_narrow
from .perceptrons import has_plain_layers

NAME = "block"
# norm, attention, norm, mlp, and maybe norms or scales behind attention and MLP: these first, since they hold others'
# names.
_SPELLINGS = (
    (
        "input_layernorm", "self_attn", "pre_feedforward_layernorm", "mlp",
        "post_attention_layernorm", "post_feedforward_layernorm",
    ),
    (
        "input_layernorm", "self_attn", "post_attention_layernorm", "mlp",
        "post_self_attn_layernorm", "post_mlp_layernorm",
    ),
    (
        "input_layernorm", "self_attn", "post_attention_layernorm", "mlp",
        "self_attn_layer_scale", "mlp_layer_scale",
    ),
    ("norm1", "attention", "norm2", "mlp", "layer_scale1", "layer_scale2"),
    ("norm1", "attn", "norm2", "mlp", "ls1", "ls2"),
    ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
    ("input_layernorm", "attention", "post_attention_layernorm", "mlp"),
    ("input_layernorm", "self_attn", "pre_ff_layernorm", "feed_forward"),
    ("layer_norm1", "self_attn", "layer_norm2", "mlp"),
    ("layer_norm1", "attn", "layer_norm2", "mlp"),
    ("layernorm_before", "self_attn", "layernorm_after", "mlp"),
    ("attn_norm", "attn", "mlp_norm", "mlp"),
    ("operator_norm", "self_attn", "ffn_norm", "feed_forward"),
    ("rms_norm1", "attention", "rms_norm2", "ffn"),
    ("ln_1", "attn", "ln_2", "mlp"),
    ("norm1", "attn", "norm2", "mlp"),
    ("layernorm_before", "attention", "layernorm_after", "mlp"),
    ("attention_norm", "attention", "ffn_norm", "feed_forward"),
    ("ln1", "attn", "ln2", "mlp"),
)  # fmt: skip


@dataclass
class Passing:
    """How a block's arguments reach its attention."""

    names: list[str]  # of the block's positional arguments, x first
    defaults: dict[str, Any] = field(default_factory=dict)  # of the block's own signature
    positional: list[str | None] = field(default_factory=list)  # the attention's, by the block's name; None is norm(x)
    named: dict[str, str | None] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)  # the attention's, the same in every call
    unused: dict[str, Any] = field(default_factory=dict)  # the block's own, with the values they must have
    returns_tuple: bool = False
    passed: frozenset[str | None] = frozenset()  # the block's own that the attention gets
    narrow: tuple[bool, bool] = (False, False)  # attention and MLP take autocast's type as they take fp32

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """The block's arguments by name, or None where the call is not like the sample's."""
        if len(args) > len(self.names):
            return None
        given = dict(zip(self.names, args))
        given.update(kwargs)
        for name, value in given.items():
            if name in self.unused:
                known = self.unused[name]
                if value is not known and not (isinstance(value, (bool, int, float, str)) and value == known):
                    return None
            elif name != self.names[0] and name not in self.passed:
                return None
        return {**self.defaults, **given}

    def call(self, attention: Any, normed: Tensor, bound: dict[str, Any]) -> Any:
        args = [normed if name is None else bound.get(name) for name in self.positional]
        named = {key: normed if name is None else bound.get(name) for key, name in self.named.items()}
        return attention(*args, **named, **self.constants)


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    names = next((names for names in _SPELLINGS if _is_spelt(module, names)), None)
    if names is None:
        return None
    first, attention, second, perceptron = (module._modules[name] for name in names[:4])
    if first not in context.norms or second not in context.norms or attention is None or perceptron is None:
        return Refusal(path, NAME, "its norms were not recognised")
    has_more_behind = len(names) > 4
    reason = why_not_plain("", module) or weight_reason(module)
    for name, part in ((names[0], first), (names[2], second)):
        reason = reason or (why_not_plain(name, part) if part is not None else None)
    if reason:
        return Refusal(path, NAME, reason)
    others = [name for name, child in module.named_children() if name not in names and not _is_nothing(child)]
    others += [
        name for table in (module._parameters, module._buffers) for name, own in table.items() if own is not None
    ]
    if others:
        return Refusal(path, NAME, f"it also has {', '.join(others)}")
    passing = _learn(module, names, call, context.trains)
    if isinstance(passing, str):
        return Refusal(path, NAME, passing)
    ways = [Way("the sum inside the second norm", _change(module, names, passing, context, None))]
    kind = context.perceptrons[perceptron].kind if perceptron in context.perceptrons else "layer"
    words = "the sums inside the second norm and the last product"
    if kind == "gated" and context.trains and not has_more_behind:
        ways.insert(0, Way(f"{words}, torch's others", _change(module, names, passing, context, "torch's")))
    if kind != "layer" and not has_more_behind:
        ways.insert(0, Way(words, _change(module, names, passing, context, "ours")))
    covers = [f"{path}.{names[0]}".lstrip("."), f"{path}.{names[2]}".lstrip(".")]
    norms = sum(module._modules[name] in context.norms for name in names)
    source = f"{type(module).__name__}, two sums and {norms} norms"
    return Proposal("residual + norm", path, module, source, ways, covers=covers)


def _is_spelt(module: nn.Module, names: tuple[str, ...]) -> bool:
    parts = [module._modules.get(name) for name in names]
    return all(part is not None and not (i >= 4 and _is_nothing(part)) for i, part in enumerate(parts))


def _is_nothing(module: nn.Module) -> bool:
    return isinstance(module, (nn.Dropout, nn.Identity)) and (not isinstance(module, nn.Dropout) or module.p == 0.0)


def _change(
    module: nn.Module, names: tuple[str, ...], passing: Passing, context: Context, products: str | None
) -> Callable[[], SetForward]:
    """`products` are those of the MLP where its last one takes the sum; None calls the MLP."""
    norm_1, norm_2 = (context.norms[module._modules[names[i]]] for i in (0, 2))  # type: ignore[index]
    perceptron = context.perceptrons.get(module._modules[names[3]])  # type: ignore[arg-type]
    original = type(module).forward
    kinds: list[Any] = [type(module._modules[name]) for name in names]  # others may stand there later

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        parts: Any = self._modules
        bound = passing.bind(args, kwargs)
        first, second = parts[names[0]], parts[names[2]]
        is_known = bound is not None and type(bound.get(passing.names[0])) in (Tensor, Summed)
        has_norms = is_known and is_plain(first, kinds[0]) and is_plain(second, kinds[2])
        if bound is None or not (has_norms and silent(self, names)):
            return original(self, *args, **kwargs)
        x = bound[passing.names[0]]
        dtype = narrow_type(x)
        if type(x) is Summed:  # the sum before this block is part of its first norm
            normed, x = norm_1(first, x), x.compute()
        else:
            normed, x = norm_1.through(first, x, dtype if passing.narrow[0] else None)
        attended = passing.call(parts[names[1]], normed, bound)
        attended = attended[0] if passing.returns_tuple else attended
        inner = parts[names[3]]
        if len(names) > 4:
            normed, x = norm_2.add(second, parts[names[4]](attended), x, dtype if passing.narrow[1] else None)
            return parts[names[5]](inner(normed)) + x
        has_mlp = is_plain(inner, kinds[3])
        narrow = float8.of_module(inner) if norm_2.kind == "rms_norm" and has_mlp else None
        if narrow is not None and perceptron is not None and silent(inner):
            return narrow.after_norm(inner, attended, x, norm_2, second)
        normed, x = norm_2.add(second, attended, x, dtype if passing.narrow[1] else None)
        if products is None or perceptron is None or not (has_mlp and has_plain_layers(inner, perceptron)):
            return inner(normed) + x
        return perceptron(inner, normed, products, residual=x)

    return lambda: SetForward(module, mark(forward))


def _learn(module: nn.Module, names: tuple[str, ...], call: Call, trains: bool) -> Passing | str:
    """How arguments go through, or in words why that is not clear."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []
    inner: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []
    normed: list[Any] = []
    parts: Any = module._modules
    hooks = [
        parts[names[1]].register_forward_hook(lambda _, a, k, out: seen.append((a, k, out)), with_kwargs=True),
        parts[names[0]].register_forward_hook(lambda _, a, out: normed.append(out)),
        parts[names[3]].register_forward_hook(lambda _, a, k, out: inner.append((a, k, out)), with_kwargs=True),
    ]
    call = call.fresh()
    try:
        with torch.no_grad(), evaluating(module):
            output = call.run(module)
    finally:
        for hook in hooks:
            hook.remove()
    if len(seen) != 1 or len(normed) != 1:
        return f"its attention ran {len(seen)} times and its first norm {len(normed)} times"
    if not isinstance(output, Tensor):
        return f"it returns {type(output).__name__} and not a tensor"
    if len(inner) != 1 or len(inner[0][0]) != 1 or inner[0][1] or not isinstance(inner[0][2], Tensor):
        return f"its {names[3]} does not take one tensor and return one"
    passing = _mapping(module, call, *seen[0], normed[0])
    if isinstance(passing, Passing):
        with torch.no_grad(), evaluating(module):
            passing.narrow = (
                takes_narrow(parts[names[1]], *seen[0], normed[0], trains),
                takes_narrow(parts[names[3]], *inner[0], inner[0][0][0], trains),
            )
    return passing


def _mapping(
    module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, normed: Any
) -> Passing | str:
    signature = inspect.signature(type(module).forward)
    parameters = [
        p for p in list(signature.parameters.values())[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    try:
        given = inspect.signature(module.forward).bind(*call.args, **call.kwargs)
    except TypeError as error:
        return f"its arguments cannot be bound: {error}"
    own = {p.name: p.default for p in parameters}
    extra = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    for name, value in given.arguments.items():
        own.update(value if name == extra else {name: value})
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    passing = Passing(names, defaults, returns_tuple=isinstance(output, tuple))

    def source(key: str | None, value: Any) -> tuple[bool, str | None]:
        """(found, name): of the block's argument that a value is; None is the normed x."""
        if value is normed:
            return True, None
        if key is not None and key in own and own[key] is value:
            return True, key
        same = [name for name, one in own.items() if one is value and isinstance(value, (Tensor, tuple, list))]
        return (True, same[0]) if same else (False, None)

    for value in args:
        found, origin = source(None, value)
        if not found and not (value is None and len(passing.positional) < len(names)):
            return "its attention gets a positional argument that is none of the block's"
        passing.positional.append(origin if found else names[len(passing.positional)])
    for key, value in kwargs.items():
        found, origin = source(key, value)
        if found:
            passing.named[key] = origin
        elif value is None or isinstance(value, (bool, int, float, str)):
            passing.constants[key] = value
        else:
            return f"its attention gets {key}, which is none of the block's arguments"
    if None not in (*passing.positional, *passing.named.values()):
        return "its attention does not get the first norm's output"
    passing.passed = frozenset((*passing.positional, *passing.named.values()))
    passing.unused = {name: value for name, value in own.items() if name not in passing.passed and name != names[0]}
    return passing
