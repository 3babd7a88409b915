"""The plan of `fit_memory` against every plan there is, on small random models: the part `planner` of memory.py.

A model is three blocks of three or four tensors, drawn at random: sizes, costs, what may move or be made again, what is
read when. Every treatment of every tensor of every block is tried, by a timeline of its own (that of
kernel_pytorch/plan/activation_plan.h, read again), at three budgets between the smallest peak and everything kept.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

from kernel_pytorch import _library

TREATMENTS = ("none", "keep", "move", "recompute")
LINK = {"to_host": 4e6, "to_device": 3e6}
BETWEEN = 20


def random_kind(draw: random.Random, count: int) -> dict[str, Any]:
    activations = []
    for i in range(count):
        one: dict[str, Any] = {"bytes": 1 + draw.randrange(100), "op": i - 1, "dies": i + draw.randrange(count)}
        one |= {"recompute_us": 0, "can_recompute": False, "can_move": draw.random() < 0.5, "inputs": []}
        if i > 0:
            one["recompute_us"], one["can_recompute"] = 1 + draw.randrange(10), draw.random() < 0.75
            one["inputs"] = sorted({draw.randrange(i) for _ in range(1 + (draw.random() < 0.33))})
        one["reads"] = sorted({draw.randrange(count + 1) for _ in range(draw.randrange(3))})
        activations.append(one)
    at = [draw.randrange(30) for _ in range(count + 1)]
    return {
        "activations": activations,
        "forward_us": 10 + draw.randrange(20),
        "backward_us": 20 + draw.randrange(40),
        "forward_bytes": [draw.randrange(150) for _ in range(count - 1)],
        "backward_at": at,
        "backward_greatest": [value + draw.randrange(30) for value in at],
    }


@dataclass
class Way:
    held: float
    moved: float
    recompute_us: float
    forward_peak: float
    backward_peak: float


def ways_of(kind: dict[str, Any]) -> list[Way]:
    """Every treatment of every tensor that leaves what backward needs, and nothing else."""
    found = []
    activations = kind["activations"]
    for how in itertools.product(TREATMENTS, repeat=len(activations)):
        needed = [bool(one["reads"]) for one in activations]
        for i in reversed(range(len(activations))):
            if how[i] == "recompute":
                for source in activations[i]["inputs"]:
                    needed[source] = True
        is_way = all(
            (treatment != "none") == need
            and (treatment != "move" or one["can_move"])
            and (treatment != "recompute" or one["can_recompute"])
            for treatment, need, one in zip(how, needed, activations, strict=True)
        )
        if is_way:
            found.append(timeline(kind, how))
    return found


def timeline(kind: dict[str, Any], how: tuple[str, ...]) -> Way:
    activations, events = kind["activations"], len(kind["backward_at"])
    stored = [i for i, treatment in enumerate(how) if treatment in ("keep", "move")]
    forward_peak = 0
    for op, others in enumerate(kind["forward_bytes"]):
        kept = sum(activations[i]["bytes"] for i in stored if activations[i]["dies"] <= op)
        forward_peak = max(forward_peak, others + kept)
    # Users before what they use: when each is made, last used, and no longer needed for anything that is made again.
    made = [min(one["reads"], default=events) for one in activations]
    last = [max(one["reads"], default=-1) for one in activations]
    until = list(last)
    for i in reversed(range(len(activations))):
        if how[i] == "recompute":
            for source in activations[i]["inputs"]:
                made[source], last[source] = min(made[source], made[i]), max(last[source], made[i])
                until[source] = max(until[source], until[i])
    alive = set(stored)
    greatest = size(activations, alive)
    for event in range(events):
        alive -= {i for i in alive if (until if i in stored else last)[i] < event}
        now = [i for i, treatment in enumerate(how) if treatment == "recompute" and made[i] == event]
        for i in now:  # ops in order; one that only serves others of this event goes after the last of them
            alive.add(i)
            greatest = max(greatest, kind["backward_at"][event] + size(activations, alive))
            alive -= {
                one
                for one in now
                if one < i and last[one] == event and not activations[one]["reads"] and one in alive
                and not any(one in activations[user]["inputs"] for user in now if user > i)
            }  # fmt: skip
        greatest = max(greatest, kind["backward_greatest"][event] + size(activations, alive))
        alive -= {i for i in now if last[i] == event and not activations[i]["reads"]}
    ops = {activations[i]["op"]: activations[i]["recompute_us"] for i, one in enumerate(how) if one == "recompute"}
    held, moved = (sum(activations[i]["bytes"] for i in stored if how[i] == one) for one in ("keep", "move"))
    return Way(held, moved, sum(ops.values()), forward_peak, greatest)


def size(activations: list[dict[str, Any]], alive: set[int]) -> int:
    return sum(activations[i]["bytes"] for i in alive)


def least_us(request: dict[str, Any], ways: list[list[Way]], budget: float) -> float:
    """Of all plans under the budget; infinite where there is none."""
    best = float("inf")

    def visit(block: int, held: float, us: float, before: Way | None) -> None:
        nonlocal best
        if us >= best:
            return
        if block == len(request["chain"]):
            best = us
            return
        place, is_last = request["chain"][block], block + 1 == len(request["chain"])
        kind = request["kinds"][place["kind"]]
        moving = before.moved if before is not None else 0
        for way in ways[place["kind"]]:
            if is_last and way.moved:
                continue
            peak = held + moving + max(
                place["forward_start"] + way.forward_peak, place["backward_start"] + way.backward_peak
            )  # fmt: skip
            if peak > budget or (is_last and BETWEEN + held + way.held > budget):
                continue
            stall = 0.0
            if moving:
                stall = max(0.0, moving / LINK["to_host"] * 1e6 - kind["forward_us"])
                stall += max(0.0, moving / LINK["to_device"] * 1e6 - kind["backward_us"] - way.recompute_us)
            visit(block + 1, held + way.held, us + way.recompute_us + stall, way)

    visit(0, 0, 0, None)
    return best


def run_planner(problems: int) -> dict[str, Any]:
    """Of plans at three budgets each: how many take the time of the best there is, the worst share of it, and how many
    models have a smaller peak than the plan's smallest."""
    draw = random.Random(7)
    equal = compared = 0
    worst, below_least = 1.0, 0
    for _ in range(problems):
        request: dict[str, Any] = {"kinds": [random_kind(draw, 4), random_kind(draw, 3)], "between": BETWEEN, **LINK}
        request["chain"] = [
            {"kind": draw.randrange(2), "forward_start": draw.randrange(40), "backward_start": draw.randrange(40)}
            for _ in range(3)
        ]
        ways = [ways_of(kind) for kind in request["kinds"]]
        free = _library.call("activation_plan", request={**request, "budget_bytes": 1e9})
        for share in (0.0, 0.3, 0.7):
            budget = free["least_bytes"] + share * (free["everything_bytes"] - free["least_bytes"])
            plan = _library.call("activation_plan", request={**request, "budget_bytes": budget})
            least = least_us(request, ways, budget)
            compared += 1
            is_equal = bool(plan["fits"]) and abs(plan["step_us"] - least) < 1e-6
            equal += is_equal
            worst = min(worst, 1.0 if is_equal else least / plan["step_us"] if plan["fits"] else 0.0)
        below_least += least_us(request, ways, free["least_bytes"] - 1.5) < float("inf")
    return {"plans": compared, "equal": equal, "worst": worst, "smaller_peaks_found": below_least}
