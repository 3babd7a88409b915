"""The optimizer of a model that trains: torch's AdamW, the same object, with a `step` on our kernel.

Groups, state and state_dict stay the optimizer's own, so that schedulers, checkpoints and GradScaler go on with it;
restoring takes the step away. It is verified and timed on copies: an optimizer's step cannot be tried on the model.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..optim import AdamW
from .changes import Change, Changes, SetAttribute, Several
from .choose import Kept, Outcome
from .measure import Timing, interleaved
from .sites import Proposal, Refusal, Way
from .verdicts import pays
from .verify import Difference, random_like, row_error, tolerance_for

PATTERN = "optimizer"
_MOST_ELEMENTS = 1 << 26  # of the copies
_STEPS = 3  # after which copies are compared: the averages have left their first values


class SetStep(SetAttribute):
    """Another step for one optimizer; undone, the counts are where torch's own expects them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        shadow = AdamW([nn.Parameter(torch.empty(0))], state_dtype=None)

        def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
            self._opt_called = True  # what a learning-rate scheduler looks for
            shadow.param_groups = [{**shadow.defaults, **group} for group in self.param_groups]
            shadow.state = self.state
            for name in ("grad_scale", "found_inf"):  # GradScaler's, during a step
                setattr(shadow, name, getattr(self, name, None))
            return shadow.step(closure)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        super().__init__(optimizer, "step", types.MethodType(step, optimizer))

    def __deepcopy__(self, memo: dict[int, Any]) -> Several:
        return Several()  # a copied model is not the one that this optimizer trains

    def undo(self) -> None:
        super().undo()
        for group in self.owner.param_groups:
            if not group.get("fused") and not group.get("capturable"):
                for parameter in group["params"]:
                    state = self.owner.state.get(parameter, {})
                    if "step" in state:
                        state["step"] = state["step"].cpu()


def choose(
    optimizer: torch.optim.Optimizer, changes: Changes, outcome: Outcome, device: torch.device, seconds: float
) -> None:
    """Gives the optimizer our step where it is right and faster, and says in the outcome what was done."""
    reason = _why_not(optimizer)
    if reason is None:
        before, after, difference = _try(optimizer, device, seconds)
        outcome.differences.append(difference)
        ratio = before.median_us / after.median_us
        if not difference.ok:
            reason = f"its step differs by {difference.relative:.1e} of a row, more than {difference.tolerance:.0e}"
        elif not pays(before, after):
            reason = f"{after.median_us:.0f} us against {before.median_us:.0f} us as it is ({ratio:.2f}x)"
        else:
            change = SetStep(optimizer)
            changes.apply(change)
            outcome.kept.append(_kept(optimizer, change, difference, before, after))
            return
    outcome.refusals.append(Refusal(PATTERN, PATTERN, reason))


def _kept(optimizer: Any, change: Change, difference: Difference, before: Timing, after: Timing) -> Kept:
    way = Way("kernel_pytorch's step, one launch for a list of parameters", lambda: change)
    source = f"torch.optim.{type(optimizer).__name__}"
    return Kept(Proposal(PATTERN, PATTERN, nn.Module(), source, [way]), way, change, [difference], before, after)


def _why_not(optimizer: torch.optim.Optimizer) -> str | None:
    kind = type(optimizer)
    if kind not in (torch.optim.AdamW, torch.optim.Adam):
        return f"{kind.__module__}.{kind.__name__} has no kernel here; torch.optim.AdamW has"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "it has hooks around its step"
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        return "its step was replaced by someone else"
    for group in optimizer.param_groups:
        if kind is torch.optim.Adam and group["weight_decay"]:
            return "Adam's weight_decay is added to the gradient; ours decays weights as AdamW does"
        if group.get("differentiable"):
            return "differentiable=True: its step has a gradient"
        for parameter in group["params"]:
            if type(parameter.data) is not Tensor or not parameter.is_floating_point():
                return f"a parameter is a {type(parameter.data).__name__} of {parameter.dtype}"
    return None if any(group["params"] for group in optimizer.param_groups) else "it has no parameters"


def _copy(optimizer: Any) -> torch.optim.Optimizer:
    """One with the same settings, on copies of some of the parameters, with random gradients, the same in each."""
    left, groups = _MOST_ELEMENTS, []
    for group in optimizer.param_groups:
        copies: list[nn.Parameter] = []
        for parameter in group["params"]:
            if left > 0:
                copies.append(nn.Parameter(parameter.detach().clone()))
                copies[-1].grad = random_like(parameter, len(copies)) * 1e-2
                left -= parameter.numel()
        if copies:
            groups.append({**{name: value for name, value in group.items() if name != "params"}, "params": copies})
    return type(optimizer)(groups)  # type: ignore[no-any-return]


def _try(optimizer: torch.optim.Optimizer, device: torch.device, seconds: float) -> tuple[Timing, Timing, Difference]:
    pair = theirs, ours = _copy(optimizer), _copy(optimizer)
    SetStep(ours).apply()
    for one in pair:
        for _ in range(_STEPS):
            one.step()
    values = [[p for group in one.param_groups for p in group["params"]] for one in pair]
    errors = [row_error(mine, other) for other, mine in zip(*values, strict=True)]
    absolute, relative = (max(column) for column in zip(*errors, strict=True))
    tolerance = tolerance_for(list(values[0]), "exact", False)
    difference = Difference(PATTERN, "step", absolute, relative, tolerance, relative <= tolerance)
    ways = {"before": (lambda: None, theirs.step), "after": (lambda: None, ours.step)}
    found = interleaved(ways, device, seconds)  # type: ignore[arg-type]
    return found["before"], found["after"], difference
