"""The process of jax_ops.py that has torch: our ops from torch, timed in turns that the other process asks for.

A line of standard input is a request, a line of standard output its answer, both JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

from kernel_pytorch import functional

OPS = {
    "attention": lambda q, k, v: functional.attention(q, k, v, causal=True, layout="bshd"),
    "rms_norm": functional.rms_norm,
    "cross_entropy": functional.cross_entropy,
    "linear": functional.linear,
}


class Worker:
    def __init__(self, device: str) -> None:
        self.device = device
        self.function: Any = None
        self.buffers: list[Any] = []
        self.kept: list[Any] = []

    def tensor(self, op: str, shape: list[int]) -> torch.Tensor:
        if op == "cross_entropy" and len(shape) == 1:
            return torch.arange(shape[0], device=self.device)  # targets: as many rows as jax_cases' and in the table
        return torch.randn(shape, device=self.device).to(torch.bfloat16)

    def prepare(self, request: dict[str, Any]) -> bool:
        op = request["op"]
        self.function = OPS[op]
        self.buffers = [tuple(self.tensor(op, shape) for shape in request["shapes"]) for _ in range(request["buffers"])]
        self.kept = [None] * len(self.buffers)
        return True

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def turn(self, calls: int) -> float:
        self.wait()
        begin = time.perf_counter()
        with torch.no_grad():
            for i in range(calls):
                self.kept[i % len(self.buffers)] = self.function(*self.buffers[i % len(self.buffers)])
        self.wait()
        return time.perf_counter() - begin

    def trace(self, calls: int) -> list[tuple[str, float, float]]:
        """Name, begin and nanoseconds of what the device did in a turn."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.turn(calls)
        events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
        on_device = [event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA]
        return [(one.name(), one.start_ns(), one.duration_ns()) for one in on_device if "Sync" not in one.name()]


def main() -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print (the profiler does) is no answer
    worker = Worker(sys.argv[1])
    for line in sys.stdin:
        request = json.loads(line)
        if request["ask"] == "version":
            answer: Any = torch.__version__
        elif request["ask"] == "prepare":
            answer = worker.prepare(request)
        elif request["ask"] == "trace":
            answer = worker.trace(request["calls"])
        else:
            answer = worker.turn(request["calls"])
        print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
