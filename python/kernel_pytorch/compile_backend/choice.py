"""Whether a match is replaced, and by what: measured once for its pattern, shapes, types and device, and remembered."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from .model import Candidate, Match, Region
from .nodes import Node, value
from .settings import Settings
from .trial import Rejected, Trial, apart, check_agreement, hint, times

TORCH = "torch"
_SECONDS_OF_TIMING = 0.05
_GAIN = 0.97  # what is not faster by this much is noise


@dataclass
class Verdict:
    """The candidate to take (None: leave it to torch), why, and the seconds of each way where they were measured."""

    candidate: Candidate | None
    reason: str
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def gain_us(self) -> float:
        if self.candidate is None or TORCH not in self.seconds:
            return 0.0
        return (self.seconds[TORCH] - self.seconds[self.candidate.name]) * 1e6


_remembered: dict[Any, tuple[str | None, str, dict[str, float]]] = {}


def forget() -> None:
    """Forgets all measurements of this process."""
    _remembered.clear()


class Chooser:
    """Decides within the budget of one graph."""

    def __init__(self, region: Region, settings: Settings) -> None:
        self.region, self.settings = region, settings
        self.end = time.perf_counter() + settings.budget_seconds

    def decide(self, match: Match) -> Verdict:
        if match.pattern == "empty_cat":
            return Verdict(match.candidates[0], "a copy less")
        key = self._key(match)
        if key not in _remembered:
            if self.settings.choose == "timed" and time.perf_counter() > self.end:
                return Verdict(None, "no time was left to measure it")
            found = apart(lambda: self._measure(match), _device(match))
            _remembered[key] = (found.candidate.name if found.candidate else None, found.reason, found.seconds)
        name, reason, seconds = _remembered[key]
        return Verdict(next((one for one in match.candidates if one.name == name), None), reason, seconds)

    def _key(self, match: Match) -> Any:
        nodes = [node for one in match.nodes for node in one.all_input_nodes if node not in match.nodes]
        graph = tuple((str(node.target), _plain(node.args), _plain(node.kwargs)) for node in match.nodes)
        inputs = tuple(_described(node, node in self.region.differentiable) for node in nodes)
        names = tuple(one.name for one in match.candidates)
        inductor = sorted(
            one for one in self.settings.inductor.items() if one[0] != "triton.cudagraphs"
        )  # not in trials
        compiler = (self.settings.choose, str(self.settings.inner), str(inductor))
        return (match.pattern, match.detail, match.key, graph, inputs, names, compiler)

    def _measure(self, match: Match) -> Verdict:
        try:
            trial = Trial(self.region, match, self.settings)
            runs = {TORCH: trial.reference()}
            expected = runs[TORCH]()
        except Exception as error:
            return Verdict(None, f"it cannot be tried: {_short(error)}")
        problems = []
        for candidate in match.candidates:
            try:
                run = trial.candidate(candidate)
                check_agreement(expected, run())
                runs[candidate.name] = run
            except Exception as error:
                problems.append(f"{candidate.name} {_short(error)}")
                continue
            if self.settings.choose == "always":
                return Verdict(candidate, "taken without a timing, as asked")
        if len(runs) == 1:
            return Verdict(None, "; ".join(problems))
        return self._timed(match, runs)

    def _timed(self, match: Match, runs: Any) -> Verdict:
        try:
            seconds = times(runs, _device(match), _SECONDS_OF_TIMING)
        except Exception as error:
            return Verdict(None, f"it cannot be timed: {_short(error)}")
        shown = ", ".join(f"{name} {taken * 1e6:.1f} us" for name, taken in seconds.items())
        best = min(seconds, key=lambda name: seconds[name])
        if best == TORCH or seconds[best] > _GAIN * seconds[TORCH]:
            return Verdict(None, f"not faster: {shown}", seconds)
        return Verdict(next(one for one in match.candidates if one.name == best), f"faster: {shown}", seconds)


def _device(match: Match) -> torch.device:
    return next(one.device for one in map(value, match.outputs) if isinstance(one, Tensor))


def _short(error: Exception) -> str:
    text = str(error).strip().splitlines()
    first = text[0] if text else ""
    return first if isinstance(error, Rejected) else f"raises {type(error).__name__}: {first}"[:300]


def _plain(given: Any) -> str:
    """Arguments as text, nodes left out."""
    return str(
        fx.node.map_arg(given, lambda node: hint(value(node)) if not isinstance(value(node), Tensor) else "tensor")
    )


def _described(node: Node, wants_gradient: bool) -> Any:
    fake = value(node)
    if not isinstance(fake, Tensor):
        return hint(fake)
    sizes = tuple(hint(size) for size in fake.shape), tuple(hint(stride) for stride in fake.stride())
    name = torch.cuda.get_device_name(fake.device) if fake.is_cuda else fake.device.type
    return (*sizes, str(fake.dtype), name, wants_gradient)
