"""Attention over a paged cache: against torch's attention on the same keys in one piece, and torch's on gathered pages.

    python benchmarks/paged_attention.py [--device cpu|cuda] [--seconds S] [--only WORDS,...] [--alone] [--output FILE]

A row is a batch of requests; ways take turns (measure.py), on a GPU as CUDA graphs. "torch, dense" has the keys and
values without pages, heads first: what a cache costs without paging. "torch, gathered" copies the pages first, which is
what a caller without such a kernel does. Of requests of different lengths torch's ways are padded to the longest.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure
import torch
import torch.nn.functional as torch_functional
from table import print_and_store
from torch_norms import describe_machine

from kernel_pytorch import functional


@dataclass(frozen=True)
class Case:
    what: str
    lengths: tuple[int, ...]
    heads: int = 64
    key_heads: int = 8
    size: int = 128
    page_size: int = 64
    queries: int = 1
    cache: torch.dtype | None = None
    batch_invariant: bool = False


CASES = [
    Case("decode B128 S8192, page 64", (8192,) * 128),
    Case("decode B128 S8192, page 16", (8192,) * 128, page_size=16),
    Case("decode B128 S8192, page 1", (8192,) * 128, page_size=1),
    Case("decode B128 S8192, page 64, e4m3", (8192,) * 128, cache=torch.float8_e4m3fn),
    Case("decode B128 S8192, page 64, batch-invariant", (8192,) * 128, batch_invariant=True),
    Case("4 drafts B128 S8192, page 64", (8192,) * 128, queries=4),
    Case("decode B8 S8192, page 64", (8192,) * 8),
    Case("decode B1 S131072, page 64", (131072,)),
    Case("decode 1x131072 + 31x4096, 8/1 heads", (131072, *(4096,) * 31), heads=8, key_heads=1),
    Case("decode B1 S1024 e4m3, 32/8 heads", (1024,), heads=32, cache=torch.float8_e4m3fn),
    Case("chunk of 512 in B4 S4096", (4096,) * 4, heads=32, queries=512),
]
CPU_CASES = [
    Case("decode B4 S2048, page 16", (2048,) * 4, page_size=16),
    Case("decode B4 S2048, page 64", (2048,) * 4),
    Case("decode B4 S2048, page 16, 32/32 heads", (2048,) * 4, heads=32, key_heads=32, page_size=16),
    Case("decode B4 S2048, page 64, 32/32 heads", (2048,) * 4, heads=32, key_heads=32),
]


def ways_of(case: Case, dtype: torch.dtype, device: torch.device) -> tuple[dict[str, Any], int]:
    longest, requests = max(case.lengths), len(case.lengths)
    table = -(-longest // case.page_size)
    pages = requests * table
    order = torch.randperm(pages, device=device).to(torch.int32).view(requests, table)
    shape = (pages, case.page_size, case.key_heads, case.size)
    keys, values = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    query = torch.randn(requests * case.queries, case.heads, case.size, device=device, dtype=dtype)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    kept = [(keys, values) if case.cache is None else (keys.to(case.cache), values.to(case.cache))]
    ways: dict[str, Any] = {
        "ours": lambda i: functional.paged_attention(
            query, *kept[0], order, lengths, batch_invariant=case.batch_invariant
        )
    }
    rows = query.view(requests, case.queries, case.heads, case.size).transpose(1, 2)

    def gathered(cache: torch.Tensor) -> torch.Tensor:
        return cache[order.long()].view(requests, table * case.page_size, case.key_heads, case.size).transpose(1, 2)

    def attend(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = None
        if case.queries > 1:
            mask = torch.ones(case.queries, k.shape[2], dtype=torch.bool, device=device).tril(k.shape[2] - case.queries)
        return torch_functional.scaled_dot_product_attention(rows, k, v, attn_mask=mask, enable_gqa=True)

    dense_bytes = 2 * requests * longest * case.key_heads * case.size * keys.element_size()
    if device.type == "cpu" or dense_bytes < 2**34:
        dense = [gathered(cache).contiguous() for cache in (keys, values)]
        ways["torch, dense"] = lambda i: attend(*dense)
        if device.type == "cpu":
            ways["torch, gathered"] = lambda i: attend(gathered(keys), gathered(values))
    expected = attend(gathered(keys[:, :, :, :]), gathered(values)) if len(set(case.lengths)) == 1 else None
    if expected is not None and case.cache is None:
        found = ways["ours"](0).view(requests, case.queries, case.heads, case.size).transpose(1, 2)
        error = (found.float() - expected.float()).abs().max().item()
        assert error < 0.02, f"{case.what}: off by {error}"
    used = 2 * sum(case.lengths) * case.key_heads * case.size * kept[0][0].element_size()
    return ways, used


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
            for dtype in [torch.bfloat16] if device.type == "cuda" else [torch.float32, torch.bfloat16]:
                ways, used = ways_of(case, dtype, device)
                if arguments.alone:
                    ways = {"ours": ways["ours"]}
                times = measure.compare(ways, 1, device, arguments.seconds)
                ours = times["ours"].median_us
                rate = f"{used / ours / 1e6:.2f} TB/s" if device.type == "cuda" else f"{used / ours / 1e3:.1f} GB/s"
                line: dict[str, Any] = {
                    "what": case.what + ("" if device.type == "cuda" else f", {str(dtype).split('.')[-1]}"),
                    "ours": f"{ours:.1f} µs, {rate}",
                }
                for name in ("torch, dense", "torch, gathered"):
                    if name in times:
                        line[name] = f"{times[name].median_us:.1f} µs, {times[name].median_us / ours:.2f}x"
                figures.append(line)
                print(line, flush=True)
                ways.clear()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    columns = ["what", "ours", "torch, dense", *(["torch, gathered"] if device.type == "cpu" else [])]
    figures = [{name: line.get(name, "") for name in columns} for line in figures]
    print_and_store({"machine": describe_machine(device), "columns": columns, "figures": figures}, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
