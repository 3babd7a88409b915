"""Which commit and which command a result came from. Every stored result carries both; a test refuses one without."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHANGED = ", with uncommitted changes"


def commit() -> str:
    """KP_COMMIT where the machine has the files without their history, otherwise what git says of this checkout."""
    named = os.environ.get("KP_COMMIT", "")
    if named:
        return named

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        head = git("rev-parse", "HEAD")
        # A result that is being stored changes the tree and not what was measured.
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    except OSError:
        head = ""
    return head + (CHANGED if changed else "") if head else "unknown: no git here, set KP_COMMIT"


def command(arguments: list[str] | None = None) -> str:
    """The command line of this process, without the folders of this machine."""

    def shown(word: str) -> str:
        if not os.path.isabs(word):
            return word
        path = Path(word).resolve()
        return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name

    return shlex.join(["python", *(shown(word) for word in (arguments or sys.argv))])
