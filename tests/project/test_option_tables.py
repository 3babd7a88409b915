"""The option tables of API.md are those that the code prints, and no option is without a meaning."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import option_tables  # noqa: E402 (tools/ is on the path now)

from kernel_pytorch import functional  # noqa: E402

TEXT = (ROOT / "API.md").read_text()
TABLES = {found[2]: found[3] for found in option_tables.MARKED.finditer(TEXT)}


def test_the_tables_are_current() -> None:
    assert option_tables.updated(TEXT) == TEXT, "run python tools/option_tables.py --update API.md"


def test_a_changed_default_is_noticed() -> None:
    changed = TEXT.replace("`1e-06`", "`1e-07`", 1)
    assert changed != TEXT and option_tables.updated(changed) == TEXT


@pytest.mark.parametrize("names", TABLES)
def test_every_option_has_a_meaning(names: str) -> None:
    empty = re.findall(r"^\| (`\S+`) .*\|  \|$", TABLES[names], re.MULTILINE)
    assert not empty, (
        f"API.md, options of {names}: write what {', '.join(empty)} mean, in the docstring or in the table"
    )


def test_every_declared_function_has_a_table() -> None:
    shown = {name for names in TABLES for name in names.split(", ")}
    declared = {f"functional.{name}" for name in option_tables.declared_arguments() if name in functional.__all__}
    assert declared, "no declared op is a public function"
    assert declared <= shown, "API.md needs `<!-- options: NAME -->` and `<!-- end -->` for " + ", ".join(
        declared - shown
    )


def test_shapes_of_a_declared_op_come_from_its_field_list() -> None:
    weight = next(row for row in option_tables.rows_of("functional.rms_norm") if row.name == "weight")
    assert weight.type == "Tensor [columns] | None"
    assert not weight.meaning.startswith("[columns]")
