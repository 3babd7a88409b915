"""What the backend did to the graphs of one compilation, to be printed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Line:
    """One place where a pattern was found: `taken` names what replaced it, "" where torch keeps it. `node` is its last
    one, `nodes` is how many it has.
    """

    pattern: str
    node: str
    detail: str
    taken: str
    reason: str
    gain_us: float = 0.0
    nodes: int = 1


@dataclass
class GraphReport:
    """One graph of Dynamo's, with the bodies of its checkpointed regions. `nodes`: of the graph in its canonical form.

    `left`: what Inductor computes in the end, by operation: that no pattern looks for, or none that was taken.
    """

    name: str
    nodes: int = 0
    left: Counter[str] = field(default_factory=Counter)
    lines: list[Line] = field(default_factory=list)
    problem: str = ""

    @property
    def replaced(self) -> Counter[str]:
        return Counter(line.pattern for line in self.lines if line.taken)

    @property
    def replaced_nodes(self) -> int:
        return sum(line.nodes for line in self.lines if line.taken)

    @property
    def gain_us(self) -> float:
        return sum(line.gain_us for line in self.lines)


@dataclass
class CompileReport:
    """All graphs of a compilation. `seconds`: medians of the whole, by compiler, where they were measured."""

    graphs: list[GraphReport] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def replaced(self) -> Counter[str]:
        """How often each pattern was replaced."""
        total: Counter[str] = Counter()
        for graph in self.graphs:
            total.update(graph.replaced)
        return total

    @property
    def predicted_gain_us(self) -> float:
        """What the replaced parts gain by themselves, from their timings."""
        return sum(graph.gain_us for graph in self.graphs)

    @property
    def measured_gain_us(self) -> float | None:
        """What the whole gains over the same compiler without replacements; None where it was not measured."""
        if len(self.seconds) < 2:
            return None
        return (self.seconds["torch"] - self.seconds["kernel_pytorch"]) * 1e6

    def __str__(self) -> str:
        lines = []
        for graph in self.graphs:
            counts = f"{graph.nodes} nodes, {graph.replaced_nodes} replaced"
            lines.append(f"{graph.name}: {counts}" + (f", left as it is: {graph.problem}" * bool(graph.problem)))
            seen = Counter((one.pattern, one.detail, one.taken, one.reason) for one in graph.lines)
            for (pattern, detail, taken, reason), count in seen.items():
                what = f"{pattern} ({detail})" if detail else pattern
                lines.append(f"  {count} x {what}: {f'replaced by {taken}' if taken else 'left to torch'}; {reason}")
            if graph.left:
                shown = ", ".join(f"{count} x {name}" for name, count in graph.left.most_common())
                lines.append(f"  Inductor computes {shown}")
        lines.append(f"predicted gain {self.predicted_gain_us:.1f} us")
        if self.measured_gain_us is not None:
            shown = ", ".join(f"{name} {seconds * 1e6:.1f} us" for name, seconds in self.seconds.items())
            lines.append(f"measured gain {self.measured_gain_us:.1f} us ({shown})")
        return "\n".join(lines)
