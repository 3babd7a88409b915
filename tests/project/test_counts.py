"""What was paid off once does not grow back: files per folder, lines of glue.

A limit here is a ceiling, not a target: lower it when a count has fallen. Raising one needs a reason in the commit.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEST_ENDINGS = ("_test.cpp", "_test.h", "_fuzz.cpp")

MOST_FILES = 20
# Folders that have more today.
CEILINGS = {
    "kernel_pytorch/base": 30,
    "kernel_pytorch/cli": 36,
    "kernel_pytorch/expression": 25,
    "kernel_pytorch/jit": 30,
    "kernel_pytorch/registry": 39,
    "kernel_pytorch/tuning": 23,
    "python/kernel_pytorch/_optimize": 28,
}
MOST_ADAPTER_LINES = 900  # of kernel_pytorch/torch
# Lines of what an op costs outside its kernels, on average: more ops are more lines, an op is not to be dearer.
MOST_LINES_PER_OP = {
    r"kernel_pytorch/ops/.+/(kernels\.cpp|operation\.h|shapes\.h)": 152,
    # fp8_activations.py is a product of three ops, and of none alone.
    r"python/kernel_pytorch/_ops/(support/)?[^/]+\.py": 184,
}


def tracked(*folders: str) -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [path for path in listed if (ROOT / path).exists()]


def files_by_folder() -> Counter[str]:
    """Sources that are no tests, and no files of single ops: python/kernel_pytorch/_ops has one file per op."""
    paths = [path for path in tracked("kernel_pytorch", "python") if not path.endswith((*TEST_ENDINGS, ".md"))]
    folders = Counter(path.rsplit("/", 1)[0] for path in paths)
    del folders["python/kernel_pytorch/_ops"]
    return folders


def test_folders_hold_about_twenty_files() -> None:
    counts = files_by_folder()
    limits = {folder: CEILINGS.get(folder, MOST_FILES) for folder in counts}
    too_many = {folder: count for folder, count in counts.items() if count > limits[folder]}
    assert not too_many, f"more files than {[limits[folder] for folder in too_many]}: {too_many}; split by subject"


def test_ceilings_are_of_folders_that_need_them() -> None:
    counts = files_by_folder()
    assert all(counts[folder] > MOST_FILES for folder in CEILINGS), "a folder is small enough: take it off the list"


def lines_of(pattern: str) -> int:
    paths = tracked("kernel_pytorch", "python")
    return sum((ROOT / path).read_text().count("\n") for path in paths if re.fullmatch(pattern, path))


def test_glue_does_not_grow_back() -> None:
    assert lines_of(r"kernel_pytorch/torch/[^/]+\.cpp") <= MOST_ADAPTER_LINES
    ops = sum(path.endswith("/operation.h") and "/engines/" not in path for path in tracked("kernel_pytorch/ops"))
    lines = {pattern: lines_of(pattern) / ops for pattern in MOST_LINES_PER_OP}
    assert all(lines[pattern] <= most for pattern, most in MOST_LINES_PER_OP.items()), f"{lines} of {ops} ops"
