"""A part of a graph that matched a pattern, the ways to compute it, and the graph it is in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .affine import Reader
from .nodes import Emitter, Node

Emit = Callable[[Emitter, Callable[[Node], Node]], Sequence[Node]]


@dataclass
class Candidate:
    """A way to compute the outputs of a match: `emit` adds its nodes and returns the new outputs.

    `emit` reads nodes of the model's graph through its second argument, since a trial has a graph of its own.
    `reads` are nodes that it needs besides the inputs of the match. `otherwise`: it is tried only where none before it
    agreed, since it cannot be faster than they.
    """

    name: str
    emit: Emit
    reads: tuple[Node, ...] = ()
    otherwise: bool = False


@dataclass
class Match:
    """Nodes that a pattern would replace. `derived`: inputs whose values in a trial are computed as the model does;
    `indices`: inputs that are random numbers below this one there.
    """

    pattern: str
    nodes: list[Node]
    outputs: list[Node]
    candidates: list[Candidate]
    detail: str = ""
    derived: tuple[Node, ...] = ()
    leaf_values: dict[Node, int] = field(default_factory=dict)
    indices: dict[Node, int] = field(default_factory=dict)
    key: str = ""  # what a choice depends on besides nodes and shapes
    is_random: bool = False  # ways to compute it draw unlike numbers: they are compared with their dropout off


@dataclass
class Refusal:
    """A node that looked like a pattern and is none, with the reason."""

    pattern: str
    node: Node
    reason: str


@dataclass
class Region:
    """A graph that is being rewritten."""

    graph: Any
    mode: Any
    differentiable: set[Node]
    reader: Reader = field(default_factory=Reader)
    folded: dict[Any, Any] = field(default_factory=dict)
    replaced: dict[Node, Node] = field(default_factory=dict)

    def current(self, node: Node) -> Node:
        """The node, or what took its place since a match was found."""
        while node in self.replaced:
            node = self.replaced[node]
        return node

    def wants_gradient(self, nodes: Sequence[Node]) -> bool:
        return any(node in self.differentiable for node in nodes)
