"""One call: drawn, made, differentiated, and compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch import functional as F

from .case import Case, coarsest, difference
from .draw import Draw

Generator = Callable[[Draw], Case]
GENERATORS: dict[str, Generator] = {}
_REFUSALS = (ValueError, TypeError, RuntimeError, IndexError, NotImplementedError)


def generates(*names: str) -> Callable[[Callable[[Draw, str], Case]], Callable[[Draw, str], Case]]:
    """Registers a generator for functions of kernel_pytorch.functional, of which it is given the name."""

    def register(generator: Callable[[Draw, str], Case]) -> Callable[[Draw, str], Case]:
        for name in names:
            assert name not in GENERATORS, name
            GENERATORS[name] = lambda draw, name=name: generator(draw, name)  # type: ignore[misc]
        return generator

    return register


def draw_case(name: str, seed: int, call: int) -> Case:
    draw = Draw(seed, name, call)
    torch.manual_seed(draw.between(0, 2**31))
    case = GENERATORS[name](draw)
    if case.gradients:
        constants = [id(case.options.get(name)) for name in case.constants]
        for tensor in case.tensors():
            if tensor.is_floating_point() and id(tensor) not in constants and draw.maybe(0.6):
                tensor.requires_grad_()
    return case


def run_case(name: str, case: Case, timed: Callable[[bool], None]) -> tuple[str, str]:
    """("value" or "refused", ""), or ("finding", what was found). `timed` is told where the call begins and ends."""
    reference = _in_double(case)
    timed(True)
    try:
        outputs = getattr(F, name)(*case.args, **case.options)
        results = [one for one in _flat(outputs) if isinstance(one, Tensor)]
        weights = [torch.randn(one.shape, dtype=torch.float64).to(one.dtype) for one in results if one.requires_grad]
        if weights:
            torch.autograd.backward([one for one in results if one.requires_grad], weights)
    except _REFUSALS as error:
        timed(False)
        return _judge_refusal(name, case, error)
    timed(False)
    if case.refused:
        return "finding", f"accepted although {case.refused}"
    if case.check is not None and (wrong := case.check(outputs, case)):
        return "finding", wrong
    if reference is None:
        return "value", ""
    wrong = _compare(case, results, weights, *reference)
    return ("finding", wrong) if wrong else ("value", "")


def _judge_refusal(name: str, case: Case, error: Exception) -> tuple[str, str]:
    message = str(error)
    if case.refused == "":
        return "finding", f"refused a valid call: {type(error).__name__}: {message[:300]}"
    known = (name, name.rstrip("_"), *case.names)
    if not any(one in message for one in known):
        return "finding", f"the refusal names none of {', '.join(known)}: {type(error).__name__}: {message[:300]}"
    return "refused", ""


def _in_double(case: Case) -> tuple[Case, Any] | None:
    """The arguments in fp64 as they are before the call, with leaves of their own."""
    if case.reference is None or case.refused:
        return None

    def double(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.detach().double().clone().requires_grad_(value.requires_grad)
        return value.clone() if isinstance(value, Tensor) else value

    mine = copy.copy(case)
    mine.args = tuple(double(value) for value in case.args)
    mine.options = {name: double(value) for name, value in case.options.items()}
    return mine, case.reference


def _flat(outputs: Any) -> list[Any]:
    if isinstance(outputs, (tuple, list)):
        return [one for output in outputs for one in _flat(output)]
    return [outputs]


def _compare(case: Case, results: list[Tensor], weights: list[Tensor], mine: Case, reference: Any) -> str | None:
    expected = [one for one in _flat(reference(*mine.args, **mine.options)) if isinstance(one, Tensor)]
    if len(expected) != len(results):
        return f"{len(results)} outputs, expected {len(expected)}"
    for i, (actual, wanted) in enumerate(zip(results, expected)):
        if wrong := difference(actual, wanted, case, f"output {i}"):
            return wrong
    if not all(bool(one.isfinite().all()) for one in expected):
        return None  # of a loss that is no number there is no gradient to compare
    graph = [(one, two) for one, two in zip(results, expected) if one.requires_grad]
    with_graph = [(two, weight.double()) for (_, two), weight in zip(graph, weights) if two.requires_grad]
    if not with_graph:
        return None
    precision = coarsest([tensor.dtype for tensor in case.tensors()])
    torch.autograd.backward([one for one, _ in with_graph], [two for _, two in with_graph])
    for i, (leaf, other) in enumerate(zip(case.tensors(), mine.tensors())):
        if not leaf.requires_grad or (leaf.grad is None and other.grad is None):
            continue
        wanted = torch.zeros_like(other) if other.grad is None else other.grad
        actual = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        if wrong := difference(actual, wanted, case, f"gradient of tensor {i}", precision):
            return wrong
    return None
