"""Models that are optimised at their first call: how that intent is found and taken back."""

from __future__ import annotations

from torch import nn

__all__ = ["Pending", "forget_first_call"]


class Pending:
    """Base of the hook that first_call.py puts before a model's forward."""


def forget_first_call(model: nn.Module) -> None:
    """Takes back what optimize_at_first_call asked for, if its call has not come yet."""
    for key in [key for key, hook in model._forward_pre_hooks.items() if isinstance(hook, Pending)]:
        del model._forward_pre_hooks[key]
        model._forward_pre_hooks_with_kwargs.pop(key, None)
