"""What more devices would do to a training step: a prediction from one device's measured step and stated links.

Every device keeps its batch (weak scaling). Communication hides behind computation, except that of one block: the
first gather and the last reduction have nothing to hide behind. So

    step = max(computation, communication) + communication / blocks

Communication, by device, of P bytes of parameters and G of gradients on n devices, g of them in a node:

    ddp    2 G (n - 1) / n                                      an all-reduce
    fsdp   (2 P + G) (n - 1) / n                                two gathers, a reduction
    hsdp   (2 P + G) (g - 1) / g in the node, 2 G / g (n / g - 1) / (n / g) between nodes

over the link of the node, or between nodes over that of the network; and for every block log2(n) messages' latency.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

STRATEGIES = ("ddp", "fsdp", "hsdp")


@dataclass(frozen=True)
class Links:
    """What connects devices, by device and direction. The defaults are a node of eight H100 or H200: data sheet, not
    measured.

    Args:
        per_node: devices in a node.
        node_bytes_per_second: between two of them.
        network_bytes_per_second: out of the node, for each device.
        latency_seconds: of a message between nodes; within one, a fifth of it.
    """

    per_node: int = 8
    node_bytes_per_second: float = 450e9
    network_bytes_per_second: float = 50e9
    latency_seconds: float = 10e-6

    def __post_init__(self) -> None:
        if min(self.per_node, self.node_bytes_per_second, self.network_bytes_per_second) <= 0:
            raise ValueError(f"Links: {self} has a size or rate that is not positive")


@dataclass(frozen=True)
class MeasuredStep:
    """A training step on one device.

    Args:
        seconds: measured.
        tokens: of the step (or samples: what the table counts).
        parameter_bytes, gradient_bytes: of the whole model.
        state_bytes: of the optimizer.
        blocks: that are gathered one at a time.
    """

    seconds: float
    tokens: int
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int = 0
    blocks: int = 1

    def __post_init__(self) -> None:
        if not self.seconds > 0 or self.tokens < 1 or self.blocks < 1:
            raise ValueError(f"MeasuredStep: {self} needs positive seconds, tokens and blocks")


@dataclass(frozen=True)
class ScalingRow:
    """A prediction. `memory_bytes` are parameters, gradients and states on each device, without activations."""

    devices: int
    step_seconds: float
    communication_seconds: float
    tokens_per_second: float
    efficiency: float
    memory_bytes: float


@dataclass(frozen=True)
class ScalingEstimate:
    """Predicted rows; as text, a table that says so."""

    measured: MeasuredStep
    links: Links
    strategy: str
    rows: list[ScalingRow] = field(default_factory=list)

    def __str__(self) -> str:
        step, links = self.measured, self.links
        head = (
            f"Predicted, not measured: {self.strategy}, from one device's step of {step.seconds * 1e3:.4g} ms and "
            f"{step.tokens:,} tokens;\nnodes of {links.per_node}, {links.node_bytes_per_second / 1e9:g} GB/s inside, "
            f"{links.network_bytes_per_second / 1e9:g} GB/s per device between them"
        )
        lines = [
            f"{'devices':>8}  {'step':>10}  {'communication':>13}  {'tokens/s':>12}  {'efficiency':>10}  {'memory':>10}"
        ]
        lines += [
            f"{row.devices:>8}  {row.step_seconds * 1e3:>7.4g} ms  {row.communication_seconds * 1e3:>10.4g} ms  "
            f"{row.tokens_per_second:>12,.0f}  {row.efficiency:>10.1%}  {row.memory_bytes / 1e9:>7.3g} GB"
            for row in self.rows
        ]
        return "\n".join([head, *lines])


def measure_step(
    model: nn.Module,
    step: Callable[[], object],
    *,
    tokens: int,
    optimizer: torch.optim.Optimizer | None = None,
    blocks: int | None = None,
    turns: int = 5,
) -> MeasuredStep:
    """Times `step` on this device (the median of `turns`, after two to warm up) and counts the model's bytes.

    Args:
        tokens: that a step works on.
        optimizer: whose states are counted, after the steps.
        blocks: None: the elements of the outermost ModuleList.
    """
    device = next(model.parameters()).device

    def once() -> float:
        begin = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    for _ in range(2):
        once()
    seconds = statistics.median(once() for _ in range(turns))
    lists = (len(module) for module in model.modules() if isinstance(module, nn.ModuleList))
    states = optimizer.state.values() if optimizer is not None else ()
    return MeasuredStep(
        seconds,
        tokens,
        sum(parameter.nbytes for parameter in model.parameters()),
        sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad),
        sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor)),
        next(lists, 1) if blocks is None else blocks,
    )


def estimate_scaling(
    measured: MeasuredStep,
    *,
    strategy: str = "fsdp",
    links: Links | None = None,
    devices: Sequence[int] = (8, 16, 32, 64, 128, 256, 512, 1024),
) -> ScalingEstimate:
    """Predicts steps on more devices; this module's text has the formula. Nothing is measured here.

    Args:
        measured: what `measure_step` gives.
        strategy: "ddp", "fsdp" or "hsdp" (fsdp in each node, replicas between nodes).
        links: of the machine that is asked about.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"estimate_scaling: strategy is {strategy!r}; it is one of {', '.join(STRATEGIES)}")
    chosen = links or Links()
    rows = [_row(measured, strategy, chosen, count) for count in devices]
    return ScalingEstimate(measured, chosen, strategy, rows)


def _row(step: MeasuredStep, strategy: str, links: Links, devices: int) -> ScalingRow:
    if devices < 1:
        raise ValueError(f"estimate_scaling: {devices} devices; there is at least one")
    inside, nodes = min(devices, links.per_node), math.ceil(devices / links.per_node)
    gathered, reduced = 2 * step.parameter_bytes + step.gradient_bytes, 2 * step.gradient_bytes
    if strategy == "hsdp":
        seconds = gathered * _share(inside) / links.node_bytes_per_second
        seconds += reduced / inside * _share(nodes) / links.network_bytes_per_second
        sharded = inside
    else:
        rate = links.node_bytes_per_second if nodes == 1 else links.network_bytes_per_second
        seconds = (reduced if strategy == "ddp" else gathered) * _share(devices) / rate
        sharded = 1 if strategy == "ddp" else devices
    latency = links.latency_seconds * (1 if nodes > 1 else 0.2)
    seconds += step.blocks * latency * math.log2(devices)
    total = max(step.seconds, seconds) + seconds / step.blocks
    return ScalingRow(
        devices,
        total,
        seconds,
        devices * step.tokens / total,
        step.seconds / total,
        (step.parameter_bytes + step.gradient_bytes + step.state_bytes) / sharded,
    )


def _share(members: int) -> float:
    """Of its bytes, what a member of a ring sends."""
    return (members - 1) / members
