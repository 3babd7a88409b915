"""Linear attention and the delta rule of a sequence that the members of a process group hold in runs.

Two passes: each member computes the state that its run leaves where none was in front, and what its run multiplies a
state in front by: a factor of each row (gates), or a matrix (the delta rule: what becomes of the unit matrix). Both are
gathered, every member goes through them up to its own, and so knows the state that its run begins with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from ..._ops.delta_rule import delta_rule
from ..._ops.linear_attention import linear_attention
from ..._ops.support.autograd import wants_gradient
from ..._ops.support.casting import statistics_dtype
from ._exchange import Exchange


def context_parallel_linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Any,
    gate: Tensor | None = None,
    decay: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = False,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    mode: str = "auto",
) -> Any:
    """functional.linear_attention of a sequence of which member i of `group` holds run i; equal to it within rounding.

    Every member calls it, and goes through its gradient. Runs may have different numbers of tokens, also none.

    Args:
        query, key, value, gate: this member's run, as functional.linear_attention takes them.
        group: a torch.distributed process group; None is this process alone.
        decay, scale, normalize, mode: as of functional.linear_attention, the same for all.
        initial_state: of the whole sequence, the same for all.
        return_state: return (output, final state of the whole sequence), the latter the same on all members.

    Returns:
        The output of this member's run. Gradients are of the sum of what all members made their losses of; those of
        decay and initial_state are this member's share: sum them over the group as those of any parameter.
    """
    options: dict[str, Any] = {"scale": scale, "normalize": normalize, "mode": mode}

    def run(start: Tensor | None) -> Any:
        return linear_attention(
            query, key, value, gate=gate, decay=decay, **options, initial_state=start, return_state=True
        )

    def share() -> Tensor:
        state = run(None)[1]
        logs = torch.zeros(state.shape[:-1], dtype=state.dtype, device=state.device)
        if gate is not None:
            total = gate.to(state.dtype).sum(1)
            logs = logs + (total if total.dim() == 3 else total[..., None])
        if decay is not None:
            logs = logs + decay.to(state.dtype)[:, None] * query.shape[1]
        return torch.cat([state, logs.exp()[..., None]], -1)

    tensors = {"query": query, "key": key, "value": value, "gate": gate}
    values = value.shape[-1] + normalize
    call = _Call("context_parallel_linear_attention", tensors, options, values, initial_state, decay)
    return call.results(group, run, share, return_state)


def context_parallel_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    *,
    group: Any,
    gate: Tensor | None = None,
    scale: float | None = None,
    normalize_qk: bool = False,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    mode: str = "auto",
) -> Any:
    """functional.delta_rule of a sequence of which member i of `group` holds run i; equal to it within rounding.

    Every member calls it, and goes through its gradient. Runs may have different numbers of tokens, also none.

    Args:
        query, key, value, beta, gate: this member's run, as functional.delta_rule takes them.
        group: a torch.distributed process group; None is this process alone.
        scale, normalize_qk, mode: as of functional.delta_rule, the same for all.
        initial_state: of the whole sequence, the same for all.
        return_state: return (output, final state of the whole sequence), the latter the same on all members.

    Returns:
        As of context_parallel_linear_attention.
    """
    options: dict[str, Any] = {"scale": scale, "normalize_qk": normalize_qk, "mode": mode}

    def run(start: Tensor | None) -> Any:
        return delta_rule(query, key, value, beta, gate=gate, **options, initial_state=start, return_state=True)

    def share() -> Tensor:
        batch, tokens, heads = value.shape[:3]
        columns = query.shape[-1]
        none = value.new_zeros(batch, tokens, heads, columns)
        unit = torch.eye(columns, dtype=statistics_dtype(query), device=query.device).expand(batch, heads, -1, -1)
        # Two calls and not one with both side by side: kernels take so many values and no more.
        kept = delta_rule(query, key, none, beta, gate=gate, **options, initial_state=unit, return_state=True)[1]
        return torch.cat([run(None)[1], kept], -1)

    tensors = {"query": query, "key": key, "value": value, "beta": beta, "gate": gate}
    call = _Call("context_parallel_delta_rule", tensors, options, value.shape[-1], initial_state)
    return call.results(group, run, share, return_state)


class _Call:
    def __init__(
        self,
        name: str,
        tensors: dict[str, Tensor | None],
        options: dict[str, Any],
        values: int,
        initial: Tensor | None,
        decay: Tensor | None = None,
    ) -> None:
        self.name, self.tensors, self.options, self.initial, self.decay = name, tensors, options, initial, decay
        self.values = values  # of a state

    @property
    def wants_gradient(self) -> bool:
        return wants_gradient(*self.tensors.values(), self.initial, self.decay)

    @staticmethod
    def is_shared(group: Any) -> bool:
        return group is not None and distributed.get_world_size(group) > 1

    def results(
        self, group: Any, run: Callable[[Tensor | None], Any], share: Callable[[], Tensor], return_state: bool
    ) -> Any:
        if self.is_shared(group):
            by_runs = _untraced_by_runs if torch.compiler.is_compiling() else _by_runs
            output, state = by_runs(self, group, run, share)
        else:
            output, state = run(self.initial)
        return (output, state) if return_state else output

    def header(self) -> dict[str, Any]:
        """What members must agree on; all but the tokens of their runs."""
        header: dict[str, Any] = {}
        for name, x in self.tensors.items():
            header[name] = None if x is None else [str(x.dtype), *x.shape[:1], "tokens", *x.shape[2:]]
        for name, x in {"decay": self.decay, "initial_state": self.initial}.items():
            header[name] = None if x is None else [str(x.dtype), *x.shape]
        # Of any of them: then every member comes to the exchange of the backward.
        return {**header, **self.options, "gradients": self.wants_gradient}


def _by_runs(
    call: _Call, group: Any, run: Callable[[Tensor | None], Any], share: Callable[[], Tensor]
) -> tuple[Tensor, Tensor]:
    exchange = Exchange(group, call.name)
    exchange.agree(call.header())
    mine = share()
    initial = mine.new_zeros(*mine.shape[:-1], call.values) if call.initial is None else call.initial
    start, end = _starts(mine, initial, exchange)
    return run(start)[0], end


_untraced_by_runs = _disable_dynamo(_by_runs)


class _Starts(torch.autograd.Function):
    """(the state that this member's run begins with, the state behind all runs)"""

    @staticmethod
    def forward(ctx: Any, share: Tensor, initial: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
        shares = torch.stack(exchange.gather(share))
        ctx.save_for_backward(shares, initial)
        ctx.exchange = exchange
        return _scan(shares, initial, exchange.member)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            states = _scan(leaves[0], leaves[1], ctx.exchange.member)
        of_shares, of_initial = torch.autograd.grad(states, leaves, grads)
        return ctx.exchange.swap(of_shares).sum(0), of_initial, None


_starts: Any = _Starts.apply


def _scan(shares: Tensor, initial: Tensor, member: int) -> tuple[Tensor, Tensor]:
    state, values = initial.clone(), initial.shape[-1]
    start = state
    with torch.autocast(shares.device.type, enabled=False):  # states are sums over all tokens in front
        for i, share in enumerate(shares):
            if i == member:
                start = state
            kept = share[..., values:]
            is_matrix = kept.shape[-1] == kept.shape[-2]  # of one column both are the same
            state = share[..., :values] + (kept @ state if is_matrix else kept * state)
    return start.clone(), state
