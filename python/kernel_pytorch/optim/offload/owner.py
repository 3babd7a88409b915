"""All states of one optimizer that are in the host's memory: which slabs a parameter has, and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from ..shards import is_sharded
from .pipeline import Offload, OffloadedStates, Update
from .slabs import Field


class Offloaded:
    """Slabs by parameter. They are made when a parameter is first asked for, for all of its kind at once."""

    def __init__(self) -> None:
        self._of: dict[Tensor, OffloadedStates] = {}

    def get(self, parameter: Tensor) -> OffloadedStates | None:
        return self._of.get(parameter)

    def states_of(
        self,
        parameter: Tensor,
        alike: Callable[[], Iterable[Tensor]],
        fields: Callable[[], list[Field]],
        how: Offload,
        state: dict[Tensor, Any],
    ) -> OffloadedStates:
        """The parameter's slabs; new ones are also those of `alike()`, and take over what `state` has of them."""
        found = self._of.get(parameter)
        if found is None:
            together = {id(one): one for one in (parameter, *alike()) if one not in self._of}
            made = fields()
            if any(field.per > 1 for field in made) and any(map(is_sharded, together.values())):
                raise ValueError(
                    "offload: a parameter is a DTensor; states of 8 bits have scales for groups of elements, which "
                    'checkpoints of sharded states cannot hold; take state="fp32"'
                )
            found = OffloadedStates(list(together.values()), made, how)
            for one in together.values():
                self._of[one] = found
                if "step" in state.get(one, {}):
                    state[one] = found.slabs.store(one, state[one])
        return found

    def all(self) -> list[OffloadedStates]:
        return list({id(one): one for one in self._of.values()}.values())

    def finish(self) -> None:
        """The host's arrays hold every step taken so far when this returns."""
        for states in self.all():
            states.finish()

    def join(self) -> None:
        for states in self.all():
            states.join()

    def join_one(self, parameter: Tensor) -> None:
        states = self._of.get(parameter)
        if states is not None:
            states.join_one(parameter)

    def explain(self, how: Offload, bare: Callable[[OffloadedStates], Update]) -> str:
        if not self._of:
            return f'offload="{how.mode}": no step has been taken yet'
        return "\n".join(_explain(states, bare(states)) for states in self.all())


def _explain(states: OffloadedStates, bare: Update) -> str:
    slabs = states.slabs
    size = f"{slabs.elements:,} elements ({states.dtype}), {slabs.host_bytes() / 1e9:.3f} GB of the host's memory"
    if states.device.type == "cpu":
        return f"{size}; weights are there too, nothing is sent"
    plan = states.make_plan(bare)
    rates = states.rates
    assert rates is not None
    measured = (
        f"link {rates['up'] / 1e9:.1f} GB/s up and {rates['down'] / 1e9:.1f} down at once, host memory "
        f"{rates['host_memory'] / 1e9:.1f} GB/s, CPU {rates['cpu'] / 1e9:.2f} and device {rates['device'] / 1e9:.2f} "
        "billion elements/s"
    )
    taken = states.on_device
    corrected = f"; {taken} of them now, as steps have shown" if taken not in (None, plan["on_device"]) else ""
    return f"{size}; {measured}; {plan['reason']}{corrected}"
