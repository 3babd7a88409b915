"""The documents agree with the tree and with the stored results."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tracked() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [path for path in listed if path and (ROOT / path).exists()]


# Every document of the project, the notes in the folders of the ops too.
DOCUMENTS = sorted(ROOT / path for path in tracked() if path.endswith(".md"))


def tree_of_the_architecture() -> set[str]:
    """Folders in the tree that docs/architecture.md draws, from indentation by two spaces."""
    text = (ROOT / "docs/architecture.md").read_text()
    block = text.split("\n## Layout\n", 1)[1].split("```\n", 1)[1].split("```", 1)[0]
    folders: set[str] = set()
    parents: list[str] = []
    for line in block.splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()  # type: ignore[union-attr]
        del parents[len(indent) // 2 :]
        parents.append(name.rstrip("/"))
        folders.add("/".join(parents))
    return folders


def test_tree_in_the_architecture_is_the_one_on_disk() -> None:
    depth = {"kernel_pytorch": 3, "python": 3}
    on_disk: set[str] = set()
    for path in tracked():
        parts = path.split("/")[:-1]
        if parts[:2] == ["kernel_pytorch", "ops"] and len(parts) > 2 and parts[2] not in ("support", "engines"):
            parts[2] = "<op>"  # ops/README.md is their index
        for length in range(1, min(len(parts), depth.get(parts[0], 1) if parts else 0) + 1):
            on_disk.add("/".join(parts[:length]))
    assert tree_of_the_architecture() == on_disk


def test_the_index_of_ops_names_every_folder() -> None:
    folders = {path.split("/")[2] for path in tracked() if re.match(r"kernel_pytorch/ops/[^/]+/", path)}
    index = (ROOT / "kernel_pytorch/ops/README.md").read_text()
    missing = [name for name in sorted(folders - {"support", "engines"}) if f"| [{name}](" not in index]
    assert not missing, f"kernel_pytorch/ops/README.md does not name {', '.join(missing)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_tables_are_those_that_the_results_print() -> None:
    command = [sys.executable, ROOT / "benchmarks/table.py", "--check", ROOT / "BENCHMARKS.md", ROOT / "README.md"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["BENCHMARKS.md", "README.md"])
def test_table_check_notices_a_typed_number(name: str, tmp_path: Path) -> None:
    text = (ROOT / name).read_text()
    changed = re.sub(r"(\d)\.(\d\d)x", lambda m: f"{int(m[1]) + 1}.{m[2]}x", text, count=1)
    assert changed != text, f"{name} shows no speedup at all"
    document = tmp_path / name
    document.write_text(changed)
    done = subprocess.run([sys.executable, ROOT / "benchmarks/table.py", "--check", document], capture_output=True)
    assert done.returncode == 1


def test_no_path_of_a_machine_in_tracked_text() -> None:
    # Put together from pieces, so that this file does not find itself.
    pattern = "/(" + "|".join(["work", "farm", "root", "opt"]) + ")/"
    command = ["git", "grep", "-nIE", pattern, "--", ".", ":!.ci", ":!tests/project"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert found == ""
