"""Checks who imports whom in python/kernel_pytorch; check_layers.py hands it the table of docs/architecture.md.

Four rules: a module imports its own storey or a lower one; no import, run when a module is loaded, leads back to that
module; an import inside a function says on its line why it is there; modules of the last storey hold nothing but
imports.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = "kernel_pytorch"
FOLDER = f"python/{PACKAGE}/"
# Comments that speak to a tool, not to a person.
_TO_TOOLS = re.compile(r"#\s*(?:isort: ?\w+|type: ignore(?:\[[^\]]*\])?|noqa(?::[^#]*)?)")


@dataclass(frozen=True)
class Storey:
    """A row of the table. Entries: a module (`functional`), a folder (`core/`), one file of a folder (`core/linear`);
    the longest that matches counts."""

    name: str
    entries: tuple[str, ...]

    def length(self, path: str) -> int:
        """Of the longest entry that matches a path without its ending, 0 for none."""
        matching = (e for e in self.entries if path == e or (e.endswith("/") and path.startswith(e)))
        return max(map(len, matching), default=0)


@dataclass(frozen=True)
class Import:
    """One imported module of this package, or of others where `target` is empty."""

    target: str
    line: int
    in_function: bool


@dataclass
class Module:
    name: str  # dotted
    path: str
    lines: list[str]
    tree: ast.Module
    imports: list[Import] = field(default_factory=list)


def module_name(path: str) -> str:
    parts = path.removeprefix("python/").removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def storey_of(path: str, storeys: list[Storey]) -> int | None:
    """Index of the storey of a file, counted from the lowest."""
    short = path.removeprefix(FOLDER).removesuffix(".py")
    lengths = [storey.length(short) for storey in storeys]
    longest = max(lengths)
    return lengths.index(longest) if longest else None


def _targets(node: ast.Import | ast.ImportFrom, module: Module, known: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name if alias.name in known else "" for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        parts = module.name.split(".")
        if not module.path.endswith("/__init__.py"):
            parts = parts[:-1]
        parts = parts[: len(parts) - node.level + 1]
        base = ".".join([*parts, *([node.module] if node.module else [])])
    for alias in node.names:
        inner = f"{base}.{alias.name}"
        yield inner if inner in known else base if base in known else ""


def _imports(node: ast.AST, in_function: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Import statements and whether a function holds them; those for type checkers are never run and left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, in_function
        elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from _imports(child, in_function or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))


def read_modules(root: Path, paths: list[str]) -> dict[str, Module]:
    modules: dict[str, Module] = {}
    for path in paths:
        text = (root / path).read_text()
        modules[module_name(path)] = Module(module_name(path), path, text.splitlines(), ast.parse(text))
    known = set(modules)
    for module in modules.values():
        for node, in_function in _imports(module.tree, False):
            for target in _targets(node, module, known):
                module.imports.append(Import(target, node.lineno, in_function))
    return modules


def has_reason(line: str) -> bool:
    """Whether a line carries a comment for people."""
    return "#" in _TO_TOOLS.sub("", line)


def loaded_by(module: Module, modules: dict[str, Module]) -> set[str]:
    """Modules that loading this one loads: what it imports, and the packages around those, as Python does."""
    found: set[str] = set()
    for one in module.imports:
        parts = one.target.split(".")
        if one.target and not one.in_function:
            found |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    around = module.name.split(".")
    # Packages around the module are being loaded already, whoever asks for it.
    found -= {".".join(around[:length]) for length in range(1, len(around))}
    return found & set(modules) - {module.name}


def cycles(modules: dict[str, Module]) -> list[list[str]]:
    """One list of names per group of modules that load one another (strongly connected components, Tarjan's)."""
    edges = {name: sorted(loaded_by(module, modules)) for name, module in modules.items()}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in edges[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(edges):
        if name not in index:
            visit(name)
    return found


def _is_reexport(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_docstring or isinstance(node, (ast.Import, ast.ImportFrom))


def check(root: Path, paths: list[str], storeys: list[Storey]) -> list[str]:
    modules = read_modules(root, paths)
    problems: list[str] = []
    for module in modules.values():
        own = storey_of(module.path, storeys)
        if own is None:
            problems.append(f"{module.path}: is in no row of the table 'Python layers' of docs/architecture.md")
            continue
        unexplained: set[int] = set()
        for one in module.imports:
            if one.in_function and not has_reason(module.lines[one.line - 1]):
                unexplained.add(one.line)
            other = storey_of(modules[one.target].path, storeys) if one.target else None
            if other is not None and other > own:
                problems.append(
                    f"{module.path}:{one.line}: imports {one.target}, which is {storeys[other].name}; this module is "
                    f"{storeys[own].name}, which is lower"
                )
        for line in sorted(unexplained):
            problems.append(
                f"{module.path}:{line}: an import inside a function; move it to the top, or say why on its line"
            )
        if own == len(storeys) - 1 and not all(_is_reexport(node) for node in module.tree.body):
            problems.append(f"{module.path}: is {storeys[own].name} and holds more than imports; move the code")
    problems += [f"import cycle: {', '.join(group)}" for group in cycles(modules)]
    return problems
