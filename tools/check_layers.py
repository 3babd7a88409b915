"""Checks the layers: who includes or imports whom, and where getenv, asm and catch may stand.

The rules are not in this file: it reads the tables of docs/architecture.md, so the document cannot drift from it. The
tables for Python are read by python_layers.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import python_layers

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURE = ROOT / "docs" / "architecture.md"
MAX_LINES = 400

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def read_table(heading: str) -> list[list[str]]:
    """Rows of the first table under a heading of docs/architecture.md, cells stripped of backquotes."""
    text = ARCHITECTURE.read_text()
    section = text.split(f"\n## {heading}\n", 1)
    if len(section) != 2:
        sys.exit(f"check_layers: docs/architecture.md has no section '## {heading}'")
    rows = [line for line in section[1].split("\n## ", 1)[0].splitlines() if line.startswith("|")]
    cells = [[cell.strip().replace("`", "") for cell in row.strip("|").split("|")] for row in rows]
    return cells[2:]


def entries(cell: str) -> list[str]:
    return [entry.strip() for entry in cell.split(",") if entry.strip()]


def pattern_of(entry: str) -> re.Pattern[str]:
    """What an entry of the table "Layers" matches: the files of a folder (`ops/support`), or files by name
    (`ops/operations.*`, `*_test.*`). `<op>` stands for any name, and for the same one where it stands again.
    """
    is_file = "." in entry
    text = re.escape(entry).replace(r"\*", "[^/]*")
    seen: set[str] = set()

    def group(match: re.Match[str]) -> str:
        name = match.group(1)
        again = name in seen
        seen.add(name)
        return f"(?P={name})" if again else f"(?P<{name}>[^/]+)"

    text = re.sub(r"<(\w+)>", group, text)
    if is_file and "/" not in entry:
        return re.compile(f"(?:.*/)?{text}$")
    return re.compile(f"kernel_pytorch/{text}{'$' if is_file else '/'}")


@dataclass(frozen=True)
class Layer:
    """One entry of the first column, and what its row allows."""

    name: str
    allowed: tuple[str, ...]

    def match(self, path: str) -> re.Match[str] | None:
        return pattern_of(self.name).match(path)

    @property
    def rank(self) -> tuple[bool, int]:
        """Where several entries match a file, the one by its file's name counts, then the longest."""
        return "/" not in self.name and "." in self.name, len(re.sub("<.*?>", "", self.name))


def read_layers() -> list[Layer]:
    return [Layer(name, tuple(entries(row[1]))) for row in read_table("Layers") for name in entries(row[0])]


def layer_of(path: str, layers: list[Layer]) -> Layer | None:
    return max((layer for layer in layers if layer.match(path)), key=lambda layer: layer.rank, default=None)


def check_include(path: str, target: str, layers: list[Layer]) -> str | None:
    """The reason why `path` may not include the project header `target`, or None."""
    layer = layer_of(path, layers)
    if layer is None:
        return "is in no layer of the table in docs/architecture.md"
    own, other = layer.match(path), layer.match(target)
    if own is not None and other is not None and own.groupdict() == other.groupdict():
        return None
    if any(pattern_of(entry).match(target) for entry in layer.allowed):
        return None
    return f"layer {layer.name} may not include {target}"


def check_library(path: str, target: str, layers: list[Layer], libraries: dict[str, list[str]]) -> str | None:
    """The reason why `path` may not include a header of the table "Libraries", or None."""
    layer = layer_of(path, layers)
    for prefix, users in libraries.items():
        if target.startswith(prefix) and (layer is None or layer.name not in users):
            return f"<{target}> belongs to {', '.join(sorted(users))}"
    return None


def without_comments(text: str) -> str:
    """Blanks comments, keeping line numbers. A literal that holds two slashes loses its tail: no matter here."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    return re.sub(r"/\*.*?\*/|(?<!:)//[^\n]*", blank, text, flags=re.DOTALL)


def tracked_sources(folder: str, endings: tuple[str, ...]) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return [path for path in listed if path.endswith(endings) and (ROOT / path).exists()]


def check_source(
    path: str, layers: list[Layer], libraries: dict[str, list[str]], places: dict[str, list[re.Pattern[str]]]
) -> list[str]:
    text = (ROOT / path).read_text()
    if layer_of(path, layers) is None:
        return [f"{path}: is in no layer of the table in docs/architecture.md"]
    problems: list[str] = []
    if text.count("\n") > MAX_LINES:
        problems.append(f"{path}: {text.count(chr(10))} lines, the limit is {MAX_LINES}: split it")
    code = without_comments(text)
    for match in INCLUDE.finditer(code):
        line = code.count("\n", 0, match.start(2)) + 1
        target = match.group(2)
        if any(target.startswith(prefix) for prefix in libraries):
            reason = check_library(path, target, layers, libraries)
        elif target.startswith("kernel_pytorch/"):
            reason = check_include(path, target, layers)
        else:
            is_quoted = match.group(1) == '"'
            reason = f'includes "{target}"; project headers begin with kernel_pytorch/' if is_quoted else None
        if reason:
            problems.append(f"{path}:{line}: {reason}")
    for word, patterns in places.items():
        if not any(pattern.match(path) for pattern in patterns):
            for match in re.finditer(rf"\b{word}\s*(?:volatile\s*)?\(", code):
                line = code.count("\n", 0, match.start()) + 1
                problems.append(f"{path}:{line}: {word} may stand only where docs/architecture.md says")
    return problems


def main() -> int:
    layers = read_layers()
    libraries = {row[0]: entries(row[1]) for row in read_table("Libraries")}
    places = {row[0]: [re.compile(pattern) for pattern in entries(row[1])] for row in read_table("Guarded words")}
    sources = tracked_sources("kernel_pytorch", (".h", ".cpp", ".cuh"))
    problems = [problem for path in sources for problem in check_source(path, layers, libraries, places)]

    storeys = [python_layers.Storey(row[0], tuple(entries(row[1]))) for row in read_table("Python layers")]
    modules = tracked_sources("python/kernel_pytorch", (".py",))
    problems += python_layers.check(ROOT, modules, storeys)

    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"check_layers: {len(sources)} C++ and {len(modules)} Python files, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
