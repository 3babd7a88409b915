"""Formats of an optimizer's states: what both front ends know of what the core stores
(kernel_pytorch/ops/optimizer_step/optimizer_step.h)."""

from __future__ import annotations

STATES = ("fp32", "compact", "8bit")
GROUP = {"compact": 64, "8bit": 256}  # elements of memory that share a scale
STORAGE = {"fp32": "plain", "compact": "companded", "8bit": "dynamic"}  # what the core calls them
SMALLEST_8BIT = 4096  # "8bit" keeps states of smaller parameters in fp32, as bitsandbytes does


def check_state(owner: str, state: str) -> None:
    if state not in STATES:
        raise ValueError(f'{owner}: state is "{state}"; it must be "fp32", "compact" or "8bit"')


def format_of_size(elements: int, state: str) -> str:
    """The format of the states of a parameter of that size where `state` is asked for."""
    if state == "fp32" or (state == "8bit" and elements < SMALLEST_8BIT):
        return "fp32"
    return state


def zero_code(name: str, form: str) -> int:
    """What stands for 0 in a new state: the dynamic map's signed codes begin below it."""
    return 127 if form == "8bit" and not name.endswith("_sq") else 0
