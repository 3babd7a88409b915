"""A mixture of experts: routing, grouped products and the whole layer, against torch's on the same machine.

    python benchmarks/moe.py [--device cuda|cpu] [--only TEXT,...] [--seconds S] [--threads N]
        [--output FILE]

Peers. GPU: `torch._grouped_mm` on rows that are copied into the order of experts first (a layer: with the gate as one
op of ours, and index_add for the sum), eager and, for a layer, compiled. CPU: a loop over the experts, as Hugging Face
has it. FP8: `torch._scaled_grouped_mm`, which has scales of rows alone. Ours and theirs take turns; a figure is the
median. FLOP are those of the products: 2 * rows * k * n each. Decoding shows the bytes of the experts that are used.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from table import print_and_store
from torch import Tensor
from torch_norms import describe_machine

from kernel_pytorch import functional as F

Way = Callable[[], Any]
COLUMNS = ["what", "ours", "grouped_mm", "compiled", "loop", "topk, argsort"]


@dataclass
class Case:
    name: str
    flops: float  # 0: a time alone
    ways: dict[str, Way]
    tolerance: float = 0.02  # of the largest value; 0: nothing to compare
    bytes: float = 0.0  # that have to be read, where they bound the time


@dataclass
class Layer:
    """Tokens, and experts as checkpoints store them: [experts, columns, size]."""

    x: Tensor
    logits: Tensor
    gate_up: Tensor
    down: Tensor
    k: int

    @staticmethod
    def random(tokens: int, size: int, inner: int, experts: int, k: int, device: str, dtype: torch.dtype) -> Layer:
        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, device=device, dtype=torch.float32) * scale).to(dtype)

        return Layer(
            normal(tokens, size), torch.randn(tokens, experts, device=device),
            normal(experts, 2 * inner, size, scale=size**-0.5), normal(experts, size, inner, scale=inner**-0.5), k,
        )  # fmt: skip

    @property
    def forward_flops(self) -> float:
        return 6.0 * len(self.x) * self.k * self.x.shape[1] * self.down.shape[-1]

    def ours(self) -> Tensor:
        routing = F.route(self.logits, self.k)
        return F.moe_mlp(self.x, routing, self.gate_up, self.down, transposed=True)

    def grouped_mm(self) -> Tensor:
        """torch's grouped product, between copies into the order of experts and back."""
        weights, chosen = self.logits.softmax(-1).topk(self.k)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        tokens = order // self.k
        ends = torch.bincount(chosen.flatten(), minlength=len(self.down)).cumsum(0).int()
        v = torch._grouped_mm(self.x[tokens], self.gate_up.mT, offs=ends)
        gate, up = v.chunk(2, -1)
        y = torch._grouped_mm(torch.nn.functional.silu(gate) * up, self.down.mT, offs=ends)
        y = y * weights.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(self.x).index_add_(0, tokens, y)

    def loop(self) -> Tensor:
        weights, chosen = self.logits.softmax(-1).topk(self.k)
        weights = (weights / weights.sum(-1, keepdim=True)).to(self.x.dtype)
        output = torch.zeros_like(self.x)
        for expert in range(len(self.down)):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            gate, up = torch.nn.functional.linear(self.x[token], self.gate_up[expert]).chunk(2, -1)
            y = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, self.down[expert])
            output.index_add_(0, token, y * weights[token, slot, None])
        return output

    def saved(self) -> str:
        """What a forward keeps for the backward besides weights, against the least: x, gates and ups, the routing."""
        kept: dict[int, int] = {}
        weights = {self.gate_up.data_ptr(), self.down.data_ptr()}

        def note(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in weights:
                kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        leaves = [self.x, self.gate_up, self.down]
        routing = F.route(self.logits, self.k)
        for leaf in leaves:
            leaf.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            F.moe_mlp(self.x, routing, self.gate_up, self.down, transposed=True)
        for leaf in leaves:
            leaf.requires_grad_(False)
        indices = (routing.weights, routing.experts, routing.offsets, routing.token_of_row, routing.row_of_token)
        least = self.x.nbytes + len(self.x) * self.k * self.gate_up.shape[1] * self.x.element_size()
        least += sum(tensor.nbytes for tensor in indices)
        return f"{sum(kept.values()) / 1e6:.1f} MB, {sum(kept.values()) / least:.3f}x of the least"

    def with_gradients(self, forward: Callable[[], Tensor]) -> Way:
        leaves = [self.x, self.logits, self.gate_up, self.down]
        upstream = torch.randn_like(self.x)

        def step() -> Any:
            for leaf in leaves:
                leaf.requires_grad_()
            gradients = torch.autograd.grad(forward(), leaves, upstream)
            for leaf in leaves:
                leaf.requires_grad_(False)
            return gradients

        return step

    def backward_alone(self, forward: Callable[[], Tensor]) -> Way:
        leaves = [self.x, self.logits, self.gate_up, self.down]
        upstream = torch.randn_like(self.x)
        kept: list[Tensor] = []

        def step() -> Any:
            if not kept:
                for leaf in leaves:
                    leaf.requires_grad_()
                kept.append(forward())
            return torch.autograd.grad(kept[0], leaves, upstream, retain_graph=True)

        return step


def layers(device: str) -> Iterator[tuple[str, Layer]]:
    sizes = {"n1024 E64 K4": (32768, 4096, 1024, 64, 4), "fine-grained n256 E256 K16": (32768, 4096, 256, 256, 16)}
    if device == "cpu":
        sizes = {"E8 K2 T512 d1024 n2048": (512, 1024, 2048, 8, 2)}
    for name, size in sizes.items():
        for dtype in [torch.bfloat16] if device == "cuda" else [torch.bfloat16, torch.float32]:
            title = f"layer {name} {str(dtype).removeprefix('torch.')}"
            yield title, Layer.random(*size, device, dtype)


def layer_cases(device: str) -> list[Case]:
    cases = []
    for title, layer in layers(device):
        if device == "cpu":
            ways: dict[str, Callable[[], Tensor]] = {"ours": layer.ours, "loop": layer.loop}
        else:
            ways = {"ours": layer.ours, "grouped_mm": layer.grouped_mm, "compiled": torch.compile(layer.grouped_mm)}
        cases.append(Case(f"{title} forward", layer.forward_flops, dict(ways)))
        steps = {way: layer.with_gradients(call) for way, call in ways.items()}
        cases.append(Case(f"{title} forward+backward", 3 * layer.forward_flops, steps, 0))
        alone = {way: layer.backward_alone(call) for way, call in ways.items() if way != "compiled"}
        cases.append(Case(f"{title} backward", 2 * layer.forward_flops, alone, 0))
    return cases


def product_cases() -> list[Case]:
    """The pieces of the first layer: even groups, so that both sides know them."""
    tokens, size, inner, experts, k = 32768, 4096, 1024, 64, 4
    layer = Layer.random(tokens, size, inner, experts, k, "cuda", torch.bfloat16)
    routing = F.route(layer.logits, k)
    ends, gather = routing.offsets, routing.token_of_row
    rows, hidden = layer.x[gather.long()], torch.randn(tokens * k, inner, device="cuda").bfloat16()
    grad = torch.randn(tokens * k, 2 * inner, device="cuda").bfloat16()
    up, down = layer.gate_up.mT, layer.down.mT
    flops = 4.0 * tokens * k * size * inner
    weight = torch.ops.kernel_pytorch.grouped_matmul_weight
    theirs, stored = torch._grouped_mm, up.contiguous()
    return [
        Case("product up, gathered", flops, {
            "ours": lambda: F.grouped_matmul(layer.x, up, ends, gather=gather),
            "grouped_mm": lambda: theirs(layer.x[gather.long()], up, offs=ends)}),
        Case("product up, gathered, gate in the epilogue", flops, {
            "ours": lambda: F.grouped_matmul(layer.x, up, ends, gather=gather, activation="swiglu")}, 0),
        Case("product up, rows as they lie", flops, {
            "ours": lambda: F.grouped_matmul(rows, up, ends), "grouped_mm": lambda: theirs(rows, up, offs=ends)}),
        Case("product up, weight [E, K, N]", flops, {
            "ours": lambda: F.grouped_matmul(rows, stored, ends),
            "grouped_mm": lambda: theirs(rows, stored, offs=ends)}),
        Case("product down", flops / 2, {
            "ours": lambda: F.grouped_matmul(hidden, down, ends),
            "grouped_mm": lambda: theirs(hidden, down, offs=ends)}),
        Case("weight gradient of up, gathered", flops, {
            "ours": lambda: weight(grad, layer.x, ends, None, gather, None),
            "grouped_mm": lambda: theirs(grad.mT, rows, offs=ends)}),
        Case("weight gradient of down, gathered", flops / 2, {
            "ours": lambda: weight(layer.x, hidden, ends, gather, None, None),
            "grouped_mm": lambda: theirs(rows.mT, hidden, offs=ends)}),
        Case("combine", 0, {"ours": lambda: F.moe_combine(rows, routing)}, 0),
    ]  # fmt: skip


def routing_cases(device: str) -> list[Case]:
    cases = []
    for tokens, experts, k in ((32768, 256, 8), (32768, 64, 4), (8, 256, 8)):
        logits = torch.randn(tokens, experts, device=device)

        def torchs(logits: Tensor = logits, k: int = k) -> Any:
            weights, chosen = logits.softmax(-1).topk(k)
            order = chosen.flatten().argsort(stable=True)
            return weights / weights.sum(-1, keepdim=True), order, torch.bincount(
                chosen.flatten(), minlength=logits.shape[-1]).cumsum(0)  # fmt: skip

        ways = {"ours": lambda logits=logits, k=k: F.route(logits, k), "topk, argsort": torchs}
        cases.append(Case(f"routing {tokens}x{experts} top {k}", 0, ways, 0))
        if device == "cuda":
            cases.append(Case(f"routing {tokens}x{experts} top {k}, a graph", 0, {"ours": captured(ways["ours"])}, 0))
    return cases


def captured(call: Way) -> Way:
    """The call as a CUDA graph: what the device does, without the host's time."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def float8_cases() -> list[Case]:
    """Eight groups of 4096 rows by 4096 x 7168."""
    rows, n, k, groups = 32768, 4096, 7168, 8
    x, weight = (torch.randn(shape, device="cuda").to(torch.float8_e4m3fn) for shape in ((rows, k), (groups, n, k)))
    ends = (torch.arange(groups, device="cuda").int() + 1) * (rows // groups)

    def scales(*shape: int) -> Tensor:
        return torch.rand(shape, device="cuda") + 0.5

    of_rows, of_weight = scales(rows), scales(groups, n)
    blocks = scales(k // 128, rows).t(), scales(groups, n // 128, k // 128)
    one, each = scales(1), scales(groups)
    shuffled = torch.randperm(rows, device="cuda").int()
    product = F.scaled_grouped_matmul

    def theirs() -> Tensor:
        return torch._scaled_grouped_mm(x, weight.mT, of_rows, of_weight, offs=ends, out_dtype=torch.bfloat16)

    flops = 2.0 * rows * n * k
    return [
        Case("FP8 product, scales of matrices", flops, {"ours": lambda: product(x, weight, one, each, ends)}),
        Case("FP8 product, scales of matrices, short sums", flops, {
            "ours": lambda: product(x, weight, one, each, ends, accurate=False)}),
        Case("FP8 product, scales of rows", flops, {
            "ours": lambda: product(x, weight, of_rows, of_weight, ends), "grouped_mm": theirs}),
        Case("FP8 product, 1x128 and 128x128 blocks", flops, {"ours": lambda: product(x, weight, *blocks, ends)}),
        Case("FP8 product, 1x128 and 128x128 blocks, gathered", flops, {
            "ours": lambda: product(x, weight, *blocks, ends, gather=shuffled)}),
    ]  # fmt: skip


def decode_cases() -> list[Case]:
    """Eight tokens with eight experts each, no two of which are the same."""
    tokens, k, size, inner, experts = 8, 8, 7168, 2048, 256
    logits = torch.full((tokens, experts), -20.0, device="cuda")
    for token in range(tokens):
        logits[token, token * k : (token + 1) * k] = torch.rand(k, device="cuda")
    routing = F.route(logits, k)
    elements = 3.0 * tokens * k * size * inner
    x = torch.randn(tokens, size, device="cuda").bfloat16()
    gate_up, down = (
        torch.empty(shape, device="cuda", dtype=torch.bfloat16).uniform_(-0.02, 0.02)
        for shape in ((experts, 2 * inner, size), (experts, size, inner))
    )
    layer = captured(lambda: F.moe_mlp(x, routing, gate_up, down, transposed=True))
    cases = [Case("decode 8 tokens, bf16 layer", 0, {"ours": layer}, 0, 2 * elements)]
    codes = [weight.to(torch.float8_e4m3fn) for weight in (gate_up, down)]
    rows = torch.randn(tokens, size, device="cuda").to(torch.float8_e4m3fn)
    hidden = torch.randn(tokens * k, inner, device="cuda").to(torch.float8_e4m3fn)

    def scales(*shape: int) -> Tensor:
        return torch.rand(shape, device="cuda") + 0.5

    factors = [
        scales(tokens, size // 128), scales(experts, 2 * inner // 128, size // 128),
        scales(tokens * k, inner // 128), scales(experts, size // 128, inner // 128),
    ]  # fmt: skip

    def products() -> None:
        ends, gather = routing.offsets, routing.token_of_row
        F.scaled_grouped_matmul(rows, codes[0], factors[0], factors[1], ends, gather=gather)
        F.scaled_grouped_matmul(hidden, codes[1], factors[2], factors[3], ends)

    cases.append(Case("decode 8 tokens, both FP8 products, blocks", 0, {"ours": captured(products)}, 0, elements))
    memory = torch.empty(2**29, dtype=torch.int64, device="cuda")
    cases.append(Case("reading 4 GiB (torch.max)", 0, {"ours": memory.max}, 0, 2.0**32))
    return cases


def seconds_of(call: Way, device: str, calls: int) -> float:
    if device == "cpu":
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        begin = clock()
        for _ in range(calls):
            call()
        return (clock() - begin) / calls
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / calls


def run(case: Case, device: str, seconds: float) -> dict[str, str]:
    results = {way: call() for way, call in case.ways.items()}  # and compiles
    ours = results.pop("ours")
    for way, theirs in results.items() if case.tolerance else ():
        error = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
        if error > case.tolerance:
            raise SystemExit(f"{case.name}: ours differs from {way} by {float(error):.3g} of the largest value")
    results.clear()
    samples: dict[str, list[float]] = {way: [] for way in case.ways}
    one = seconds_of(case.ways["ours"], device, 1)
    calls = max(1, min(50, int(0.02 / max(one, 1e-6))))
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(samples["ours"]) < 3:
        for way, call in case.ways.items():
            samples[way].append(seconds_of(call, device, calls))
    row = dict.fromkeys(COLUMNS, "-") | {"what": case.name}
    for way, times in samples.items():
        median = statistics.median(times)
        rate = f", {case.flops / median / 1e12:.{0 if device == 'cuda' else 2}f} TFLOP/s" if case.flops else ""
        rate += f", {case.bytes / median / 1e9:.0f} GB/s" if case.bytes else ""
        row[way] = f"{median * 1e6:.1f} µs{rate}"
    print("; ".join(f"{name} {text}" if name != "what" else text for name, text in row.items()), flush=True)
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
    makers: list[Callable[[], list[Case]]] = [lambda: routing_cases(options.device)]
    makers += [product_cases, float8_cases, decode_cases] if options.device == "cuda" else []
    makers += [lambda: layer_cases(options.device)]
    wanted = [word for word in options.only.split(",") if word]
    rows = []
    for make in makers:
        for case in make():  # of one maker at a time: their weights take much of the memory
            if not wanted or any(word in case.name for word in wanted):
                rows.append(run(case, options.device, options.seconds))
    for title, layer in layers(options.device):
        name = f"{title} saved activations"
        if not wanted or any(word in name for word in wanted):
            rows.append(dict.fromkeys(COLUMNS, "-") | {"what": name, "ours": layer.saved()})
    machine = describe_machine(torch.device(options.device))
    columns = [name for name in COLUMNS if any(row[name] != "-" for row in rows)]
    print_and_store({"machine": machine, "columns": columns, "figures": rows}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
