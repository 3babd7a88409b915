"""A synthetic trace through an engine: when requests come, how long they are, and when their tokens come out."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .engine import Engine
from .requests import Sampling


@dataclass
class Arrival:
    """A request of a trace, and what became of it; times in seconds from the beginning."""

    at: float
    prompt: int  # tokens
    new: int
    came: list[float] = field(default_factory=list)  # when each new token did

    @property
    def first_token(self) -> float:
        """From its arrival to its first token."""
        return self.came[0] - self.at

    @property
    def per_token(self) -> float | None:
        """Between tokens, on average; None of a single one."""
        return (self.came[-1] - self.came[0]) / (len(self.came) - 1) if len(self.came) > 1 else None


def _zipf(generator: random.Random, longest: int, exponent: float = 1.1) -> int:
    """1 to longest: many short ones, few long ones, a multiple of 1/16 of the longest (Zipf's law over 16 sizes)."""
    sizes = range(1, 17)
    (size,) = generator.choices(sizes, [rank**-exponent for rank in sizes])
    return max(1, longest * size // 16 - generator.randrange(max(1, longest // 16)))


def make_trace(requests: int, rate: float, prompt: int, new: int, seed: int) -> list[Arrival]:
    """Poisson arrivals (`rate` a second; 0: all at once) of prompts and outputs of Zipf's lengths."""
    generator = random.Random(seed)
    now, trace = 0.0, []
    for _ in range(requests):
        now += generator.expovariate(rate) if rate > 0 else 0.0
        trace.append(Arrival(now, _zipf(generator, prompt), _zipf(generator, new)))
    return trace


def serve_trace(engine: Engine, trace: Sequence[Arrival], seed: int) -> float:
    """Lets the requests come at their times and fills in when tokens came; the seconds that all took."""
    generator = random.Random(seed)
    prompts = [[generator.randrange(engine.vocabulary) for _ in range(arrival.prompt)] for arrival in trace]
    numbers: dict[int, Arrival] = {}
    begin = time.perf_counter()
    next_one = 0

    def arrive() -> None:
        nonlocal next_one
        while next_one < len(trace) and trace[next_one].at <= time.perf_counter() - begin:
            arrival = trace[next_one]
            number = engine.add(prompts[next_one], Sampling(max_new_tokens=arrival.new), note)
            numbers[number] = arrival
            next_one += 1

    def note(number: int, _: int) -> None:
        numbers[number].came.append(time.perf_counter() - begin)

    engine.poll = arrive
    try:
        while next_one < len(trace) or engine.is_busy:
            arrive()
            if engine.is_busy:
                engine.step()
            else:
                time.sleep(max(0.0, min(0.05, trace[next_one].at - (time.perf_counter() - begin))))
    finally:
        engine.poll = None
    for number in numbers:
        engine.completion(number)
    return time.perf_counter() - begin


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    shares = {"median": 0.5, "p90": 0.9, "p99": 0.99} if ordered else {}
    return {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in shares.items()}


def figures(trace: Sequence[Arrival], seconds: float) -> dict[str, Any]:
    new = sum(len(arrival.came) for arrival in trace)
    read = sum(arrival.prompt for arrival in trace)
    each = [arrival.per_token for arrival in trace if arrival.per_token is not None]
    return {
        "requests": len(trace),
        "seconds": seconds,
        "prompt_tokens": read,
        "new_tokens": new,
        "new_tokens_per_second": new / seconds,
        "tokens_per_second": (new + read) / seconds,
        "first_token_seconds": _quantiles([arrival.first_token for arrival in trace]),
        "seconds_per_token": _quantiles(each),
    }
