"""Our norms against torch's, forward and backward, on every device of this machine.

    python benchmarks/torch_norms.py [--quick] [--compile] [--device cpu|cuda] [--output FILE]

A row is checked before it is timed: ours must equal torch's op on the same values in fp32, within the dtype's rounding.
(torch's own bf16 layer_norm backward on a CPU would not pass: it sums the weight's gradient in bf16.)
`share` is how fast a copy that moves the same bytes runs in the same turns, against ours: 100 % is the memory's speed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import provenance
import torch
import torch.nn.functional as torch_functional
from kernel_pytorch.utils.profiling import count_launches
from measure import Way, buffers_needed, capture_stream, compare, keep_freed_memory
from table import print_table

import kernel_pytorch
from kernel_pytorch import functional

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"fp32": 1e-5, "bf16": 8e-3, "fp16": 1e-3}
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    op: str  # rms_norm, layer_norm, add_rms_norm
    direction: str  # forward, backward
    dtype: str
    rows: int
    columns: int

    def bytes_moved(self) -> int:
        """Read and written at least once; weights and statistics are too small to count."""
        tensors = {"forward": 2, "backward": 3}[self.direction] + (2 if self.op == "add_rms_norm" else 0)
        return tensors * self.rows * self.columns * DTYPES[self.dtype].itemsize


def cpu_cases() -> list[Case]:
    ops = [("rms_norm", "forward"), ("rms_norm", "backward"), ("add_rms_norm", "forward")]
    ops += [("layer_norm", "forward"), ("layer_norm", "backward")]
    return [Case(op, direction, dtype, 1024, 4096) for op, direction in ops for dtype in ("fp32", "bf16")]


def cuda_cases() -> list[Case]:
    shapes = [(16384, 4096), (8192, 8192), (2048, 131072)]
    ops = [("rms_norm", "forward"), ("rms_norm", "backward"), ("add_rms_norm", "forward")]
    ops += [("layer_norm", "forward"), ("layer_norm", "backward")]
    return [Case(op, direction, "bf16", *shape) for shape in shapes for op, direction in ops]


def ours(case: Case) -> Callable[..., object]:
    return {
        "rms_norm": lambda x, residual, weight, bias: functional.rms_norm(x, weight, 1e-6),
        "add_rms_norm": lambda x, residual, weight, bias: functional.rms_norm(x, weight, 1e-6, residual=residual),
        "layer_norm": lambda x, residual, weight, bias: functional.layer_norm(x, weight, bias, 1e-5),
    }[case.op]


def torchs(case: Case) -> Callable[..., object]:
    shape = (case.columns,)

    def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Tensors:
        total = x + residual
        return torch_functional.rms_norm(total, shape, weight, 1e-6), total

    return {
        "rms_norm": lambda x, residual, weight, bias: torch_functional.rms_norm(x, shape, weight, 1e-6),
        "add_rms_norm": add_rms_norm,
        "layer_norm": lambda x, residual, weight, bias: torch_functional.layer_norm(x, shape, weight, bias, 1e-5),
    }[case.op]


def first(result: object) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result  # type: ignore[return-value]


def backward_way(function: Callable[..., object], inputs: list[Tensors], grads: list[torch.Tensor]) -> Way:
    """The gradients of x, weight (and bias) through a graph recorded before the clock starts."""
    on_gpu = grads[0].is_cuda
    if on_gpu:
        torch.cuda.synchronize()
    with torch.cuda.stream(capture_stream()) if on_gpu else contextlib.nullcontext():
        outputs = [first(function(*tensors)) for tensors in inputs]
    wanted = [[tensor for tensor in tensors if tensor.requires_grad] for tensors in inputs]

    def way(buffer: int) -> object:
        return torch.autograd.grad(outputs[buffer], wanted[buffer], grads[buffer], retain_graph=True, allow_unused=True)

    return way


def forward_way(function: Callable[..., object], inputs: list[Tensors]) -> Way:
    def way(buffer: int) -> object:
        with torch.no_grad():
            return function(*inputs[buffer])

    return way


def make_inputs(case: Case, buffers: int, device: torch.device) -> tuple[list[Tensors], list[torch.Tensor]]:
    """The same values at each call; gradients of the output for a backward alone."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator).to(DTYPES[case.dtype])

    needs_grad = case.direction == "backward"
    weight, bias = random(case.columns).requires_grad_(needs_grad), random(case.columns).requires_grad_(needs_grad)
    residuals = case.op == "add_rms_norm"
    shape = (case.rows, case.columns)
    inputs = [
        (random(*shape).requires_grad_(needs_grad), random(*shape) if residuals else weight, weight, bias)
        for _ in range(buffers)
    ]
    return inputs, [random(*shape) for _ in range(buffers)] if needs_grad else []


def make_ways(case: Case, device: torch.device, with_compile: bool) -> tuple[dict[str, Way], int]:
    buffers = buffers_needed(case.bytes_moved(), device)
    functions = {"ours": ours(case), "torch": torchs(case)}
    if with_compile:
        functions["torch.compile"] = torch.compile(torchs(case))
    first = make_inputs(case, buffers, device)
    # A replay on a GPU goes over all buffers and leaves nothing in its cache for the next way.
    shared = device.type == "cuda"
    ways: dict[str, Way] = {}
    for name, function in functions.items():
        inputs, grads = first if shared or name == "ours" else make_inputs(case, buffers, device)
        ways[name] = backward_way(function, inputs, grads) if grads else forward_way(function, inputs)
    exact_inputs = tuple(tensor.detach().float().requires_grad_(tensor.requires_grad) for tensor in first[0][0])
    if first[1]:
        exact = backward_way(torchs(case), [exact_inputs], [first[1][0].float()])(0)
    else:
        exact = forward_way(torchs(case), [exact_inputs])(0)
    check(case, exact, ways["ours"](0))
    half = case.bytes_moved() // 2
    sources = [torch.randint(0, 255, (half,), dtype=torch.uint8, device=device) for _ in range(buffers)]
    targets = [torch.zeros_like(source) for source in sources]
    ways["copy"] = lambda buffer: targets[buffer].copy_(sources[buffer])
    return ways, buffers


def check(case: Case, exact: object, actual: object) -> None:
    for theirs, mine in zip(*(r if isinstance(r, tuple) else (r,) for r in (exact, actual)), strict=True):
        if theirs is None or mine is None:
            continue
        scale = theirs.abs().max().clamp(min=1)
        error = ((theirs - mine.float()).abs().max() / scale).item()
        if not error <= TOLERANCE[case.dtype]:
            sys.exit(f"torch_norms: {case}: ours is {error:.1e} from exact, the limit is {TOLERANCE[case.dtype]:.0e}")


def launches_of(ways: dict[str, Way], device: torch.device) -> dict[str, int]:
    """The kernels of ours that one warm call launches, by the library's own counter; nothing to tell of on a CPU."""
    return {"launches": count_launches(ways["ours"], 0).kernels} if device.type == "cuda" else {}


def run_case(case: Case, device: torch.device, seconds: float, with_compile: bool) -> dict[str, object]:
    ways, buffers = make_ways(case, device, with_compile)
    timings = compare(ways, buffers, device, seconds)
    mine = timings["ours"].median_us
    return {
        **asdict(case),
        **launches_of(ways, device),
        "device": device.type,
        "bytes": case.bytes_moved(),
        "buffers": buffers,
        "timings": {name: asdict(timing) for name, timing in timings.items()},
        "share": timings["copy"].median_us / mine,
        "speedup": timings["torch"].median_us / mine,
    }


def describe_machine(device: torch.device) -> dict[str, object]:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        lines = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        name = lines[0].split(":", 1)[1].strip() if lines else platform.processor()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "kernel_pytorch": kernel_pytorch.__version__,
        **provenance.record(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of a second a way instead of one")
    parser.add_argument("--compile", action="store_true", help="torch.compile as a third peer")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="only this one; by default every one there is")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch_norms: --device cuda: torch sees no CUDA device here")
    keep_freed_memory()
    seconds = 0.25 if arguments.quick else 1.0
    devices = [arguments.device] if arguments.device else ["cpu"] + ["cuda"] * torch.cuda.is_available()
    runs = []
    for name in devices:
        device = torch.device(name)
        cases = cuda_cases() if name == "cuda" else cpu_cases()
        rows = []
        for i, case in enumerate(cases):
            if sys.stderr.isatty():
                print(f"\r{name}: {i + 1} of {len(cases)} ", end="", file=sys.stderr, flush=True)
            rows.append(run_case(case, device, seconds, arguments.compile))
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
        runs.append({"machine": describe_machine(device), "rows": rows})
        print_table(runs[-1])
    if arguments.output:
        arguments.output.write_text(json.dumps({"benchmark": "torch_norms", "runs": runs}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
