"""A copy of this tree in a repository of its own, so that what a change touches can be counted."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def git(root: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost", *words]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout


def copy_tree(root: Path) -> None:
    """Copies the files that git knows or would know, and commits them."""
    for name in git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        if name and (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "the tree")


def changed(root: Path) -> list[str]:
    return [line[3:] for line in git(root, "status", "--porcelain", "--untracked-files=all").splitlines()]


def compile_errors(root: Path, source: str) -> str:
    """What the compiler says of a source, which it only checks."""
    command = ["g++", "-std=c++20", "-fvisibility=hidden", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    done = subprocess.run([*command, "-I", root, root / source], capture_output=True, text=True)
    return done.stderr if done.returncode else ""
