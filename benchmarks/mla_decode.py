"""Attention over latent rows of a paged cache (MLA): against torch's two products and softmax on rows in one piece.

    python benchmarks/mla_decode.py [--device cpu|cuda] [--seconds S] [--only WORDS,...] [--alone] [--output FILE]

A row is a batch of requests with a key of 576 numbers each (512 latent, 64 rope), or 656 bytes with the latent row in
e4m3. "torch, dense" has the rows without pages, in the query's type: what a caller without such a kernel does after
gathering. Ways take turns (measure.py), on a GPU as CUDA graphs.
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

from kernel_pytorch import functional

SCALE = 192**-0.5


@dataclass(frozen=True)
class Case:
    what: str
    requests: int
    keys: int
    heads: int
    codes: bool = False
    top: int = 0
    queries: int = 1


CASES = [
    Case("16 heads, B128 S8192", 128, 8192, 16),
    Case("16 heads, B128 S8192, 656 bytes a token", 128, 8192, 16, codes=True),
    Case("32 heads, B128 S8192", 128, 8192, 32),
    Case("128 heads, B128 S8192", 128, 8192, 128),
    Case("128 heads, B1 S32768", 1, 32768, 128),
    Case("128 heads, B128 S8192, 656 bytes a token", 128, 8192, 128, codes=True),
    Case("128 heads, B128, 2 queries, top 2048 of S8192, 656 bytes a token", 128, 8192, 128, True, 2048, 2),
]
CPU_CASES = [Case("16 heads, B2 S1024", 2, 1024, 16), Case("16 heads, B2 S1024, 656 bytes", 2, 1024, 16, codes=True)]
PAGE = 64


def ways_of(case: Case, dtype: torch.dtype, device: torch.device) -> tuple[dict[str, Any], int, int]:
    pages = case.requests * case.keys // PAGE
    tables = torch.randperm(pages, device=device).to(torch.int32).view(case.requests, -1)
    lengths = torch.full((case.requests,), case.keys, dtype=torch.int32, device=device)
    query = torch.randn(case.requests * case.queries, case.heads, 576, device=device, dtype=dtype)
    cache = torch.randn(pages, PAGE, 576, device=device, dtype=dtype)
    dense = cache[tables.long()].view(case.requests, case.keys, 576)
    if case.codes:
        scale = torch.ones(pages, PAGE, 4, device=device)
        parts = (cache[..., :512].to(torch.float8_e4m3fn), scale, cache[..., 512:].contiguous())
        cache = torch.cat([part.view(torch.uint8) for part in parts], -1)
    rows = query.view(case.requests, case.queries * case.heads, 576)
    seen = case.requests * (case.top * case.queries if case.top else case.keys)
    flops = 2 * seen * case.heads * (1 if case.top else case.queries) * (576 + 512)
    if case.top:
        slots = torch.randint(pages * PAGE, (query.shape[0], case.top), device=device, dtype=torch.int32)
        return (
            {"ours": lambda i: functional.mla_decode(query, cache, indices=slots, scale=SCALE)},
            seen * cache.shape[-1] * cache.element_size(),
            flops,
        )

    def plain(i: int) -> torch.Tensor:
        return torch.softmax(rows @ dense.transpose(1, 2) * SCALE, -1) @ dense[..., :512]

    ways: dict[str, Any] = {
        "ours": lambda i: functional.mla_decode(query, cache, tables, lengths, scale=SCALE),
        "torch, dense": plain,
    }
    if not case.codes:
        error = (ways["ours"](0).view(rows.shape[0], -1, 512).float() - plain(0).float()).abs().max().item()
        assert error < 0.05, f"{case.what}: off by {error}"
    return ways, seen * cache.shape[-1] * cache.element_size(), flops


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=0.5, help="of timing, a way")
    parser.add_argument("--only", default="", help="words, separated by commas")
    parser.add_argument("--alone", action="store_true", help="check against torch, but time only ours")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    words = [word for word in arguments.only.split(",") if word]
    figures = []
    with torch.no_grad():
        for case in CASES if device.type == "cuda" else CPU_CASES:
            if words and not any(word in case.what for word in words):
                continue
            ways, used, flops = ways_of(case, torch.bfloat16, device)
            if arguments.alone:
                ways = {"ours": ways["ours"]}
            times = measure.compare(ways, 1, device, arguments.seconds)
            ours = times["ours"].median_us
            line: dict[str, Any] = {
                "what": case.what,
                "ours": f"{ours:.1f} µs, {used / ours / 1e6:.2f} TB/s, {flops / ours / 1e6:.0f} TFLOP/s",
                "torch, dense": "",
            }
            if "torch, dense" in times:
                line["torch, dense"] = f"{times['torch, dense'].median_us:.1f} µs, " + (
                    f"{times['torch, dense'].median_us / ours:.2f}x"
                )
            figures.append(line)
            print(line, flush=True)
            ways.clear()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    columns = ["what", "ours", "torch, dense"]
    print_and_store({"machine": describe_machine(device), "columns": columns, "figures": figures}, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
