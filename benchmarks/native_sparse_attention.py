"""Native sparse attention against our own dense causal attention of the same heads, forward and backward.

    python benchmarks/native_sparse_attention.py [--device cuda|cpu] [--only TEXT,...] [--tokens N,...] [--seconds S]
        [--threads N] [--output FILE]

On a GPU: bf16, batch 1, 64 heads of 128 over 4 key heads, 8,192 and 65,536 tokens. On a CPU: fp32, 8 heads of 64 over
2, 2,048 tokens. Forms: the paper's (means of 32 keys every 16, blocks of 64, 16 of them, window 512) and ejKernel's
(means of the blocks of 64, no window). Two kinds of data, because keys that neighbours share are read once: `topics`
last 256 tokens, so that neighbouring queries choose nearly the same blocks, as in a trained model; of `noise` every
query chooses its own. A backward's time is that of the gradients alone. Ours and theirs take turns; medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from linear_attention import seconds_of
from table import print_and_store
from torch import Tensor
from torch_norms import describe_machine

from kernel_pytorch import functional as F

Way = Callable[[], Any]
COLUMNS = ["what", "ours", "ours, dense", "faster"]
FORMS: dict[str, dict[str, Any]] = {"paper": {"form": "paper"}, "ejkernel": {"form": "ejkernel"}}


def make_inputs(tokens: int, heads: int, key_heads: int, size: int, device: str, dtype: torch.dtype, topics: bool):
    """query, key, value and the gates of the three branches."""

    def noise(own_heads: int) -> Tensor:
        return torch.randn(1, tokens, own_heads, size, device=device)

    query, key, value = noise(heads), noise(key_heads), noise(key_heads)
    if topics:
        count = max(tokens // 256, 1)
        topic = torch.randn(count, size, device=device).repeat_interleave(-(-tokens // count), 0)[None, :tokens, None]
        query, key = 0.3 * query + topic, 0.3 * key + topic
    gates = torch.rand(3, 1, tokens, heads, device=device)
    return [x.to(dtype) for x in (query, key, value, *gates)]


def make_cases(tokens: int, device: str, wanted: Callable[[str], bool]):
    """A name and its ways, one after the other: inputs of 65,536 tokens are large."""
    on_gpu = device == "cuda"
    heads, key_heads, size = (64, 4, 128) if on_gpu else (8, 2, 64)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    for data in ("topics", "noise"):
        for form, numbers in FORMS.items():
            title = f"{form} {data} {str(dtype).removeprefix('torch.')} T{tokens} H{heads}/{key_heads} D{size}"
            names = {direction: f"{title} {direction}" for direction in ("forward", "backward")}
            if not any(map(wanted, names.values())):
                continue
            query, key, value, *gates = make_inputs(tokens, heads, key_heads, size, device, dtype, data == "topics")
            if form == "ejkernel":
                gates[2] = None

            def ours(gates=gates, query=query, key=key, value=value, numbers=numbers) -> Tensor:
                return F.native_sparse_attention(query, key, value, gates=gates, **numbers)

            def dense(query=query, key=key, value=value) -> Tensor:
                return F.attention(query, key, value, causal=True, layout="bshd")

            ways = {"ours": (ours, [query, key, value, *(g for g in gates if g is not None)])}
            ways["ours, dense"] = (dense, [query, key, value])
            if wanted(names["forward"]):
                yield names["forward"], {way: torch.no_grad()(call) for way, (call, _) in ways.items()}
            if wanted(names["backward"]):
                yield names["backward"], {way: gradients_of(*one) for way, one in ways.items()}


def gradients_of(forward: Callable[[], Tensor], leaves: list[Tensor]) -> Way:
    for leaf in leaves:
        leaf.requires_grad_()
    output = forward()
    upstream = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, leaves, upstream, retain_graph=True)


def run(name: str, ways: dict[str, Way], device: str, seconds: float) -> dict[str, str]:
    for call in ways.values():
        call()  # and compiles
    samples: dict[str, list[float]] = {way: [] for way in ways}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(samples["ours"]) < 3:
        for way, call in ways.items():
            samples[way].append(seconds_of(call, device, 1))
    medians = {way: statistics.median(times) for way, times in samples.items()}
    row = {"what": name} | {way: f"{median * 1e3:.3f} ms" for way, median in medians.items()}
    row["faster"] = f"{medians['ours, dense'] / medians['ours']:.2f}x"
    print("; ".join(f"{key} {text}" if key != "what" else text for key, text in row.items()), flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--only", default="", help="texts of which a case's name has one")
    parser.add_argument("--tokens", default="", help="in place of the usual numbers of tokens")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a case")
    parser.add_argument("--threads", type=int, help="of a CPU; times of one thread are its own")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    texts = [text for text in options.only.split(",") if text]
    usual = [8192, 65536] if options.device == "cuda" else [2048]
    rows = []
    for tokens in [int(text) for text in options.tokens.split(",") if text] or usual:
        for name, ways in make_cases(tokens, options.device, lambda n: not texts or any(text in n for text in texts)):
            rows.append(run(name, ways, options.device, options.seconds))
    machine = describe_machine(torch.device(options.device))
    print_and_store({"machine": machine, "columns": COLUMNS, "figures": rows}, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
