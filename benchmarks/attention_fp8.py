"""Our attention forward in FP8 against our own in bf16: times in turns, and both errors against fp64.

    python benchmarks/attention_fp8.py [--seconds S] [--only WORDS,...] [--configs] [--output FILE]

`fp8` rounds queries, keys and values on the way; `products` is what of it the kernel of the products takes (profiler),
`rounding` the other one. TFLOP/s count 4 * kept scores * head size, half of the square where causal. Errors are
relative: the root of mean squared differences to fp64 attention of the same inputs over the root of its mean square, of
one head, on normal numbers and on such where every 32nd column of queries and keys is ten times larger; `rotated` is
with incoherent processing. --configs times every config of the kernel.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure
import torch
from table import print_and_store
from torch_norms import describe_machine

from kernel_pytorch import functional, tuning

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    what: str
    batch: int
    heads: int
    tokens: int
    size: int = 128
    key_heads: int = 0
    causal: bool = True

    def flops(self) -> float:
        return 4.0 * self.batch * self.heads * self.tokens**2 * self.size * (0.5 if self.causal else 1)


CASES = [
    Case("D128 causal 8192", 2, 16, 8192),
    Case("D128 full 8192", 2, 16, 8192, causal=False),
    Case("D128 causal 16384", 1, 16, 16384),
    Case("D128 64/8 heads causal 8192", 2, 64, 8192, key_heads=8),
    Case("D64 causal 8192", 2, 32, 8192, 64),
    Case("D128 causal 2048", 8, 16, 2048),
]


def tensors_of(case: Case, device: torch.device) -> Tensors:
    def normal(heads: int) -> torch.Tensor:
        return torch.randn(case.batch, heads, case.tokens, case.size, device=device, dtype=torch.bfloat16)

    key_heads = case.key_heads or case.heads
    return normal(case.heads), normal(key_heads), normal(key_heads)


def error_of(output: torch.Tensor, exact: torch.Tensor) -> float:
    return ((output.double() - exact).pow(2).mean() / exact.pow(2).mean()).sqrt().item()


def errors(size: int, tokens: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Of one head, causal: ours in bf16 and in FP8, with and without a rotation, on plain and on uneven columns."""
    found: dict[str, Any] = {}
    for name, spread in (("normal", 1.0), ("outliers", 10.0)):
        query, key, value = (torch.randn(1, 1, tokens, size, device=device) for _ in range(3))
        for x in (query, key):
            x[..., :: size // 4] *= spread
        if spread > 1:
            query *= 0.3
        query, key, value = (x.to(dtype) for x in (query, key, value))
        scores = query.double() @ key.double().transpose(-1, -2) * size**-0.5
        scores.masked_fill_(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
        exact = scores.softmax(-1) @ value.double()
        found[name] = {
            "bf16": error_of(functional.attention(query, key, value, causal=True), exact),
            "fp8": error_of(functional.attention_fp8(query, key, value, causal=True), exact),
            "fp8 rotated": error_of(functional.attention_fp8(query, key, value, causal=True, rotate=True), exact),
        }
    return found


def kernel_times(call: Any) -> dict[str, float]:
    """Microseconds of each kernel of a call, by the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            call()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in profile.key_averages():
        kind = "rounding" if "round_operands" in event.key else "products" if "fp8" in event.key else ""
        if kind:
            times[kind] = times.get(kind, 0.0) + event.device_time_total / event.count
    return times


def configs_of(case: Case) -> list[str]:
    shape = (case.batch, case.heads, case.tokens, case.size)
    options = {"causal": int(case.causal), "key_heads": case.key_heads or case.heads}
    explained = tuning.explain("attention_fp8_forward", shape, "bf16", "cuda", **options)
    return [config for one in explained.candidates if one.kernel == "sm90_wgmma" for config in one.configs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="of timing, a way")
    parser.add_argument("--only", default="", help="words, separated by commas")
    parser.add_argument("--configs", action="store_true", help="every config of the kernel")
    parser.add_argument("--warm", action="store_true", help="compile and check, time nothing")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    words = [word for word in arguments.only.split(",") if word]
    figures = []
    with torch.no_grad():
        found = errors(128, 4096 if device.type == "cuda" else 512, device, torch.bfloat16)
        for name, line in found.items():
            print(name, {k: f"{v:.2e}" for k, v in line.items()}, flush=True)
        for case in CASES if device.type == "cuda" else []:
            if words and not any(word in case.what for word in words):
                continue
            tensors = tensors_of(case, device)
            ways: dict[str, measure.Way] = {
                "bf16": lambda i, t=tensors, c=case: functional.attention(*t, causal=c.causal),
                "fp8": lambda i, t=tensors, c=case: functional.attention_fp8(*t, causal=c.causal),
                "fp8 rotated": lambda i, t=tensors, c=case: functional.attention_fp8(*t, causal=c.causal, rotate=True),
            }
            if arguments.configs:
                for config in configs_of(case):

                    def way(i: int, config: str = config, t: Tensors = tensors, c: Case = case) -> object:
                        with tuning.overlay({"attention_fp8_forward": f"sm90_wgmma {config}"}):
                            return functional.attention_fp8(*t, causal=c.causal)

                    ways[config] = way
            if arguments.warm:
                for one in ways.values():
                    one(0)
                torch.cuda.synchronize()
                continue
            times = measure.compare(ways, 1, device, arguments.seconds)
            parts = kernel_times(lambda t=tensors, c=case: functional.attention_fp8(*t, causal=c.causal))
            torch.cuda.synchronize()
            base = times["bf16"].median_us
            line: dict[str, Any] = {
                "what": case.what,
                "bf16": f"{base:.1f} µs, {case.flops() / base / 1e6:.0f} TFLOP/s",
            }
            for name in list(ways)[1:]:
                us = times[name].median_us
                line[name] = f"{us:.1f} µs, {case.flops() / us / 1e6:.0f} TFLOP/s, {base / us:.2f}x"
            if parts:
                us = parts["products"]
                line["products"] = f"{us:.1f} µs, {case.flops() / us / 1e6:.0f} TFLOP/s, {base / us:.2f}x"
                line["rounding"] = f"{parts['rounding']:.1f} µs"
            figures.append(line)
            print(line, flush=True)
            ways.clear()
            del tensors
            torch.cuda.empty_cache()
    columns = list(dict.fromkeys(name for line in figures for name in line))
    figures = [{name: line.get(name, "") for name in columns} for line in figures]
    print_and_store(
        {"machine": describe_machine(device), "columns": columns, "figures": figures, "errors": found}, arguments.output
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
