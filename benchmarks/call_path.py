"""Where the microseconds of a tiny call go: Python, torch's dispatch and allocation, our core, the driver's launch.

python benchmarks/call_path.py      with build/kernel_pytorch_tests beside it, also the parts below torch

Each line is the quickest of many short turns, after which the device is idle: what the host pays, not what waits in a
full queue. The second column is torch.nn.functional's, where there is one.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as torch_functional

from kernel_pytorch import functional

TESTS = Path(__file__).resolve().parent.parent / "build" / "kernel_pytorch_tests"


def microseconds(call: Callable[[], object], device: str, calls: int = 100, turns: int = 60) -> float:
    best = float("inf")
    for _ in range(turns):
        begin = time.perf_counter_ns()
        for _ in range(calls):
            call()
        elapsed = time.perf_counter_ns() - begin
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, elapsed / calls / 1e3)
    return best


def show(device: str, what: str, ours: Callable[[], object], theirs: Callable[[], object] | None = None) -> None:
    line = f"call path, {device}: {what:<52} {microseconds(ours, device):6.2f} us"
    if theirs is not None:
        line += f"   torch {microseconds(theirs, device):6.2f} us"
    print(line, flush=True)


def walk(device: str) -> None:
    overload = torch.ops.kernel_pytorch.rms_norm.default
    backward = torch.ops.kernel_pytorch.rms_norm_backward.default._op
    x, weight, grad = (
        torch.randn(4, 64, device=device),
        torch.randn(64, device=device),
        torch.randn(4, 64, device=device),
    )
    rstd, output = torch.ones(4, device=device), torch.empty(4, 64, device=device)
    x_leaf, weight_leaf = x.clone().requires_grad_(), weight.clone().requires_grad_()
    leaves = (x_leaf, weight_leaf)

    def ours() -> torch.Tensor:
        return functional.rms_norm(x_leaf, weight_leaf, 1e-6)

    def theirs() -> torch.Tensor:
        return torch_functional.rms_norm(x_leaf, (64,), weight_leaf, 1e-6)

    def again(made: torch.Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(made, leaves, grad, retain_graph=True)

    show(
        device,
        "rms_norm(x, weight)",
        lambda: functional.rms_norm(x, weight, 1e-6),
        lambda: torch_functional.rms_norm(x, (64,), weight, 1e-6),
    )
    show(device, "the op itself", lambda: overload._op(x, weight, 1e-6, 0.0))
    show(device, "an empty tensor like x", lambda: torch.empty_strided((4, 64), (64, 1), device=x.device))
    show(device, "torch.neg(x, out=y): one launch, nothing allocated", lambda: torch.neg(x, out=output))
    show(device, "rms_norm with gradients, forward", ours, theirs)
    show(device, "backward alone", again(ours()), again(theirs()))
    show(device, "the backward op itself", lambda: backward(grad, x, weight, rstd, None, 0.0, True, True))
    show(device, "forward and backward", lambda: again(ours())(), lambda: again(theirs())())
    with torch.autograd.set_multithreading_enabled(False):
        show(
            device, "forward and backward, no thread of autograd's", lambda: again(ours())(), lambda: again(theirs())()
        )


def main() -> int:
    walk("cpu")
    if torch.cuda.is_available():
        walk("cuda")
    if not TESTS.exists():
        print(f"{TESTS} is not there: nothing to say about the parts below torch", file=sys.stderr)
        return 0
    done = subprocess.run([TESTS, "--gtest_filter=CallPath.*"], capture_output=True, text=True)
    print("".join(line + "\n" for line in done.stdout.splitlines() if line.startswith("call path")), end="")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
