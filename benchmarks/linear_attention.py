"""Linear attention with gates, against the same on this machine.

    python benchmarks/linear_attention.py [--device cuda|cpu] [--only TEXT,...] [--seconds S] [--threads N]
        [--output FILE]

Peers. GPU: flash-linear-attention (Triton) where it can be imported. CPU: the same algorithm by chunks, written in
torch: products of matrices of a chunk's tokens, and the state from one chunk to the next. Ours and theirs take turns; a
figure is the median.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from table import print_and_store
from torch import Tensor
from torch_norms import describe_machine

from kernel_pytorch import functional as F

Way = Callable[[], Any]
COLUMNS = ["what", "ours", "fla", "torch by chunks"]


def chunks_in_torch(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, size: int = 64) -> Tensor:
    """Linear attention with a decay of each head; tokens are a multiple of `size`."""
    _batch, _tokens, _heads, columns = query.shape

    def cut(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, size)).permute(1, 0, 3, 2, 4)  # [chunks, batch, heads, size, columns]

    q, k, v = cut(query * columns**-0.5), cut(key), cut(value)
    place = torch.arange(1, size + 1)
    sums = decay[:, None] * place  # [heads, size]
    within = (sums[:, :, None] - sums[:, None, :]).masked_fill(place[:, None] < place, float("-inf")).exp().to(q.dtype)
    into, out_of = sums.exp()[..., None].to(q.dtype), (sums[:, -1:] - sums).exp()[..., None].to(q.dtype)
    kept = sums[:, -1, None, None].exp()
    inner = (q @ k.mT * within) @ v
    gathered = (k * out_of).mT @ v
    state, states = torch.zeros_like(gathered[0], dtype=torch.float32), []
    for one in gathered:
        states.append(state.to(q.dtype))
        state = state * kept + one
    output = inner + (q * into) @ torch.stack(states)
    return output.permute(1, 0, 3, 2, 4).flatten(1, 2)


def delta_chunks_in_torch(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule, by a triangular system of each chunk; tokens are a multiple of its size."""
    size, columns = 64, query.shape[-1]

    def cut(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, size)).transpose(2, 3).transpose(0, 1).contiguous()  # [chunks, batch, heads, size]

    q, k, v = (cut(x) for x in (query * columns**-0.5, key, value))
    sums, b = cut(gate).cumsum(-1), cut(beta)[..., None]
    place = torch.arange(size)
    within = (sums[..., :, None] - sums[..., None, :]).masked_fill(place[:, None] < place, float("-inf")).exp()
    into, out_of, kept = (
        sums.exp()[..., None],
        (sums[..., -1:] - sums).exp()[..., None],
        sums[..., -1, None, None].exp(),
    )
    system = (b * (k @ k.mT) * within).tril(-1).float() + torch.eye(size)
    both = torch.cat([v * b, k * b * into], -1).float()
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], columns], -1)
    inner = (q @ k.mT * within).to(q.dtype)
    reads, writes, w = (q * into).to(q.dtype), (k * out_of).to(q.dtype), w.to(q.dtype)
    state, outputs = torch.zeros_like(k[0].mT @ v[0], dtype=torch.float32), []
    for i in range(len(q)):
        low = state.to(q.dtype)
        values = (u[i] - w[i] @ low).to(q.dtype)
        outputs.append(reads[i] @ low + inner[i] @ values)
        state = state * kept[i] + writes[i].mT @ values
    return torch.stack(outputs).permute(1, 0, 3, 2, 4).flatten(1, 2)


def with_gradients(forward: Callable[..., Tensor], leaves: list[Tensor]) -> Way:
    upstream = torch.randn_like(leaves[2])

    def step() -> Any:
        for leaf in leaves:
            leaf.requires_grad_()
        gradients = torch.autograd.grad(forward(), leaves, upstream)
        for leaf in leaves:
            leaf.requires_grad_(False)
        return gradients

    return step


def peer(name: str, module: str) -> Any:
    try:
        return getattr(__import__(f"fla.ops.{module}", fromlist=[name]), name)
    except ImportError:
        return None


def tensors(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape, device=device, dtype=torch.float32).mul_(0.3).to(dtype) for _ in range(3)]


def lightning_cases(device: str, dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> dict[str, dict[str, Way]]:
    cases: dict[str, dict[str, Way]] = {}
    for shape in shapes:
        batch, tokens, heads, columns = shape
        q, k, v = tensors(shape, device, dtype)
        decay = -(2.0 ** (-8.0 * torch.arange(1, heads + 1, device=device) / heads))
        ways: dict[str, Callable[[], Tensor]] = {
            "ours": lambda q=q, k=k, v=v, d=decay: F.linear_attention(q, k, v, decay=d)
        }
        theirs = peer("chunk_lightning_attn", "lightning_attn") if device == "cuda" else None
        if theirs is not None:
            ways["fla"] = lambda q=q, k=k, v=v, call=theirs: call(q, k, v, layer_idx=1, num_layers=12)[0]
        if device == "cpu":
            ways["torch by chunks"] = lambda q=q, k=k, v=v, d=decay: chunks_in_torch(q, k, v, d)
        title = f"lightning {str(dtype).removeprefix('torch.')} B{batch} T{tokens} H{heads} D{columns}"
        cases[f"{title} forward"] = dict(ways)
        cases[f"{title} forward+backward"] = {way: with_gradients(call, [q, k, v]) for way, call in ways.items()}
    return cases


def gated_cases(device: str, dtype: torch.dtype) -> dict[str, dict[str, Way]]:
    batch, tokens, heads, columns = (1, 8192, 96, 128) if device == "cuda" else (1, 2048, 8, 128)
    q, k, v = tensors((batch, tokens, heads, columns), device, dtype)
    channels = torch.nn.functional.logsigmoid(torch.randn_like(q).float()).div(16).to(dtype)
    gate = channels[..., 0].float().contiguous()
    title = f"{str(dtype).removeprefix('torch.')} B{batch} T{tokens} H{heads} D{columns}"
    one, each = (lambda g=g: F.linear_attention(q, k, v, gate=g) for g in (gate, channels))
    gated: dict[str, Way] = {"ours": each}
    theirs = peer("chunk_gla", "gla") if device == "cuda" else None
    if theirs is not None:
        gated["fla"] = lambda: theirs(q, k, v, channels)[0]
    return {
        f"gate of a token {title} forward": {"ours": one},
        f"gate of a token {title} forward+backward": {"ours": with_gradients(one, [q, k, v])},
        f"GLA {title} forward": gated,
        f"GLA {title} forward+backward": {"ours": with_gradients(each, [q, k, v])},
    }


def delta_cases(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], wanted: tuple[str, ...] = ("gated", "both", "KDA")
) -> dict[str, dict[str, Way]]:
    batch, tokens, query_heads, heads, columns = shape
    q, k, v = (
        torch.randn(batch, tokens, own, columns, device=device).mul_(0.3) for own in (query_heads, query_heads, heads)
    )
    q, k, v = q.to(dtype), torch.nn.functional.normalize(k, dim=-1).to(dtype), v.to(dtype)
    gate, beta = -0.1 * torch.rand(batch, tokens, heads, device=device), torch.rand(batch, tokens, heads, device=device)
    names = f"H{heads}" if query_heads == heads else f"H{query_heads}/{heads}"
    title = f"{str(dtype).removeprefix('torch.')} B{batch} T{tokens} {names} D{columns}"
    ways: dict[str, Callable[[], Tensor]] = {"ours": lambda: F.delta_rule(q, k, v, beta, gate=gate)}
    if device == "cpu":
        ways["torch by chunks"] = lambda: delta_chunks_in_torch(q, k, v, gate.to(dtype), beta.to(dtype))
    cases: dict[str, dict[str, Way]] = {}
    if "gated" in wanted:
        cases[f"gated delta rule {title} forward"] = dict(ways)
    if "both" in wanted:
        both = {way: with_gradients(call, [q, k, v]) for way, call in ways.items()}
        cases[f"gated delta rule {title} forward+backward"] = both
    if "KDA" in wanted:
        channels = torch.nn.functional.logsigmoid(torch.randn(batch, tokens, heads, columns, device=device))
        channels = channels.div_(16).to(dtype)
        cases[f"KDA {title} forward"] = {"ours": lambda: F.delta_rule(q, k, v, beta, gate=channels)}
    return cases


def decode_cases(device: str, dtype: torch.dtype) -> dict[str, dict[str, Way]]:
    batch, heads, size = (128, 32, 128) if device == "cuda" else (8, 32, 128)
    state = torch.zeros(batch, heads, size, size, device=device)
    q, k, v = tensors((batch, 1, heads, size), device, dtype)
    gate = torch.full((batch, 1, heads), -0.1, device=device)
    return {
        f"decode step B{batch} H{heads} {size}x{size}": {
            "ours": lambda: F.linear_attention_step_(q, k, v, state, gate=gate)
        }
    }


def seconds_of(call: Way, device: str, calls: int) -> float:
    if device == "cpu":
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        begin = clock()
        for _ in range(calls):
            call()
        return (clock() - begin) / calls
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / calls


def run(name: str, ways: dict[str, Way], device: str, seconds: float) -> dict[str, str]:
    for call in ways.values():
        call()  # and compiles
    calls = max(1, min(20, int(0.02 / max(seconds_of(ways["ours"], device, 1), 1e-6))))
    samples: dict[str, list[float]] = {way: [] for way in ways}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(samples["ours"]) < 3:
        for way, call in ways.items():
            samples[way].append(seconds_of(call, device, calls))
    row = dict.fromkeys(COLUMNS, "-") | {"what": name}
    for way, times in samples.items():
        row[way] = f"{statistics.median(times) * 1e3:.3f} ms"
    print("; ".join(f"{key} {text}" if key != "what" else text for key, text in row.items()), flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a case")
    parser.add_argument("--threads", type=int, help="of a CPU; times of one thread are its own")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.device == "cuda":
        makers = [
            lambda: lightning_cases("cuda", torch.bfloat16, [(8, 8192, 32, 128)]),
            lambda: lightning_cases("cuda", torch.bfloat16, [(1, 32768, 32, 128)]),
            lambda: lightning_cases("cuda", torch.bfloat16, [(16, 2048, 32, 128)]),
            lambda: decode_cases("cuda", torch.bfloat16),
            lambda: gated_cases("cuda", torch.bfloat16),
            lambda: delta_cases("cuda", torch.bfloat16, (4, 8192, 16, 64, 128), ("gated",)),
            lambda: delta_cases("cuda", torch.bfloat16, (1, 32768, 16, 64, 128), ("gated",)),
            lambda: delta_cases("cuda", torch.bfloat16, (1, 32768, 16, 32, 128), ("gated", "both")),
            lambda: delta_cases("cuda", torch.bfloat16, (2, 16384, 64, 64, 128), ("KDA",)),
        ]
    else:
        makers = [
            *(lambda d=d: lightning_cases("cpu", d, [(1, 2048, 8, 128)]) for d in (torch.float32, torch.bfloat16)),
            *(lambda d=d: gated_cases("cpu", d) for d in (torch.float32, torch.bfloat16)),
            *(lambda d=d: delta_cases("cpu", d, (1, 2048, 8, 8, 128)) for d in (torch.float32, torch.bfloat16)),
            lambda: decode_cases("cpu", torch.float32),
        ]
    wanted = [text for text in options.only.split(",") if text]
    rows = []
    for make in makers:
        for name, ways in make().items():
            if not wanted or any(text in name for text in wanted):
                rows.append(run(name, ways, options.device, options.seconds))
    columns = [name for name in COLUMNS if any(row[name] != "-" for row in rows)]
    machine = describe_machine(torch.device(options.device))
    print_and_store({"machine": machine, "columns": columns, "figures": rows}, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
