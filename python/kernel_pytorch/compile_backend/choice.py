"""Whether a match is replaced, and by what: measured once for its pattern, shapes, types and device, and remembered."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from .cluster import cluster
from .model import Candidate, Match, Region
from .nodes import Node, inputs_of, value
from .settings import Settings
from .trial import Rejected, Time, Trial, apart, check_agreement, hint, own_random_numbers, times

TORCH = "torch"
_SECONDS_OF_TIMING = 0.05
_GAIN = 0.03  # of the time: as much is a gain by itself
_LEAST_GAIN = 5e-6  # seconds: less of a long part is a gain from here on, and
_ERRORS = 4  # where it is as many standard errors
_LONGER = 8  # times as long, where noise hides whether it is,
_TURNS = 44  # and in as many turns at least: half the error of the first ones
_NO_TIME = "no time was left to measure it"


@dataclass
class Verdict:
    """The candidate to take (None: leave it to torch), why, and the times of each way where they were measured."""

    candidate: Candidate | None
    reason: str
    times: dict[str, Time] = field(default_factory=dict)

    @property
    def gain_us(self) -> float:
        if self.candidate is None or TORCH not in self.times:
            return 0.0
        return (self.times[TORCH].device - self.times[self.candidate.name].device) * 1e6


@dataclass
class Measured:
    """What a trial found: the times of the ways that agree, why others do not, or why there is none at all."""

    times: dict[str, Time] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    taken: str = ""  # without a timing, as asked


_remembered: dict[Any, Measured] = {}


class _Late(Exception):
    """The budget ended within a match."""


def forget() -> None:
    """Forgets all measurements of this process."""
    _remembered.clear()


class Chooser:
    """Decides within the budget of one graph."""

    def __init__(self, region: Region, settings: Settings) -> None:
        self.region, self.settings = region, settings
        self.end = time.perf_counter() + settings.budget(bool(region.differentiable))

    def decide(self, match: Match) -> Verdict:
        if match.pattern == "empty_cat":
            return Verdict(match.candidates[0], "a copy less")
        neighbours = cluster(self.region.graph, match.nodes)
        key = self._key(match, neighbours)
        if key not in _remembered:
            try:
                _remembered[key] = apart(lambda: self._measure(match, neighbours), _device(match))
            except _Late:
                return Verdict(None, _NO_TIME)
        found = _remembered[key]
        name, reason = self._chosen(found)
        reason = "; ".join([reason] * bool(reason) + found.problems)
        return Verdict(next((one for one in match.candidates if one.name == name), None), reason, found.times)

    def _chosen(self, found: Measured) -> tuple[str, str]:
        """The name of the candidate that is taken, or "", and why."""
        if found.taken:
            return found.taken, "taken without a timing, as asked"
        if TORCH not in found.times:
            return "", ""
        plain = found.times[TORCH]
        shown = ", ".join(f"{name} {one}" for name, one in found.times.items())
        faster = [name for name, one in found.times.items() if name != TORCH and _is_faster(plain, one)]
        if not faster:
            return "", f"not faster: {shown}"
        if not self.settings.inductor.get("triton.cudagraphs"):
            faster = [name for name in faster if _keeps_host_time(plain, found.times[name])]
            if not faster:
                return "", f"faster, but the host takes longer by more than that: {shown}"
        return min(faster, key=lambda name: found.times[name].device), f"faster: {shown}"

    def _key(self, match: Match, neighbours: list[Node]) -> Any:
        graph = tuple((str(node.target), _plain(node.args), _plain(node.kwargs)) for node in neighbours)
        inside = tuple(neighbours.index(node) for node in match.nodes)
        inputs = tuple(_described(node, node in self.region.differentiable) for node in inputs_of(neighbours))
        names = tuple(one.name for one in match.candidates)
        inductor = sorted(one for one in self.settings.inductor.items() if one[0] != "triton.cudagraphs")  # of no trial
        compiler = (self.settings.choose, str(self.settings.inner), str(inductor))
        return (match.pattern, match.detail, match.key, graph, inside, inputs, names, compiler)

    def _is_late(self) -> bool:
        return self.settings.choose == "timed" and time.perf_counter() > self.end

    def _measure(self, match: Match, neighbours: list[Node]) -> Measured:
        with own_random_numbers(_device(match)) as begin_anew:
            return self._measured(match, neighbours, begin_anew)

    def _measured(self, match: Match, neighbours: list[Node], begin_anew: Callable[[], None]) -> Measured:
        if self._is_late():
            raise _Late
        try:
            trial, reference, expected = self._reference(match, neighbours, begin_anew)
        except Exception as error:
            return Measured(problems=[f"it cannot be tried: {_short(error)}"])
        runs = {TORCH: reference}
        problems = []
        for candidate in match.candidates:
            if candidate.otherwise and len(runs) > 1:
                continue
            if self._is_late():
                if len(runs) == 1:
                    raise _Late
                problems.append(f"no time was left for {candidate.name}")
                break  # what has been compiled is worth a timing
            try:
                run = trial.candidate(candidate)
                begin_anew()
                found = run() if not match.is_random else trial.candidate(candidate, without_dropout=True)()
                check_agreement(expected, found, trial.narrowest)
                runs[candidate.name] = run
            except Exception as error:
                problems.append(f"{candidate.name} {_short(error)}")
                continue
            if self.settings.choose == "always":
                return Measured(problems=problems, taken=candidate.name)
        if len(runs) == 1:
            return Measured(problems=problems)
        try:
            found = times(runs, _device(match), _SECONDS_OF_TIMING)
            if any(_is_undecided(found[TORCH], one) for name, one in found.items() if name != TORCH):
                found = times(runs, _device(match), _LONGER * _SECONDS_OF_TIMING, _TURNS)
            return Measured(found, problems)
        except Exception as error:
            return Measured(problems=[f"it cannot be timed: {_short(error)}", *problems])

    def _reference(self, match: Match, neighbours: list[Node], begin_anew: Callable[[], None]) -> Any:
        """The trial with its neighbours; of the match alone where they make no numbers of random values."""
        for nodes in (neighbours, match.nodes):
            trial = Trial(self.region, match, nodes, self.settings)
            reference = trial.reference()
            begin_anew()
            expected = reference() if not match.is_random else trial.reference(without_dropout=True)()
            if len(nodes) == len(match.nodes) or all(bool(torch.isfinite(one).all()) for one in expected):
                break
        return trial, reference, expected


def _is_faster(plain: Time, found: Time) -> bool:
    """Whether the gain is no noise. What gains little of a long part, such as one with products, gains as much as a
    short one.
    """
    gain = plain.device - found.device
    return gain >= _GAIN * plain.device or (gain >= _LEAST_GAIN and 0 < _ERRORS * found.noise <= gain)


def _is_undecided(plain: Time, found: Time) -> bool:
    """Whether it would be a gain if there were less noise: a few turns of a long part may be too few."""
    return not _is_faster(plain, found) and plain.device - found.device >= max(_LEAST_GAIN, found.noise)


def _keeps_host_time(plain: Time, found: Time) -> bool:
    """Without CUDA graphs a model may wait for its host: it must not take longer by more than the device gains."""
    return found.host - plain.host <= plain.device - found.device


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
