"""Adds an option of attention that one kernel uses to a checkout: `python tests/project/new_option.py CHECKOUT`.

`score_limit` bounds the scores of the CPU kernel. test_new_option.py adds it to a copy of the tree and counts files.
It is an example of the work, not of a good option.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

OPTION = "score_limit"
MEANING = "on the CPU, scores are at most this; 0 for no limit."


def replace(path: Path, old: str, new: str, count: int = 1) -> None:
    text = path.read_text()
    if text.count(old) != count:
        raise ValueError(f"{path}: {old!r} stands {text.count(old)} times in it, not {count}")
    path.write_text(text.replace(old, new))


def add_option(root: Path) -> None:
    folder = root / "kernel_pytorch/ops/attention"
    replace(
        folder / "attention.h",
        "  bool allow_tf32 = false;\n",
        f"  bool allow_tf32 = false;\n  double {OPTION} = 0;  // {MEANING}\n",
    )
    replace(
        folder / "attention.h",
        "option<&Options::allow_tf32>(),",
        f"option<&Options::allow_tf32>(),\n    option<&Options::{OPTION}>({{.key = KeyPart::kPresence}}),",
    )
    replace(
        folder / "cpu/plan.cpp",
        "  rules.softcap = static_cast<float>(scoring_.softcap);\n",
        "  rules.softcap = static_cast<float>(scoring_.softcap);\n"
        f"  if (scoring_.{OPTION} > 0) rules.softcap = static_cast<float>(scoring_.{OPTION});\n",
    )
    python = root / "python/kernel_pytorch/_ops/attention.py"
    signature = "    allow_tf32: bool | None = None,\n"
    replace(python, signature, f"{signature}    {OPTION}: float = 0.0,\n")
    asked = "            asks torch.backends.cuda.matmul.fp32_precision.\n"
    replace(python, asked, f"{asked}        {OPTION}: {MEANING}\n")
    replace(python, "        blocks=blocks,\n", f"        {OPTION}={OPTION},\n        blocks=blocks,\n")
    schemas = root / "tests/python/declared_schemas.txt"
    replace(schemas, "bool allow_tf32, ", f"bool allow_tf32, float {OPTION}, ", count=5)
    # What tools/option_tables.py prints with a library that was built with the option.
    document = root / "API.md"
    row = re.search(r"^\| `allow_tf32` \| bool \\\| None .*\n", document.read_text(), re.MULTILINE)
    assert row is not None
    replace(document, row[0], f"{row[0]}| `{OPTION}` | float | `0.0` | {MEANING} |\n")
    row = re.search(r"^\| `allow_tf32` \| bool \| .*\n", document.read_text(), re.MULTILINE)
    assert row is not None
    replace(document, row[0], f"{row[0]}| `{OPTION}` | float | `0.0` | as of `attention` |\n")
    tests = root / "tests/python/test_attention.py"
    tests.write_text(
        tests.read_text()
        + f"""

def test_{OPTION}():
    query, key, value = (torch.randn(1, 2, 8, 16) for _ in range(3))
    assert torch.equal(functional.attention(query, key, value, {OPTION}=0.0), functional.attention(query, key, value))
"""
    )
    replace(root / "CHANGELOG.md", "## Unreleased\n\n", f"## Unreleased\n\n- `attention` takes `{OPTION}`.\n", count=1)


if __name__ == "__main__":
    add_option(Path(sys.argv[1]))
