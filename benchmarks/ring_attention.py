"""Long attention on one device: a ring of eight taken in turn against one call, and a million tokens.

    python benchmarks/ring_attention.py [--quick] [--device cuda] [--output FILE]

`ring`: 131,072 tokens, 16 heads of 128, causal: what eight members of a zigzag ring compute, one after another on this
device, without their communication, against one call; and the largest difference of both from fp32 on sampled queries.
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
from kernel_pytorch._ops.attention import option_arguments
from kernel_pytorch.attention.distributed._function import Call, PartOptions, forward_pieces, key_pieces
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


def ring_in_turn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What the members of a zigzag ring compute, one after another: [1, tokens, heads, size] causal."""
    rows = query.shape[1] // MEMBERS
    members = [pieces_of("zigzag", member, MEMBERS, rows) for member in range(MEMBERS)]
    options = PartOptions(*option_arguments(query, key, layout="bshd", causal=True))

    def part(tensor: Tensor, pieces: list[Piece]) -> Tensor:
        return torch.cat([tensor.narrow(1, piece.first, piece.length) for piece in pieces], 1)

    keys, values = ([part(tensor, pieces) for pieces in members] for tensor in (key, value))
    output = torch.empty_like(query)
    for member, pieces in enumerate(members):

        def blocks(member: int = member) -> Iterator[tuple[list[Piece], Tensor, Tensor]]:
            for step in range(MEMBERS):
                source = (member - step) % MEMBERS
                yield members[source], keys[source], values[source]

        call = Call(None, "zigzag", options, Bounds(None, 0, 0), pieces, key_pieces("zigzag", MEMBERS, rows, None))
        mine = forward_pieces(call, part(query, pieces), keys[member], values[member], blocks=blocks())[0]
        for piece in pieces:
            output.narrow(1, piece.first, piece.length).copy_(mine.narrow(1, piece.start, piece.length))
    return output


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


def ring(device: torch.device, dtype: torch.dtype, shrink: int) -> dict[str, Any]:
    tensors = inputs(131072 // shrink, 16 if shrink == 1 else 2, device, dtype)
    results: dict[str, Tensor] = {}

    def one_call() -> None:
        results["one"] = attention(*tensors, layout="bshd", causal=True)

    def in_turn() -> None:
        results["ring"] = ring_in_turn(*tensors)

    times: dict[str, list[float]] = {"one": [], "ring": []}
    for _ in range(3):  # interleaved
        times["one"].append(seconds_of(one_call, device, 2))
        times["ring"].append(seconds_of(in_turn, device, 2))
    one, other = (statistics.median(times[name]) for name in ("one", "ring"))
    return {
        "what": f"ring of {MEMBERS} in turn, zigzag, {tensors[0].shape[1]} tokens",
        "one_call_ms": one * 1e3,
        "ring_ms": other * 1e3,
        "ours": f"{other * 1e3:.1f} ms, {other / one:.3f}x one call",
        "torch": "",
        "ratio": other / one,
        "error_one_call": error_on_samples(results["one"], *tensors),
        "error_ring": error_on_samples(results["ring"], *tensors),
    }


def million(device: torch.device, dtype: torch.dtype, shrink: int) -> dict[str, Any]:
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
    return {
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
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    run: dict[str, Any] = {"machine": describe_machine(device), "figures": []}
    for part in (ring, million):
        row = part(device, dtype, 32 if arguments.quick else 1)
        run["figures"].append(row)
        print(json.dumps(row))
        if arguments.output is not None:
            arguments.output.write_text(json.dumps({"runs": [run]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
