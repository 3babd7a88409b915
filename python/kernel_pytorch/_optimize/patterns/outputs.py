"""BERT's outputs: norm(dropout(linear(h)) + x), the sum inside the norm's pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..._modules import evaluating
from ...functional import linear
from ..changes import SetForward, mark
from ..sites import Call, Found, Proposal, Refusal, Way
from ..verify import row_error
from .context import Context, is_plain, probe, undisturbed, weight_reason, why_not_plain
from .norms import TOLERANCE
from .perceptrons import is_linear, marked_dropouts, weight_of

NAME = "linear + residual + norm"


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    children = dict(module.named_children())
    layers = [name for name, child in children.items() if is_linear(child)]
    norms = [name for name, child in children.items() if child in context.norms]
    dropouts = [name for name, child in children.items() if isinstance(child, nn.Dropout)]
    if len(layers) != 1 or len(norms) != 1 or len(children) != 2 + len(dropouts) or len(dropouts) > 1:
        return None
    if len(call.args) != 2 or call.kwargs or not all(isinstance(value, Tensor) for value in call.args):
        return None
    if not _is_this(context, module, layers[0], norms[0], dropouts[0] if dropouts else None):
        return None
    reason = why_not_plain("", module) or weight_reason(module)
    reason = reason or why_not_plain(layers[0], children[layers[0]]) or why_not_plain(norms[0], children[norms[0]])
    if reason:
        return Refusal(path, NAME, reason)
    norm = context.norms[children[norms[0]]]
    original = type(module).forward
    ways = []
    for words, ours in (("kernel_pytorch product and norm", True), ("its own product, kernel_pytorch norm", False)):
        names, classes = (layers[0], norms[0]), (type(children[layers[0]]), type(children[norms[0]]))
        forward = _forward(norm, names, classes, dropouts[0] if dropouts else None, original, ours)
        ways.append(Way(words, lambda forward=forward: SetForward(module, mark(forward))))  # type: ignore[misc]
    covers = [f"{path}.{norms[0]}".lstrip(".")]
    return Proposal(NAME, path, module, type(module).__name__, ways, covers=covers)


def _forward(
    norm: Any, names: tuple[str, str], classes: tuple[type, type], dropout: str | None, original: Any, ours: bool
) -> Any:
    layer_name, norm_name = names

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        parts: Any = self._modules
        layer = parts[layer_name]
        known = len(args) == 2 and not kwargs and type(args[0]) is Tensor and type(args[1]) is Tensor
        if not known or not is_plain(parts[norm_name], classes[1]):
            return original(self, *args, **kwargs)
        reads = ours and is_plain(layer, classes[0])
        hidden = linear(args[0], weight_of(layer), layer.bias) if reads else layer(args[0])
        if dropout is not None:
            hidden = parts[dropout](hidden)
        return norm.add(parts[norm_name], hidden, args[1])[0]

    return forward


def _is_this(context: Context, module: nn.Module, layer: str, norm: str, dropout: str | None) -> bool:
    """Whether the module's numbers are those of norm(dropout(linear(h)) + x)."""
    parts: Any = module._modules
    weight = parts[layer].weight
    if weight.dtype not in TOLERANCE or type(weight.data) is not Tensor or weight.is_meta:
        return False
    with undisturbed(), evaluating(module), marked_dropouts(module) as marks:
        outputs, inputs = weight_of(parts[layer]).shape
        hidden, x = probe(4, inputs, like=weight), probe(4, outputs, like=weight, seed=1)
        try:
            found = type(module).forward(module, hidden, x)
        except Exception:  # it takes other arguments: it is not this part
            return False
        expected = parts[norm](parts[layer](hidden) * marks[dropout] + x)
        is_tensor = isinstance(found, Tensor) and found.shape == expected.shape
        return is_tensor and row_error(found, expected)[1] <= TOLERANCE[weight.dtype]
