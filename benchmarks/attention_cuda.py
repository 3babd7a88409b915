"""Our attention on a CUDA device, forward and backward: in bf16 against cuDNN's, compiled FlexAttention and
varlen_attn, in fp32 against torch's efficient attention.

    python benchmarks/attention_cuda.py [--quick] [--only WORDS] [--warm] [--output FILE]

TFLOP/s count 4 * kept scores * head size, kept scores being queries * keys, half of it where causal, and 2.5 times that
backward; `faster` is against the peer of the row, timed in the same turns on the same tensors. Rows that need a mask
also have a computed rate, which counts whole tiles of 128 x 128 scores (backward 64 queries x 128 keys, as our kernels
do) of which at least one is kept, and its share of that of `plain causal`, the first row of FlexAttention's, counted
the same way: what a mask costs beyond the work that tiles of this size cannot avoid. FlexAttention's rows alone, in
less than a minute once compiled (--warm): `--quick --only flex`; some of them: `--only "plain causal|document"`.
Rows with cuDNN are checked before they are timed: our error against fp32 on the same values may be 1.1 times the
peer's; in fp32 twice that of torch's math path, against fp64. Both get the same BlockMask where a row needs one, made
beforehand. Most of a run is compiling, FlexAttention and our kernels: several processes with --warm and different
--only fill the caches for the one that counts.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as torch_functional
from kernel_pytorch.attention import alibi_slopes
from kernel_pytorch.functional import attention
from measure import Way, capture_stream, compare
from table import print_table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch_norms import describe_machine

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # of [batch, heads, sequence, size] views


@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    heads: int
    queries: int
    size: int
    key_heads: int = 0  # 0: heads
    keys: int = 0  # 0: queries
    causal: bool = True
    peer: str = "cudnn"
    density: float = 0.0  # share of the scores that are kept; 0: half where causal, else all
    ours: dict[str, Any] = field(default_factory=dict)  # options of attention
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    lengths: tuple[int, ...] = ()  # of packed sequences, whose sum is `queries`
    tile_density: dict[str, float] = field(default_factory=dict)  # share of the scores in tiles that keep one
    directions: tuple[str, ...] = ("forward", "backward")
    dtype: torch.dtype = torch.bfloat16

    def flops(self, direction: str, density: float = 0.0) -> float:
        scores = self.batch * self.heads * self.queries * (self.keys or self.queries)
        kept = density or self.density or (0.5 if self.causal else 1.0)
        return 4.0 * scores * self.size * kept * (2.5 if direction == "backward" else 1)


def dense_cases() -> list[Case]:
    cases = []
    for size, heads, lengths, masks in (
        (128, 16, (8192, 16384), (True, False)),
        (64, 32, (8192, 16384), (True,)),
        (256, 8, (8192,), (True,)),
    ):
        for tokens in lengths:
            for causal in masks:
                mask = "causal" if causal else "full"
                cases.append(Case(f"D{size} {mask} {tokens}", 16384 // tokens, heads, tokens, size, causal=causal))
    cases.append(Case("GQA 64/8 causal 32768", 1, 64, 32768, 128, key_heads=8))
    cases.append(Case("short causal 1024", 16, 16, 1024, 128))
    for batch in (8, 128):
        name = f"decode 64/8 keys 8192 batch {batch}"
        cases.append(Case(name, batch, 64, 1, 128, 8, 8192, causal=False, directions=("forward",)))
    return cases


def float_cases() -> list[Case]:
    make = functools.partial(Case, batch=4, heads=16, peer="efficient", dtype=torch.float32)
    cases = [
        make(f"fp32 D{size} {'causal' if causal else 'full'} {tokens}", queries=tokens, size=size, causal=causal)
        for size in (64, 128)
        for tokens in (2048, 4096)
        for causal in (True, False)
    ]
    for size in (64, 128):
        name, options = f"tf32 D{size} causal 4096", {"allow_tf32": True}
        cases.append(make(name, queries=4096, size=size, ours=options))
    cases.append(make("fp32 D256 causal 2048", queries=2048, size=256))
    name = "fp32 decode keys 8192"
    cases.append(make(name, queries=1, size=128, keys=8192, causal=False, directions=("forward",)))
    return cases


def flex_cases(device: torch.device) -> list[Case]:
    """B2 H16 S8192 D128, as PEERS measure FlexAttention; the custom mod is a cosine of the distance."""
    make = functools.partial(Case, batch=2, heads=16, queries=8192, size=128, peer="flex")
    slopes = alibi_slopes(16).to(device)
    documents = (torch.arange(8192, device=device) // 1366).to(torch.int32)
    same = documents.long().bincount().double().square().sum().item() / 8192**2

    def is_causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    def prefix(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k < 1024) | (q >= k)

    def document(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (documents[q] == documents[k])

    def custom(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + torch.cos((q - k) * 0.01)

    window = functools.partial(make, causal=True, density=(1024 * 8192 - 1024**2 / 2) / 8192**2)
    cases = [
        make("plain causal", mask_mod=is_causal),
        make(
            "ALiBi",
            ours={"alibi_slopes": slopes},
            score_mod=lambda s, b, h, q, k: s - slopes[h] * (q - k),
            mask_mod=is_causal,
        ),
        window("window 1024", ours={"window": (1023, 0)}, mask_mod=lambda b, h, q, k: (q >= k) & (q - k < 1024)),
        make("custom mod", ours={"score_mod": custom}, score_mod=custom, mask_mod=is_causal),
        make(
            "softcap 30",
            ours={"softcap": 30.0},
            score_mod=lambda s, b, h, q, k: 30 * torch.tanh(s / 30),
            mask_mod=is_causal,
        ),
        make(
            "prefix LM 1024",
            causal=False,
            density=0.5 + 0.5 * (1024 / 8192) ** 2,
            ours={"block_mask": "the peer's"},
            mask_mod=prefix,
        ),
        make(
            "document",
            density=same / 2,
            ours={"query_segment_ids": documents.expand(2, -1), "key_segment_ids": documents.expand(2, -1)},
            mask_mod=document,
        ),
    ]
    return [replace(case, tile_density={d: tile_density(case, d, device) for d in case.directions}) for case in cases]


def tile_density(case: Case, direction: str, device: torch.device) -> float:
    tile = (64 if direction == "backward" else 128, 128)
    blocks = create_block_mask(case.mask_mod, None, None, case.queries, case.queries, device, BLOCK_SIZE=tile)
    tiles = blocks.kv_num_blocks.sum() + blocks.full_kv_num_blocks.sum()
    return tiles.item() * tile[0] * tile[1] / case.queries**2


def zipf_case() -> Case:
    """Sequences whose lengths fall as 1 / rank from 16384, as many as have a mean of 1k, packed end to end."""
    lengths = [16384 // rank for rank in range(1, 200)]
    lengths = lengths[: next(i for i in range(1, len(lengths)) if sum(lengths[:i]) <= 1024 * i)]
    total = sum(lengths)
    density = sum(length**2 for length in lengths) / total**2 / 2
    name = f"varlen {len(lengths)} sequences, {total} tokens"
    return Case(name, 1, 16, total, 128, peer="varlen", density=density, lengths=tuple(lengths))


def packed_ways(case: Case, device: torch.device) -> tuple[Attend, Attend]:
    """Ours and torch's of [1, heads, tokens, size] views."""
    from torch.nn.attention.varlen import varlen_attn

    offsets = torch.tensor([0, *itertools.accumulate(case.lengths)], dtype=torch.int32, device=device)
    longest = max(case.lengths)
    causal = (
        {"is_causal": True} if "is_causal" in inspect.signature(varlen_attn).parameters else {"window_size": (-1, 0)}
    )

    def tokens_first(view: torch.Tensor) -> torch.Tensor:
        return view.squeeze(0).transpose(0, 1)

    def ours(*views: torch.Tensor) -> torch.Tensor:
        sequences = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return attention(*map(tokens_first, views), causal=True, **sequences)

    def theirs(*views: torch.Tensor) -> torch.Tensor:
        return varlen_attn(*map(tokens_first, views), offsets, offsets, longest, longest, **causal)

    return ours, theirs


def both_ways(case: Case, device: torch.device) -> tuple[Attend, Attend]:
    """Ours and the peer's of [batch, heads, sequence, size] views."""
    if case.lengths:
        return packed_ways(case, device)
    keys, causal = case.keys or case.queries, case.causal and case.queries > 1
    blocks = create_block_mask(case.mask_mod, None, None, case.queries, keys, device) if case.mask_mod else None
    options = {name: blocks if name == "block_mask" else option for name, option in case.ours.items()}

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, causal=causal, **options)

    def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch_functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=bool(case.key_heads)
            )

    def efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return torch_functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    if case.peer != "flex":
        return ours, cudnn if case.peer == "cudnn" else efficient
    return ours, functools.partial(torch.compile(flex_attention), score_mod=case.score_mod, block_mask=blocks)


def make_inputs(case: Case, device: torch.device) -> list[torch.Tensor]:
    """[batch, sequence, heads, size] in memory, seen as [batch, heads, sequence, size]."""
    generator = torch.Generator(device).manual_seed(0)
    keys, key_heads = case.keys or case.queries, case.key_heads or case.heads
    shapes = [(case.queries, case.heads), (keys, key_heads), (keys, key_heads)]
    return [
        torch.randn(case.batch, *shape, case.size, device=device, generator=generator).to(case.dtype).transpose(1, 2)
        for shape in shapes
    ]


def make_ways(case: Case, attends: tuple[Attend, Attend], direction: str, device: torch.device) -> dict[str, Way]:
    # FlexAttention is compiled once, for both directions.
    wants_gradient = direction == "backward" or case.peer == "flex"
    inputs = [tensor.requires_grad_(wants_gradient) for tensor in make_inputs(case, device)]
    ways: dict[str, Way] = {}
    for name, attend in zip(("ours", case.peer), attends, strict=True):
        if direction == "forward":
            ways[name] = functools.partial(lambda function, _: function(*inputs), attend)
            continue
        stream = capture_stream()  # autograd runs a backward on the stream of its forward
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            output = attend(*inputs)
            gradient = torch.randn_like(output)
        torch.cuda.synchronize()
        ways[name] = functools.partial(
            lambda out, grad, _: torch.autograd.grad(out, inputs, grad, retain_graph=True), output, gradient
        )
    return ways


FAILURES: list[str] = []


def check(case: Case, attends: tuple[Attend, Attend], device: torch.device) -> None:
    """Our error and the peer's against torch's math path in a wider type, on the first batch and at most 2048 queries;
    in fp32 that path itself is the peer."""
    if case.peer not in ("cudnn", "efficient") or case.queries > 2048:
        return  # tests compare those options and lengths with the reference
    is_float = case.dtype is torch.float32
    has_backward = "backward" in case.directions
    q, k, v = (t[:1].detach().requires_grad_(has_backward) for t in make_inputs(case, device))
    wide = torch.float64 if is_float else torch.float32
    exact_inputs = [t.detach().to(wide).requires_grad_(has_backward) for t in (q, k, v)]

    def math(*inputs: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return torch_functional.scaled_dot_product_attention(
                *inputs, is_causal=case.causal and case.queries > 1, enable_gqa=bool(case.key_heads)
            )

    exact = math(*exact_inputs)
    gradient = torch.randn_like(exact)

    def results(output: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [output, *(torch.autograd.grad(output, inputs, gradient.to(output.dtype)) if has_backward else ())]

    wanted = results(exact, exact_inputs)
    errors = [
        [((a.to(wide) - b).norm() / b.norm()).item() for a, b in zip(results(attend(q, k, v), [q, k, v]), wanted)]
        for attend in ((attends[0], math) if is_float else attends)
    ]
    for what, mine, theirs in zip(("output", "dq", "dk", "dv"), *errors):
        if not mine <= (2 * theirs if is_float else max(1.1 * theirs, 1e-3)):
            FAILURES.append(f"{case.name}: {what} is {mine:.2e} from exact, the peer's {theirs:.2e}")


def run_case(case: Case, ways: dict[str, Way], direction: str, device: torch.device, seconds: float) -> dict[str, Any]:
    timings = compare(ways, 1, device, seconds)
    mine = timings["ours"].median_us
    computed = case.flops(direction, case.tile_density[direction]) / mine / 1e6 if case.tile_density else None
    return {
        "op": f"attention {case.name}",
        "direction": direction,
        "dtype": {torch.bfloat16: "bf16", torch.float32: "fp32"}[case.dtype],
        "batch": case.batch,
        "heads": case.heads,
        "queries": case.queries,
        "size": case.size,
        "peer": case.peer,
        "timings": {name: asdict(timing) for name, timing in timings.items()},
        "tflops": {name: case.flops(direction) / timing.median_us / 1e6 for name, timing in timings.items()},
        "speedup": timings[case.peer].median_us / mine,
        "computed_tflops": computed,
    }


def share_of_plain(row: dict[str, Any], rows: list[dict[str, Any]]) -> float | None:
    """Our rate per computed FLOP against that of the plain causal row of the same direction, where the run has both."""
    for plain in rows:
        is_plain = plain["op"] == "attention plain causal" and plain["direction"] == row["direction"]
        if is_plain and row["computed_tflops"]:
            return row["computed_tflops"] / plain["computed_tflops"]
    return None


def report_failures() -> int:
    for failure in FAILURES:
        print(f"attention_cuda: {failure}", file=sys.stderr)
    return 1 if FAILURES else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of a second a way instead of a half")
    parser.add_argument("--only", default="", help="only rows whose 'name direction peer' holds one of these, by |")
    parser.add_argument("--warm", action="store_true", help="call everything once and time nothing")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("attention_cuda: torch sees no CUDA device here; benchmarks/torch_attention.py times the CPU's")
    device = torch.device("cuda")
    rows: list[dict[str, Any]] = []
    run = {"machine": describe_machine(device), "attention": rows}
    for case in [*dense_cases(), *float_cases(), zipf_case(), *flex_cases(device)]:
        words = arguments.only.split("|")
        wanted = [d for d in case.directions if any(word in f"{case.name} {d} {case.peer}" for word in words)]
        if not wanted:
            continue
        torch.compiler.reset()
        try:
            attends = both_ways(case, device)
            check(case, attends, device)
            for direction in wanted:
                ways = make_ways(case, attends, direction, device)
                if arguments.warm:
                    for way in ways.values():
                        way(0)
                    continue
                rows.append(run_case(case, ways, direction, device, 0.1 if arguments.quick else 0.5))
                rows[-1]["share_of_plain"] = share_of_plain(rows[-1], rows)
                if arguments.output:  # now: a run that is cut short leaves what it has
                    result = {"benchmark": "attention_cuda", "runs": [run]}
                    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
                mine, theirs = rows[-1]["tflops"]["ours"], rows[-1]["tflops"][case.peer]
                print(f"{case.name} {direction}: {mine:.0f} against {theirs:.0f} TFLOP/s", file=sys.stderr, flush=True)
        except torch.AcceleratorError:
            raise  # nothing after it could be trusted
        except RuntimeError as error:  # a peer that does not take the case must not cost the others
            FAILURES.append(f"{case.name}: {error}")
    if arguments.warm:
        return report_failures()
    if not rows:
        sys.exit(f"attention_cuda: --only {arguments.only!r}: no row has this text")
    print_table(run)
    return report_failures()


if __name__ == "__main__":
    sys.exit(main())
