"""Policies for jax.checkpoint. What an op's forward computes for its backward has a name, and XLA's own policies, which
look for dot_general, do not see our products.

    step = jax.checkpoint(block, policy=kernel_pytorch.jax.policies.save_residuals)
"""

from __future__ import annotations

from typing import Any

import jax

from ._gradients import RESIDUALS

__all__ = ["RESIDUALS", "offload_residuals", "recompute_all", "save_residuals"]

# Keeps what our ops computed for their backwards (attention's output and its sums of exponentials, an MLP's hidden
# values, statistics of norms); the rest is computed again.
save_residuals: Any = jax.checkpoint_policies.save_only_these_names(RESIDUALS)
# Keeps nothing.
recompute_all: Any = jax.checkpoint_policies.nothing_saveable


def offload_residuals(source: str = "device", target: str = "pinned_host") -> Any:
    """`save_residuals`, in the host's memory until backward needs them."""
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[RESIDUALS], offload_src=source, offload_dst=target
    )
