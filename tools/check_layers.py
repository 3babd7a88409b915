"""Checks the walls of the house: who includes whom, and where getenv, asm and catch may stand.

The rules are not in this file: it reads the tables of docs/architecture.md, so the document cannot drift from it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURE = ROOT / "docs" / "architecture.md"
MAX_LINES = 400
TEST_ENDINGS = ("_test.cpp", "_test.h", "_fuzz.cpp")

# No file of the house: the text that a kernel is given for its call (DeviceCode::generated).
GENERATED = "kernel_pytorch/generated.cuh"

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


def words(cell: str) -> set[str]:
    return {word.strip() for word in cell.split(",") if word.strip()}


def without_comments(text: str) -> str:
    """Blanks comments, keeping line numbers. A literal that holds two slashes loses its tail: no matter here."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    return re.sub(r"/\*.*?\*/|(?<!:)//[^\n]*", blank, text, flags=re.DOTALL)


def layer_of(path: str) -> str:
    return path.split("/")[1]


def is_public_op_header(target: str) -> bool:
    parts = target.split("/")
    if len(parts) == 3:
        return True  # ops/operations.h
    return len(parts) == 4 and parts[3] == parts[2] + ".h"


def check_include(path: str, target: str, allowed: set[str], engines: dict[str, set[str]]) -> str | None:
    """The reason why `path` may not include the project header `target`, or None."""
    if target == GENERATED:
        return None
    own, other = layer_of(path), layer_of(target)
    if own == "ops" and other == "ops":
        room, other_room = path.split("/")[2], target.split("/")[2]
        in_root = len(path.split("/")) == 3
        served = room in engines.get(other_room, set())
        if room == other_room or in_root or served or is_public_op_header(target):
            return None
        return f"is a private file of another room ({target})"
    if own == other:
        return None
    if other not in allowed:
        return f"layer {own} may not include layer {other} ({target})"
    if other == "ops" and not is_public_op_header(target):
        return f"layer {own} may include only public headers of ops ({target})"
    return None


def tracked_sources() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "kernel_pytorch"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return [path for path in listed if path.endswith((".h", ".cpp", ".cuh")) and (ROOT / path).exists()]


def main() -> int:
    layers = {name: row for row in read_table("Layers") for name in words(row[0])}
    places = {row[0]: [re.compile(pattern) for pattern in words(row[1])] for row in read_table("Guarded words")}
    engines = {row[0]: words(row[1]) for row in read_table("Engines")}
    libraries = {row[0]: words(row[1]) for row in read_table("Libraries")}
    problems: list[str] = []

    for path in tracked_sources():
        text = (ROOT / path).read_text()
        if text.count("\n") > MAX_LINES:
            problems.append(f"{path}: {text.count(chr(10))} lines, the limit is {MAX_LINES}: split it")
        layer = layer_of(path)
        if layer not in layers:
            problems.append(f"{path}: folder {layer} is not in the table of docs/architecture.md")
            continue
        allowed = words(layers[layer][1])
        is_test = path.endswith(TEST_ENDINGS)
        code = without_comments(text)
        for match in INCLUDE.finditer(code):
            line = code.count("\n", 0, match.start(2)) + 1
            target = match.group(2)
            if target.startswith("kernel_pytorch/"):
                if is_test and layer_of(target) not in ("torch", "jax"):
                    continue
                if reason := check_include(path, target, allowed, engines):
                    problems.append(f"{path}:{line}: {reason}")
            elif match.group(1) == '"':
                problems.append(f'{path}:{line}: includes "{target}"; project headers begin with kernel_pytorch/')
            else:
                for prefix, users in libraries.items():
                    if target.startswith(prefix) and layer not in users and not (is_test and "tests" in users):
                        problems.append(f"{path}:{line}: <{target}> belongs to {', '.join(sorted(users))}")
        for word, patterns in places.items():
            if any(pattern.match(path) for pattern in patterns):
                continue
            for match in re.finditer(rf"\b{word}\s*(?:volatile\s*)?\(", code):
                if not (is_test and word in ("catch", "asm")):
                    line = code.count("\n", 0, match.start()) + 1
                    problems.append(f"{path}:{line}: {word} may stand only where docs/architecture.md says")

    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"check_layers: {len(tracked_sources())} files, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
