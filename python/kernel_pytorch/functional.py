"""Functions on tensors, in the manner of torch.nn.functional: each is one call to the best kernel for this machine."""

from __future__ import annotations

from . import _torch as _torch  # first: it says what is missing where torch is missing or old
from ._ops.layer_norm import layer_norm
from ._ops.rms_norm import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "layer_norm", "rms_norm"]
