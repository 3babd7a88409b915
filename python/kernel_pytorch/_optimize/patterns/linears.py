"""Linear layers by themselves: this library's product where it is the faster one for the layer's shapes; under autocast
torch's with the gradients of fp32 parameters made in fp32; and for rows that are no multiple of 16 bytes (a vocabulary
of 50257) torch's product of padded ones: GPUs have fast kernels for aligned rows alone. Padding copies the weight, a
small part of the product; the padded columns are never seen, except by a loss that looks for them (`padded_of`): they
are minus infinity, which softmax takes for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..._ops.support.casting import product_dtype
from ...core._cast_linear import cast_linear, padded_linear
from ...core._products import runs_here
from ..changes import SetForward, mark
from ..sites import Call, Found, Proposal, Refusal, Way
from .context import Context, single_input, weight_reason, why_not_plain
from .norms import first_name
from .perceptrons import is_linear, weight_of

NAME = "linear"
ALIGNMENT = 8  # elements of 16 bits in 16 bytes
_PADDED = "_kernel_pytorch_padded"


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    x = call.first()
    if not is_linear(module) or x is None or len(call.tensors()) != 1:
        return None
    rows, columns = weight_of(module).shape
    functions = [("kernel_pytorch linear", _ours)] if runs_here(x) else []
    dtype, on_gpu = product_dtype(x), context.device.type == "cuda"
    if on_gpu and context.trains and dtype is not weight_of(module).dtype is torch.float32:
        functions.append(("torch's product, gradients of the parameters in fp32", _wide))
    if on_gpu and rows % ALIGNMENT and dtype.itemsize == 2:
        functions.insert(0, (f"torch's product, {rows} columns padded to a multiple of {ALIGNMENT}", _padded))
    if not functions:
        return None
    reason = weight_reason(module) or why_not_plain("", module)
    if reason:
        return Refusal(path, NAME, reason)
    name, original = first_name(module), type(module).forward
    ways = [
        Way(words, lambda f=function: SetForward(module, mark(single_input(f, name, original))))  # type: ignore[misc]
        for words, function in functions
    ]
    # covers itself: it takes the place of a narrow product that was there
    return Proposal(NAME, path, module, f"{type(module).__name__} {columns} -> {rows}", ways, covers=[path])


def _ours(module: Any, x: Tensor) -> Tensor:
    return cast_linear(x, weight_of(module), module.bias)


def _wide(module: Any, x: Tensor) -> Tensor:
    return cast_linear(x, weight_of(module), module.bias, ours=False)


def _padded(module: Any, x: Tensor) -> Tensor:
    return padded_product(x, weight_of(module), module.bias)


def padded_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias, a view of a product whose rows are a multiple of ALIGNMENT long."""
    rows = weight.shape[0]
    padded = padded_linear(x, weight, bias, -rows % ALIGNMENT)
    view = padded[..., :rows]
    if not torch.compiler.is_compiling():
        view.__dict__[_PADDED] = padded
    return view


def padded_of(view: Tensor) -> Tensor:
    """The product that a padded layer's result is a view of, with columns of minus infinity at its end, or the tensor
    itself. A loss of it needs no copy, and neither does its gradient."""
    if torch.compiler.is_compiling():  # which looks at no tensor's own attributes
        return view
    padded: Tensor | None = view.__dict__.get(_PADDED)
    if padded is None or padded.shape[:-1] != view.shape[:-1] or padded.data_ptr() != view.data_ptr():
        return view
    return padded
