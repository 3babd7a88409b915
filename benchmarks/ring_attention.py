"""Long attention on one device: a ring of eight taken in turn against one call, and a million tokens.

    python benchmarks/ring_attention.py [--quick] [--only ring] [--device cuda] [--output FILE]

`ring`: 131,072 tokens, 16 heads of 128, causal: what eight members of a zigzag ring compute, one after another on this
device, without their communication, against one call; and the largest difference of both from fp32 on sampled queries.
Then the same of the backward, with the fp32 sums that go round added up as members do, and how far both are apart.
`million`: 1,048,576 tokens, 4 heads, causal forward: TFLOP/s against 16,384 tokens, memory beyond inputs and output.
TFLOP/s count half of 4 * queries * keys * size a head. --quick is 32 times shorter, for a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from kernel_pytorch._ops.attention import attention_options
from kernel_pytorch.attention.distributed._exchange import GRADIENTS
from kernel_pytorch.attention.distributed._function import (
    Call,
    backward_pieces,
    forward_pieces,
    key_pieces,
)
from kernel_pytorch.attention.distributed._pieces import Bounds, Piece, pieces_of
from kernel_pytorch.functional import attention
from torch import Tensor
from torch_norms import describe_machine

MEMBERS, SIZE = 8, 128


def seconds_of(work: Callable[[], Any], device: torch.device, turns: int) -> float:
    """The median of several turns, after a warm one."""
    times = []
    for turn in range(turns + 1):
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        if turn:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class InTurn:
    """The members of a zigzag ring, one after another on one device: [1, tokens, heads, size] causal."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        self.rows = query.shape[1] // MEMBERS
        self.pieces = [pieces_of("zigzag", member, MEMBERS, self.rows) for member in range(MEMBERS)]
        self.options = attention_options(query, key, layout="bshd", causal=True)
        self.queries, self.keys, self.values = (self.cut(tensor) for tensor in (query, key, value))

    def cut(self, tensor: Tensor) -> list[Tensor]:
        """What each member holds."""
        return [torch.cat([tensor.narrow(1, run.first, run.length) for run in pieces], 1) for pieces in self.pieces]

    def join(self, parts: list[Tensor]) -> Tensor:
        runs = [
            (run.first, part.narrow(1, run.start, run.length))
            for pieces, part in zip(self.pieces, parts, strict=True)
            for run in pieces
        ]
        return torch.cat([rows for _, rows in sorted(runs, key=lambda run: run[0])], 1)

    def call(self, member: int, exchange: Any = None) -> Call:
        keys = key_pieces("zigzag", MEMBERS, self.rows, None)
        return Call(exchange, "zigzag", self.options, Bounds(None, 0, 0), self.pieces[member], keys)

    def forward(self) -> list[tuple[Tensor, Tensor]]:
        """Output and lse of every member."""
        results = []
        for member, query in enumerate(self.queries):

            def blocks(member: int = member) -> Iterator[tuple[list[Piece], Tensor, Tensor]]:
                for step in range(MEMBERS):
                    source = (member - step) % MEMBERS
                    yield self.pieces[source], self.keys[source], self.values[source]

            mine = (self.keys[member], self.values[member])
            output, lse = forward_pieces(self.call(member), query, *mine, blocks=blocks())
            results.append((output.to(query.dtype), lse))
        return results

    def backward(self, results: list[tuple[Tensor, Tensor]], gradients: list[Tensor]) -> list[list[Tensor]]:
        """Gradients of queries, of keys and of values, of every member."""
        neighbours = _Neighbours(self)
        of_queries = []
        for member, (output, lse) in enumerate(results):
            neighbours.member, neighbours.step = member, 0
            own = (self.queries[member], self.keys[member], self.values[member], output, lse, None, None, [])
            found, _ = backward_pieces(self.call(member, neighbours), own, gradients[member], None, (False, False, 0))
            of_queries.append(found.query.to(output.dtype))
        pairs = [sums.chunk(2) for sums in neighbours.sums if sums is not None]
        shape, dtype = self.keys[0].shape, self.keys[0].dtype
        return [of_queries, *([one.view(shape).to(dtype) for one in tensors] for tensors in zip(*pairs, strict=True))]


class _Neighbours:
    """What a ring's member asks of its neighbours, from this device's memory: keys, and sums of their gradients."""

    size = MEMBERS

    def __init__(self, ring: InTurn) -> None:
        self.member = self.step = 0
        self.sent = [torch.cat([k.reshape(-1), v.reshape(-1)]) for k, v in zip(ring.keys, ring.values, strict=True)]
        self.sums: list[Tensor | None] = [None] * MEMBERS

    def shift(self, tensor: Tensor, tag: int = 0) -> _Neighbours._Arrived:
        if tag != GRADIENTS:
            return self._Arrived(self.sent[(self.member - self.step - 1) % MEMBERS])
        block = (self.member - self.step) % MEMBERS
        if self.step == 0 and (before := self.sums[block]) is not None:
            tensor = tensor.add_(before)
        self.sums[block] = tensor
        self.step += 1
        after = self.sums[(block - 1) % MEMBERS]
        return self._Arrived(torch.zeros_like(tensor) if after is None else after)

    class _Arrived:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

        def wait(self) -> Tensor:
            return self.tensor


def error_on_samples(output: Tensor, query: Tensor, key: Tensor, value: Tensor) -> float:
    """The largest difference from fp32 of some queries of the first head."""
    places = torch.linspace(0, query.shape[1] - 1, 64, device=query.device).long()
    scores = query[0, places, 0].float() @ key[0, :, 0].float().T * SIZE**-0.5
    scores.masked_fill_(torch.arange(key.shape[1], device=query.device)[None] > places[:, None], float("-inf"))
    expected = scores.softmax(-1) @ value[0, :, 0].float()
    return float((output[0, places, 0].float() - expected).abs().max())


def inputs(tokens: int, heads: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, tokens, heads, SIZE, device=device, dtype=dtype) for _ in range(3)]


def medians(works: dict[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
    """Seconds of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(3):
        for name, work in works.items():
            times[name].append(seconds_of(work, device, 2))
    return {name: statistics.median(values) for name, values in times.items()}


def row_of(what: str, seconds: dict[str, float], **more: float) -> dict[str, Any]:
    one, other = seconds["one"], seconds["ring"]
    return {
        "what": what,
        "one_call_ms": one * 1e3,
        "ring_ms": other * 1e3,
        "ours": f"{other * 1e3:.1f} ms, {other / one:.3f}x one call",
        "torch": "",
        "ratio": other / one,
        **more,
    }


def ring(device: torch.device, dtype: torch.dtype, shrink: int) -> Iterator[dict[str, Any]]:
    tensors = inputs(131072 // shrink, 16 if shrink == 1 else 2, device, dtype)
    members = InTurn(*tensors)
    works = {"one": lambda: attention(*tensors, layout="bshd", causal=True), "ring": members.forward}
    name = f"ring of {MEMBERS} in turn, zigzag, {tensors[0].shape[1]} tokens"
    seconds = medians(works, device)
    joined = members.join([output for output, _ in members.forward()])
    errors = {"error_one_call": works["one"](), "error_ring": joined}
    yield row_of(name, seconds, **{key: error_on_samples(output, *tensors) for key, output in errors.items()})

    leaves = [tensor.requires_grad_() for tensor in tensors]
    output = attention(*leaves, layout="bshd", causal=True)
    gradient = torch.randn_like(output)
    results, gradients = members.forward(), members.cut(gradient)
    works = {
        "one": lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True),
        "ring": lambda: members.backward(results, gradients),
    }
    seconds = medians(works, device)
    differences = {}
    for letter, one, parts in zip("qkv", works["one"](), works["ring"](), strict=True):
        other = members.join(parts)
        differences[f"difference_d{letter}"] = float((one - other).norm() / one.norm())
    yield row_of(f"{name}, backward", seconds, **differences)


def million(device: torch.device, dtype: torch.dtype, shrink: int) -> Iterator[dict[str, Any]]:
    rates, beyond = {}, 0.0
    for tokens in (16384 // shrink, 1048576 // shrink):
        tensors = inputs(tokens, 4, device, dtype)
        flops = 2.0 * tokens * tokens * SIZE * 4
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device)
        seconds = seconds_of(lambda tensors=tensors: attention(*tensors, layout="bshd", causal=True), device, 2)
        rates[tokens] = flops / seconds / 1e12
        if device.type == "cuda":
            own = 4 * tensors[0].nbytes
            beyond = max(torch.cuda.max_memory_allocated(device) - held - tensors[0].nbytes, 0) / own
    short, long = rates.values()
    yield {
        "what": f"{1048576 // shrink} tokens causal forward, 4 heads",
        "tflops_16k": short,
        "tflops_1m": long,
        "ours": f"{long:.3g} TFLOP/s, {long / short:.3f}x of 16,384; {beyond:.1%} of memory beyond",
        "torch": "",
        "ratio": long / short,
        "memory_beyond": beyond,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=("ring", "million"))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    run: dict[str, Any] = {"machine": describe_machine(device), "figures": []}
    for part in (ring, million) if arguments.only is None else ({"ring": ring, "million": million}[arguments.only],):
        for row in part(device, dtype, 32 if arguments.quick else 1):
            run["figures"].append(row)
            print(json.dumps(row), flush=True)
            if arguments.output is not None:
                arguments.output.write_text(json.dumps({"benchmark": "ring_attention", "runs": [run]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
