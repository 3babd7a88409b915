"""torch's own nn.TransformerEncoderLayer: its attention, sums, norms and MLP on our kernels, masks included.

For inference torch runs the whole layer as one fused call that passes its parts by, so that it stands against that; the
parts by themselves are not looked at then. Calls that this forward does not know are the original's.
"""

from __future__ import annotations

from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from ...core._products import product
from ...functional import attention, layer_norm
from ..changes import SetForward, mark
from ..sites import Call, Found, Proposal, Refusal, Way
from .activations import kind_of
from .calls import runs_attention
from .context import Context, is_plain, weight_reason, why_not_plain

NAME = "encoder layer"


def passed_by(context: Context, path: str) -> bool:
    """Whether a module is inside a layer that torch's fused call runs without it."""
    if context.trains:
        return False
    parents = [".".join(path.split(".")[:i]) for i in range(path.count(".") + 1)] if path else []
    return any(type(context.model.get_submodule(parent)) is nn.TransformerEncoderLayer for parent in parents)


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    if type(module) is not nn.TransformerEncoderLayer:
        return None
    reason = why_not_plain("", module) or weight_reason(module)
    for name, part in module.named_modules():
        reason = reason or (why_not_plain(name, part) if name else None)
    attend = module.self_attn
    if reason is None and (not attend._qkv_same_embed_dim or attend.bias_k is not None or attend.add_zero_attn):
        reason = "its attention has keys or values of another size, or added ones"
    kind = kind_of(module.activation)
    if reason is None and kind is None:
        reason = "its activation is none of ours"
    if reason:
        return Refusal(path, NAME, reason)
    forward = mark(_forward(str(kind), {name: type(part) for name, part in module.named_modules() if name}))
    covers = [f"{path}.{name}".lstrip(".") for name, _ in module.named_modules() if name]
    way = Way("kernel_pytorch attention, products and norms with their sums", lambda: SetForward(module, forward))
    order = "norms first" if module.norm_first else "norms last"
    return Proposal(
        NAME, path, module, f"nn.TransformerEncoderLayer, {order}, {kind}", [way], opaque=True, covers=covers
    )


def _forward(kind: str, classes: dict[str, type]) -> Any:
    def forward(
        self: Any,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        known = type(src) is Tensor and not src.is_nested and src.dim() == 3 and self.self_attn.batch_first
        mask = _keeps(src_mask, src_key_padding_mask) if known else None
        parts = ((name, part) for name, part in self.named_modules() if name)
        if not known or mask is False or not all(is_plain(part, classes.get(name, NoneType)) for name, part in parts):
            return type(self).forward(self, src, src_mask, src_key_padding_mask, is_causal)
        if self.norm_first:
            attended = self.dropout1(_attend(self.self_attn, _norm(self.norm1, src), mask, is_causal))
            normed, src = _norm(self.norm2, attended, src)
            return src + self.dropout2(_perceptron(self, normed, kind))
        src, _ = _norm(self.norm1, self.dropout1(_attend(self.self_attn, src, mask, is_causal)), src)
        return _norm(self.norm2, self.dropout2(_perceptron(self, src, kind)), src)[0]

    return forward


def _norm(norm: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    return layer_norm(x, norm.weight, norm.bias, norm.eps, residual=residual)


def _perceptron(layer: Any, x: Tensor, kind: str) -> Tensor:
    hidden = layer.dropout(product(x, layer.linear1.weight, layer.linear1.bias, kind))
    return product(hidden, layer.linear2.weight, layer.linear2.bias)


def _keeps(mask: Tensor | None, padding: Tensor | None) -> Any:
    """torch's masks, True where nothing is seen, as ours; None for none, False for one that is not known here."""
    if any(one is not None and one.dtype is not torch.bool for one in (mask, padding)) or (
        mask is not None and mask.dim() != 2
    ):
        return False
    kept = None if mask is None else ~mask[None, None]
    if padding is None:
        return kept
    real = ~padding[:, None, None, :]
    return real if kept is None else real & kept


def _attend(module: Any, x: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    batch, length, features = x.shape
    packed = product(x, module.in_proj_weight, module.in_proj_bias)
    heads = packed.view(batch, length, 3, module.num_heads, module.head_dim)
    query, key, value = heads.unbind(2)
    dropout = module.dropout if module.training else 0.0
    causal = is_causal and mask is None
    if runs_attention(query, key, value):
        attended = attention(
            query, key, value, layout="bshd", causal=causal, causal_offset=0 if causal else None, mask=mask,
            dropout_p=dropout,
        )  # fmt: skip
    else:
        rows = [one.transpose(1, 2) for one in (query, key, value)]
        attended = torch.nn.functional.scaled_dot_product_attention(
            rows[0], rows[1], rows[2], mask, dropout, causal
        ).transpose(1, 2)
    return product(attended.reshape(batch, length, features), module.out_proj.weight, module.out_proj.bias)
