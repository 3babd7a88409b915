"""Random ragged batches over pages against dense attention in fp64, by the type of the cache.

    python -m fuzz.ragged [--batches 1000] [--seed 0]

A test runs some of each.
"""

from __future__ import annotations

import argparse
import sys

import torch

from kernel_pytorch import functional

from .draw import Draw
from .pages import ragged_batch

CACHES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "e4m3": (torch.bfloat16, torch.float8_e4m3fn),
    "int8": (torch.float16, torch.int8),
    "e4m3 under fp32": (torch.float32, torch.float8_e4m3fn),
    "int8 under fp32": (torch.float32, torch.int8),
}


def findings(cache: str, batches: int, seed: int = 0) -> list[str]:
    """What was wrong, batch by batch; refusals that were drawn are left out."""
    found = []
    query, kept = CACHES[cache]
    for number in range(batches):
        case = ragged_batch(Draw(seed, f"ragged {cache}", number), query, kept)
        if case.refused:
            continue
        sentence = case.check(functional.paged_attention(*case.args, **case.options), case) if case.check else None
        if sentence:
            found.append(f"{cache} batch {number}: {sentence}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    wrong = 0
    for cache in CACHES:
        found = findings(cache, given.batches, given.seed)
        wrong += len(found)
        print(f"{cache:16} {given.batches} batches, {len(found)} findings", *found[:5], sep="\n    ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
