"""Whether training with 8-bit states arrives where fp32 states do: a small transformer on this project's own documents.

    python benchmarks/optim_convergence.py [--device cuda|cpu] [--steps N] [--dim N] [--layers N] [--way NAME]

The same model, seed and batches for each way: torch's AdamW of fp32 weights; the same with other random weights, which
shows how far equals end apart; bf16 weights with an fp32 master; bf16 weights with compact states, 7 bytes a parameter;
the same states on the host, streamed; fp32 weights with 8-bit states. Losses are compared as the mean over the last
tenth of the steps and on text that none has seen. All runs take their first step, then all their second. On a GPU a
step is a CUDA graph, but for streamed states.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as torch_functional
from fp8_convergence import HELD_OUT, HELD_OUT_BATCHES, Transformer, corpus
from kernel_pytorch.optim import AdamW
from torch import Tensor
from torch_norms import describe_machine

PLAIN = "torch, fp32"


class Way(NamedTuple):
    dtype: torch.dtype
    options: dict[str, Any] | None  # of our AdamW; None: torch's
    seed: int = 0


WAYS = {
    PLAIN: Way(torch.float32, None),
    "torch, fp32, weights 8": Way(torch.float32, None, seed=8),
    "bf16 with master": Way(torch.bfloat16, {"master_weights": True}),
    "compact": Way(torch.bfloat16, {"state": "compact"}),
    "compact, streamed": Way(torch.bfloat16, {"state": "compact", "offload": "stream"}),
    "8bit": Way(torch.float32, {"state": "8bit"}),
}


class Run:
    """One training run, whose every step needs nothing but the device: a step counter, batches by it, rates by it."""

    def __init__(self, way: Way, data: Tensor, options: argparse.Namespace) -> None:
        torch.manual_seed(way.seed)
        self.options, self.data, device = options, data, data.device
        self.model = Transformer(options.dim, options.layers, options.length).to(device, way.dtype)
        self.trained = len(data) - len(data) // HELD_OUT
        generator = torch.Generator().manual_seed(1)
        last = self.trained - options.length - 1
        self.starts = torch.randint(0, last, (options.steps, options.batch, 1), generator=generator).to(device)
        self.places = torch.arange(options.length + 1, device=device)
        step = torch.arange(options.steps)
        warm = ((step + 1) / max(options.steps // 20, 1)).clamp(max=1)
        self.rates = (options.rate * warm * (0.55 + 0.45 * torch.cos(math.pi * step / options.steps))).to(device)
        self.losses = torch.zeros(options.steps, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.rate = torch.zeros((), device=device)
        self.is_captured = device.type == "cuda" and "offload" not in (way.options or {})
        shared: dict[str, Any] = dict(
            lr=self.rate if self.is_captured else options.rate, betas=(0.9, 0.95), weight_decay=0.1
        )
        parameters = list(self.model.parameters())
        self.optimizer: torch.optim.Optimizer
        if way.options is None:
            self.optimizer = torch.optim.AdamW(parameters, capturable=self.is_captured, **shared)
        else:
            self.optimizer = AdamW(parameters, **shared, **way.options)
        self.take = self._captured_step() if self.is_captured else self.take_step

    def loss_at(self, starts: Tensor) -> Tensor:
        rows = self.data[starts + self.places].long()
        with torch.autocast(self.data.device.type, torch.bfloat16, cache_enabled=False):
            logits = self.model(rows[:, :-1])
        return torch_functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    def take_step(self) -> None:
        loss = self.loss_at(self.starts[self.step][0])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.rate.copy_(self.rates[self.step][0])
        if not self.is_captured:
            self.optimizer.param_groups[0]["lr"] = float(self.rate)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.losses[self.step] = loss.detach()
        self.step += 1

    @torch.no_grad()
    def held_out_loss(self) -> float:
        count = HELD_OUT_BATCHES * self.options.batch
        places = torch.linspace(self.trained, len(self.data) - self.options.length - 1, count, device=self.data.device)
        losses = [self.loss_at(starts) for starts in places.long().view(HELD_OUT_BATCHES, -1, 1)]
        return float(torch.stack(losses).mean())

    def _captured_step(self) -> Callable[[], None]:
        """A few steps to warm up and one that is captured, then back to the start."""
        begin = {parameter: parameter.detach().clone() for parameter in self.model.parameters()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.take_step()
            graph = torch.cuda.CUDAGraph()
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                self.take_step()
            with torch.no_grad():
                for parameter, value in begin.items():
                    parameter.copy_(value)
                    for name, state in self.optimizer.state[parameter].items():
                        state.copy_(value) if name == "master" else state.zero_()  # codes of scale 0 are zeros
                self.step.zero_()
        torch.cuda.synchronize()
        return graph.replay


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--limit", type=float, default=1.0, help="percent by which a loss may exceed torch's")
    parser.add_argument("--way", action="append", choices=WAYS, help="only these beside torch's; may be repeated")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    begin = time.perf_counter()
    data = corpus().to(options.device)
    wanted = {PLAIN, *(options.way or WAYS)}
    runs = {name: Run(way, data, options) for name, way in WAYS.items() if name in wanted}
    parameters = sum(parameter.numel() for parameter in runs[PLAIN].model.parameters())
    for _ in range(options.steps):
        for run in runs.values():
            run.take()
    tail = max(options.steps // 10, 1)
    ends = {name: float(run.losses[-tail:].mean()) for name, run in runs.items()}
    unseen = {name: run.held_out_loss() for name, run in runs.items()}
    figures, worst = [], 0.0
    print(f"{parameters / 1e6:.1f} M parameters, {options.steps} steps, {time.perf_counter() - begin:.0f} s")
    for name in runs:
        percents = [100 * (losses[name] / losses[PLAIN] - 1) for losses in (ends, unseen)]
        if WAYS[name].options is not None:
            worst = max(worst, *percents)
        text = f"{ends[name]:.4f} ({percents[0]:+.2f} %), held out {unseen[name]:.4f} ({percents[1]:+.2f} %)"
        print(f"  {name:24} {text}")
        what = f"{parameters / 1e6:.1f} M parameters, {options.steps} steps, loss at the end: {name}"
        figures.append({"what": what, "ours": text, "torch": f"{ends[PLAIN]:.4f}, held out {unseen[PLAIN]:.4f}"})
    if options.output:
        run = {"machine": describe_machine(torch.device(options.device)), "figures": figures[1:]}
        options.output.write_text(json.dumps({"benchmark": "optim_convergence", "runs": [run]}, indent=1) + "\n")
    if worst > options.limit:
        sys.exit(f"optim_convergence: a run ends {worst:.2f} % above torch's; at most {options.limit} % may be")
    return 0


if __name__ == "__main__":
    sys.exit(main())
