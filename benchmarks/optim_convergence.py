"""Whether training with 8-bit states arrives where fp32 states do: a small transformer on this project's own documents.

    python benchmarks/optim_convergence.py [--device cuda|cpu] [--steps N] [--dim N] [--seeds N] [--way NAME]

Ways: torch's AdamW of fp32 weights; bf16 weights with an fp32 master; bf16 weights with compact states, 7 bytes a
parameter; the same states on the host, streamed; fp32 weights with 8-bit states. Every way trains once for each seed,
which makes the first weights and the order of the batches. Two losses are compared, the mean over the last tenth of the
steps and that of text which none has seen, with torch's loss of the same seed: other weights alone move a loss by more
than the states do. What counts is the mean of these paired differences over the seeds; its standard error says how well
it is known. All runs take their first step, then all their second. On a GPU a step is a CUDA graph on a stream of its
own; of streamed states all but the optimizer's part.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
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


WAYS = {
    PLAIN: Way(torch.float32, None),
    "bf16 with master": Way(torch.bfloat16, {"master_weights": True}),
    "compact": Way(torch.bfloat16, {"state": "compact"}),
    "compact, streamed": Way(torch.bfloat16, {"state": "compact", "offload": "stream"}),
    "8bit": Way(torch.float32, {"state": "8bit"}),
}


class Run:
    """One training run, whose every step needs nothing but the device: a step counter, batches by it, rates by it."""

    def __init__(self, way: Way, seed: int, data: Tensor, options: argparse.Namespace) -> None:
        torch.manual_seed(seed)
        self.options, self.data, device = options, data, data.device
        self.model = Transformer(options.dim, options.layers, options.length).to(device, way.dtype)
        self.trained = len(data) - len(data) // HELD_OUT
        generator = torch.Generator().manual_seed(1 + seed)
        last = self.trained - options.length - 1
        self.starts = torch.randint(0, last, (options.steps, options.batch, 1), generator=generator).to(device)
        self.places = torch.arange(options.length + 1, device=device)
        step = torch.arange(options.steps)
        warm = ((step + 1) / max(options.steps // 20, 1)).clamp(max=1)
        rates = options.rate * warm * (0.55 + 0.45 * torch.cos(math.pi * step / options.steps))
        self.rates, self.host_rates = rates.to(device), iter(rates.tolist())
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
        if self.is_captured:
            self.take = self._captured(self.take_step)
        elif device.type == "cuda":
            backward = self._captured(self.backward)
            self.take = lambda: self._take_after(backward)
        else:
            self.take = self.take_step

    def loss_at(self, starts: Tensor) -> Tensor:
        rows = self.data[starts + self.places].long()
        with torch.autocast(self.data.device.type, torch.bfloat16, cache_enabled=False):
            logits = self.model(rows[:, :-1])
        return torch_functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    def backward(self) -> None:
        """Gradients, the rate and what is recorded of a step."""
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.loss_at(self.starts[self.step][0])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.rate.copy_(self.rates[self.step][0])
        self.losses[self.step] = loss.detach()
        self.step += 1

    def take_step(self) -> None:
        self.backward()
        if not self.is_captured:
            self.optimizer.param_groups[0]["lr"] = next(self.host_rates)
        self.optimizer.step()

    def _take_after(self, backward: Callable[[], None]) -> None:
        backward()
        with torch.cuda.stream(self.stream):
            self.optimizer.param_groups[0]["lr"] = next(self.host_rates)
            self.optimizer.step()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        count = HELD_OUT_BATCHES * self.options.batch
        places = torch.linspace(self.trained, len(self.data) - self.options.length - 1, count, device=self.data.device)
        losses = [self.loss_at(starts) for starts in places.long().view(HELD_OUT_BATCHES, -1, 1)]
        return float(torch.stack(losses).mean())

    def _captured(self, run: Callable[[], None]) -> Callable[[], None]:
        """A few runs to warm up and one that is captured, then back to the start."""
        begin = {parameter: parameter.detach().clone() for parameter in self.model.parameters()}
        self.stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                run()
            graph = torch.cuda.CUDAGraph()
            self.stream.synchronize()
            with torch.cuda.graph(graph, stream=self.stream):
                run()
            with torch.no_grad():
                for parameter, value in begin.items():
                    parameter.copy_(value)
                    for name, state in self.optimizer.state[parameter].items():
                        state.copy_(value) if name == "master" else state.zero_()  # codes of scale 0 are zeros
                self.step.zero_()
        torch.cuda.synchronize()

        def replay() -> None:
            with torch.cuda.stream(self.stream):
                graph.replay()

        return replay


class Paired(NamedTuple):
    """Percent by which losses exceed torch's of the same seed."""

    mean: float
    error: float  # the mean's standard error; infinite for one seed

    @staticmethod
    def of(losses: list[float], plain: list[float]) -> Paired:
        return Paired.of_percents([100 * (one / other - 1) for one, other in zip(losses, plain, strict=True)])

    @staticmethod
    def of_percents(percents: list[float]) -> Paired:
        count = len(percents)
        error = statistics.stdev(percents) / math.sqrt(count) if count > 1 else math.inf
        return Paired(statistics.mean(percents), error)

    def __str__(self) -> str:
        return f"{self.mean:+.3f} % ± {self.error:.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--limit", type=float, default=0.3, help="percent by which a mean difference may exceed 0")
    parser.add_argument("--way", action="append", choices=WAYS, help="only these beside torch's; may be repeated")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    begin = time.perf_counter()
    data = corpus().to(options.device)
    wanted = [name for name in WAYS if name in {PLAIN, *(options.way or WAYS)}]
    seeds = range(options.seeds)
    runs = {(name, seed): Run(WAYS[name], seed, data, options) for name in wanted for seed in seeds}
    parameters = sum(parameter.numel() for parameter in runs[PLAIN, 0].model.parameters())
    for _ in range(options.steps):
        for run in runs.values():
            run.take()
    if data.is_cuda:
        torch.cuda.synchronize()
    tail = max(options.steps // 10, 1)
    ends = {name: [float(runs[name, seed].losses[-tail:].mean()) for seed in seeds] for name in wanted}
    unseen = {name: [runs[name, seed].held_out_loss() for seed in seeds] for name in wanted}
    spread = (
        [100 * statistics.stdev(kept[PLAIN]) / statistics.mean(kept[PLAIN]) for kept in (ends, unseen)]
        if (options.seeds > 1)
        else [math.inf, math.inf]
    )
    figures, above = [], []
    size = f"{parameters / 1e6:.1f} M parameters, {options.steps} steps"
    print(
        f"{size}, {options.seeds} seeds, {time.perf_counter() - begin:.0f} s; another seed moves torch's losses by "
        f"{spread[0]:.2f} % and, held out, {spread[1]:.2f} % (standard deviation)"
    )
    for name in wanted[1:]:
        pairs = [Paired.of(kept[name], kept[PLAIN]) for kept in (ends, unseen)]
        above += [f"{name} {pair}" for pair in pairs if pair.mean > options.limit]
        text = f"{pairs[0]}, held out {pairs[1]}"
        print(f"  {name:24} {text}", flush=True)
        what = f"{size}, {options.seeds} seeds, loss at the end over torch's: {name}"
        torch_text = f"{statistics.mean(ends[PLAIN]):.4f}, held out {statistics.mean(unseen[PLAIN]):.4f}"
        figures.append(
            {
                "what": what,
                "ours": text,
                "torch": torch_text,
                "losses": ends[name],
                "held_out": unseen[name],
                "torch_losses": ends[PLAIN],
                "torch_held_out": unseen[PLAIN],
            }
        )
    if options.output:
        stored = {
            "machine": describe_machine(torch.device(options.device)),
            "seed_spread_percent": spread,
            "columns": ["what", "ours", "torch"],
            "figures": figures,
        }
        options.output.write_text(json.dumps({"benchmark": "optim_convergence", "runs": [stored]}, indent=1) + "\n")
    if above:
        sys.exit(f"optim_convergence: more than {options.limit} % above torch's: {'; '.join(above)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
