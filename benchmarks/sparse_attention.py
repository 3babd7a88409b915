"""Sparse attention against dense: 90 % of the blocks left out at random, by content with the choice timed, unevenly.

    python benchmarks/sparse_attention.py [--device cuda|cpu] [--quick] [--only WORD] [--tokens N] [--output FILE]

On a GPU: bf16, 16 heads of 128, 32768 tokens, blocks of 128, against cuDNN's dense attention, our own, and compiled
FlexAttention with the same BlockMask. On a CPU: fp32, 2 heads of 64, 8192 tokens, against our own dense attention.
TFLOP/s count what is computed: 4 * blocks * block size squared * head size, and 2.5 times that backward; a row's
`faster` is time against time, whatever was computed. Uneven lists: by content under causality, where every row sees the
first block (against causal dense attention), and a window with one block of tokens that see and are seen by all: some
rows or columns are ten times as long as the others. Sparse rows are checked before they are timed: against dense
attention with the expanded mask on the first head, fp32, a few rows of blocks.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as torch_functional
from kernel_pytorch.functional import BlockLists, attention, block_lists, select_blocks
from measure import Way, capture_stream, compare
from table import print_and_store
from torch_norms import describe_machine

Attend = Callable[..., torch.Tensor]
FAILURES: list[str] = []


@dataclass(frozen=True)
class Size:
    heads: int
    tokens: int
    size: int
    block: int
    sparsity: float
    dtype: torch.dtype

    @property
    def name(self) -> str:
        dtype = "bf16" if self.dtype is torch.bfloat16 else "fp32"
        shape = f"{dtype} H{self.heads} S{self.tokens} D{self.size}"
        return f"{100 * self.sparsity:.0f} % sparse, {self.block}-blocks, {shape}"

    def blocks(self, causal: bool = False) -> int:
        rows = self.tokens // self.block
        return self.heads * (rows * (rows + 1) // 2 if causal else rows**2)

    def flops(self, direction: str, blocks: int) -> float:
        return 4.0 * blocks * self.block**2 * self.size * (2.5 if direction == "backward" else 1.0)


def make_inputs(size: Size, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, size.tokens, size.heads, size.size)
    return [torch.randn(shape, device=device, generator=generator).to(size.dtype).transpose(1, 2) for _ in range(3)]


def random_lists(size: Size, device: torch.device) -> BlockLists:
    """Random blocks: in each row of each head as many as the sparsity leaves."""
    blocks = size.tokens // size.block
    kept = round((1 - size.sparsity) * blocks)
    order = torch.rand(1, size.heads, blocks, blocks, generator=torch.Generator().manual_seed(1)).argsort(-1)
    return block_lists((order < kept).to(device), size.block)


def local_global_lists(size: Size, device: torch.device) -> BlockLists:
    """A window, and one block of tokens that see all and are seen by all (Longformer)."""
    places = torch.arange(size.tokens // size.block, device=device)
    reach = round((1 - size.sparsity) * len(places) / 2) - 1
    kept = (places[:, None] - places).abs() <= reach
    kept[0] = True
    kept[:, 0] = True
    return block_lists(kept.expand(1, size.heads, -1, -1).contiguous(), size.block)


def flex_way(size: Size, lists: BlockLists) -> Attend:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    nothing = torch.zeros_like(lists.kv_num_blocks)
    mask = BlockMask.from_kv_blocks(
        nothing, lists.kv_indices, lists.kv_num_blocks, lists.kv_indices, BLOCK_SIZE=size.block,
        seq_lengths=(size.tokens, size.tokens),
    )  # fmt: skip
    return functools.partial(torch.compile(flex_attention), block_mask=mask)


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch_functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def check(size: Size, what: str, lists: BlockLists, inputs: list[torch.Tensor], causal: bool = False) -> None:
    """The last head's first and last rows of blocks against fp32 with whole rows of scores."""
    with torch.no_grad():
        output = attention(*inputs, block_mask=lists, causal=causal)
    kept = lists.block_map()[0, -1]
    q, k, v = (x[0, -1].float() for x in inputs)
    for row in (0, kept.shape[0] - 1):
        rows = slice(row * size.block, (row + 1) * size.block)
        seen = kept[row].repeat_interleave(size.block)
        scores = q[rows] @ k[seen].T * size.size**-0.5
        if causal:
            places = torch.arange(size.tokens, device=q.device)
            scores = scores.masked_fill(places[seen] > places[rows, None], -torch.inf)
        exact = scores.softmax(-1) @ v[seen]
        error = float((output[0, -1, rows].float() - exact).norm() / exact.norm())
        if not error < (1e-2 if size.dtype is torch.bfloat16 else 1e-5):
            FAILURES.append(f"{size.name} {what}: row {row} of blocks is {error:.1e} from exact")


def make_way(attend: Attend, inputs: list[torch.Tensor], direction: str) -> Way:
    if direction == "forward":

        def forward(_: int) -> object:
            with torch.no_grad():
                return attend(*inputs)

        return forward
    leaves = [x.detach().requires_grad_() for x in inputs]
    if inputs[0].device.type == "cuda":
        stream = capture_stream()  # autograd runs a backward on the stream of its forward
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            output = attend(*leaves)
            gradient = torch.randn_like(output)
        torch.cuda.synchronize()
    else:
        output = attend(*leaves)
        gradient = torch.randn_like(output)
    return lambda _: torch.autograd.grad(output, leaves, gradient, retain_graph=True)


@dataclass(frozen=True)
class Sparse:
    attend: Attend
    blocks: int  # that it computes
    directions: list[str]  # backward chooses nothing
    causal: bool = False


def sparse_ways(size: Size, lists: BlockLists, inputs: list[torch.Tensor]) -> dict[str, Sparse]:
    """By what is chosen."""

    def selecting(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        chosen = select_blocks(q, k, sparsity=size.sparsity, block_size=size.block, gradients=False)
        return attention(q, k, v, block_mask=chosen)

    chosen = select_blocks(inputs[0], inputs[1], sparsity=size.sparsity, block_size=size.block)
    check(size, "random", lists, inputs)
    check(size, "by content", chosen, inputs)
    past = select_blocks(inputs[0], inputs[1], sparsity=size.sparsity, block_size=size.block, causal=True)
    around = local_global_lists(size, inputs[0].device)
    check(size, "by content, causal", past, inputs, causal=True)
    check(size, "local and global", around, inputs)
    ways = {"by content, with the choice": Sparse(selecting, int(chosen.counts().sum()), ["forward"])}
    for what, given, causal in (
        ("random", lists, False),
        ("by content, causal", past, True),
        ("local and global", around, False),
    ):
        attend = functools.partial(attention, block_mask=given, causal=causal)
        ways[f"{what}, lists given"] = Sparse(attend, int(given.counts().sum()), ["forward", "backward"], causal)
    return ways


def run(size: Size, device: torch.device, seconds: float, only: str, with_flex: bool) -> list[dict[str, Any]]:
    inputs = make_inputs(size, device)
    lists = random_lists(size, device)
    dense: dict[str, Attend] = {"ours, dense": attention}
    if device.type == "cuda":
        dense = {"cudnn, dense": cudnn, **dense}
        if with_flex:
            dense["flex, same blocks"] = flex_way(size, lists)
    rows = []
    for what, way in sparse_ways(size, lists, inputs).items():
        for direction in way.directions:
            wanted = {"ours": way.attend, **dense}
            if not what.startswith("random"):
                wanted.pop("flex, same blocks", None)
            if way.causal:
                wanted |= {name: functools.partial(one, causal=True) for name, one in wanted.items() if name != "ours"}
            if only not in f"{size.name} {what} {direction}":
                continue
            ways = {name: make_way(one, inputs, direction) for name, one in wanted.items()}
            timings = compare(ways, 1, device, seconds)
            for peer in list(wanted)[1:]:
                computed = way.blocks if peer.startswith("flex") else size.blocks(way.causal)
                counts = {"ours": way.blocks, peer: computed}
                rows.append({
                    "op": f"{size.name}, {what}",
                    "direction": direction,
                    "sparsity": 1 - way.blocks / size.blocks(way.causal),
                    "peer": peer,
                    "timings": {name: asdict(timings[name]) for name in counts},
                    "tflops": {n: size.flops(direction, c) / timings[n].median_us / 1e6 for n, c in counts.items()},
                    "speedup": timings[peer].median_us / timings["ours"].median_us,
                })  # fmt: skip
                print(f"{rows[-1]['op']} {direction}: {rows[-1]['speedup']:.2f}x {peer}", file=sys.stderr, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a fifth of the time")
    parser.add_argument("--only", default="", help="only rows whose name and direction hold this text")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--no-flex", action="store_true", help="without FlexAttention, which takes long to compile")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    size = (
        Size(16, options.tokens or 32768, 128, 128, 0.9, torch.bfloat16)
        if on_gpu
        else Size(2, options.tokens or 8192, 64, 128, 0.9, torch.float32)
    )
    seconds = (0.5 if on_gpu else 5.0) * (0.2 if options.quick else 1.0)
    rows = run(size, device, seconds, options.only, not options.no_flex)
    if not rows:
        sys.exit(f"sparse_attention: --only {options.only!r}: no row has this text")
    result = {"machine": describe_machine(device), "attention": rows}
    print_and_store(result, options.output)
    for failure in FAILURES:
        print(f"sparse_attention: {failure}", file=sys.stderr)
    return 1 if FAILURES else 0


if __name__ == "__main__":
    sys.exit(main())
