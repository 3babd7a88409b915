"""A measured step as the plan is asked for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ._activations import BlockCall, BlockTreatment, Session
from ._float8 import microseconds_per_byte
from ._host import measure_link
from ._measure import BlockReads, BlockTrace, Reading, Tracing
from ._meter import Counting, Meter, tensors_of
from ._step import Step, installed

_SMALLEST_CODE = 4096  # bytes on a CPU
_DECODES = 4  # times the cost of coding from which on an op is not run again but its result coded
_SMALLEST_MOVE = 1 << 20  # bytes on a GPU: a copy has a fixed cost


@dataclass
class Measured:
    request: dict[str, Any]
    traces: list[BlockTrace]
    kinds: list[int]  # by block of the chain
    numbers: list[list[int]]  # by kind: of the trace's storages, those that the plan knows
    blocks: dict[str, nn.Module]


def _trace(step: Step, blocks: dict[str, nn.Module]) -> Tracing:
    meter = Meter(step.device, tensors_of(step.model, (step.args, step.kwargs)))
    tracing = Tracing(meter)
    with installed(blocks, tracing.run), tracing:
        output = step.forward()
    del output
    tracing.finish()
    return tracing


def measure_step(
    step: Step, blocks: dict[str, nn.Module], move: bool, recompute: bool, float8: bool = False
) -> Measured:
    tracing = _trace(step, blocks)  # the first forward of a process measures the making of its kernels as well
    called = [trace.name for trace in tracing.traces]
    blocks = {name: block for name, block in blocks.items() if called.count(name) == 1}  # twice in a step: left alone
    tracing = _trace(step, blocks)
    traces = tracing.traces
    if not recompute:
        for trace in traces:
            for one in trace.made:
                one.can_recompute = False
    session = Session()
    again = {trace.name: trace.treatment(trace.everything_again(), with_codes=False) for trace in traces}
    meter = Meter(step.device, tensors_of(step.model, (step.args, step.kwargs)))
    reading = session.listener = Reading(meter)
    with installed(blocks, runner(again, session)):
        with Counting(meter):
            step.run()
        session.listener = None
        again_ms = step.milliseconds()
    reads = reading.finish()
    kinds: dict[Any, int] = {}
    of_block = [
        kinds.setdefault((trace.signature(), tuple(map(tuple, one.numbers))), len(kinds))
        for trace, one in zip(traces, reads, strict=True)
    ]
    us_per_byte = microseconds_per_byte(step.device) if float8 else None
    recomputed_us = 0.0
    described, numbers = [], []
    for kind in range(len(kinds)):
        members = [place for place, one in enumerate(of_block) if one == kind]
        times = [min(times) for times in zip(*(traces[place].microseconds for place in members), strict=True)]
        trace = traces[members[0]]
        for place in members:
            _choose_codes(traces[place], times, us_per_byte, step.device)
        numbers.append(trace.numbers())
        described.append(_describe(trace, reads[members[0]], numbers[-1], times, step.device, us_per_byte or 0))
        ran = {trace.made[number].op for number, how in trace.everything_again().items() if how == "recompute"}
        recomputed_us += len(members) * sum(times[op] for op in ran)
    to_host, to_device = measure_link(step.device) if move and len(traces) > 1 else (0.0, 0.0)
    request = {
        "kinds": described,
        "chain": [
            {"kind": kind, "forward_start": trace.start, "backward_start": one.start}
            for kind, trace, one in zip(of_block, traces, reads, strict=True)
        ],
        "between": reading.between,
        "outside": tracing.outside,
        "to_host": to_host,
        "to_device": to_device,
        "step_us": max(again_ms * 1e3 - recomputed_us, 0.0),
    }
    return Measured(request, traces, of_block, numbers, blocks)


def _choose_codes(trace: BlockTrace, times: list[float], us_per_byte: float | None, device: torch.device) -> None:
    """FP8 is for large tensors whose op costs far more than decoding."""
    least = _SMALLEST_MOVE if device.type == "cuda" else _SMALLEST_CODE
    for one in trace.made:
        is_cheap = one.can_recompute and times[one.op] < _DECODES * (us_per_byte or 0) * one.bytes
        if us_per_byte is None or is_cheap or one.bytes < least:
            one.code_bytes = 0


def _describe(
    trace: BlockTrace,
    reads: BlockReads,
    numbers: list[int],
    times: list[float],
    device: torch.device,
    us_per_byte: float,
) -> dict[str, Any]:
    place_of = {number: place for place, number in enumerate(numbers)}
    least = _SMALLEST_MOVE if device.type == "cuda" else 1
    activations: list[dict[str, Any]] = []
    decodings = 0  # each an op of its own behind those of the block
    for number in numbers:
        one = trace.made[trace.coded(number)]
        if number >= len(trace.made):  # codes: stored, or not there
            size = _rounded(one.code_bytes, device)
            movable = {"can_move": one.can_move and size >= least, "can_recompute": False}
            activations.append({"bytes": size, "op": max(one.op, 0), "dies": max(one.op, 0) + 1, **movable})
            continue
        if one.code_bytes:
            activations.append(
                {
                    "bytes": _rounded(one.bytes, device),
                    "op": len(trace.ops) + decodings,
                    "dies": one.dies if one.dies >= 0 else len(trace.ops),
                    "recompute_us": us_per_byte * one.bytes,
                    "can_recompute": True,
                    "inputs": [place_of[trace.codes_of(number)]],
                    "reads": [event for event, read in enumerate(reads.numbers) if number in read],
                }
            )
            decodings += 1
            continue
        activations.append(
            {
                "bytes": _rounded(one.bytes, device),
                "op": one.op,
                "dies": one.dies if one.dies >= 0 else len(trace.ops),
                "recompute_us": times[one.op] if one.op >= 0 else 0,
                "can_recompute": one.can_recompute,
                "can_move": one.can_move and one.bytes >= least,
                "inputs": [place_of[i] for i in one.inputs] if one.can_recompute else [],
                "reads": [event for event, read in enumerate(reads.numbers) if number in read],
            }
        )
    return {
        "activations": activations,
        "forward_us": sum(times),
        "backward_us": 2 * sum(times),  # as a rule: each product has two in backward
        "forward_bytes": [*trace.bytes, *[0] * decodings],
        "backward_at": reads.at,
        "backward_greatest": reads.greatest,
    }


def _rounded(size: int, device: torch.device) -> int:
    return -(-size // 512) * 512 if device.type == "cuda" else size


def runner(treatments: dict[str, BlockTreatment], session: Session) -> Callable[..., Any]:
    def run(name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return BlockCall(name, treatments[name], session).run(forward, args, kwargs)

    return run
