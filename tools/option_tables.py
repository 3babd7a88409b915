"""Prints the option tables of API.md, and keeps them equal to the code.

python tools/option_tables.py NAME...             print the tables of these functions of kernel_pytorch
python tools/option_tables.py --update API.md     rewrite the text between `<!-- options: NAME -->` and `<!-- end -->`
python tools/option_tables.py --check API.md      fail if a table differs from the code

Names and defaults come from the signature, meanings from the docstring (`Args:`). A parameter that the docstring leaves
out keeps the meaning that is in the table. An op that is declared by a field list gets the shapes of its tensors and
the values of its choices from that list, and so does a named tuple of options. Several names in one mark share a table;
their parameters must be the same.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import inspect
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))
ROW = re.compile(r"^\| `(.+?)` \| .* \| (.*) \|$", re.MULTILINE)
MARKED = re.compile(r"(<!-- options: ([^>]+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


class Row(NamedTuple):
    name: str
    type: str
    default: str
    meaning: str


@cache
def declared_arguments() -> dict[str, dict[str, dict[str, Any]]]:
    """The arguments of every declared op, by the op's and by their own name."""
    from kernel_pytorch import _library

    return {
        declaration["name"]: {argument["name"]: argument for argument in declaration["arguments"]}
        for declaration in _library.declarations()
    }


def find(name: str) -> Any:
    """`functional.rms_norm`, `optimize`, `optim.AdamW`: a function or class of the package."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(".".join(["kernel_pytorch", module]).rstrip(".")), attribute)


def meanings_of(function: Any) -> dict[str, str]:
    """The entries of `Args:` by parameter; `query, key: ...` is an entry of both."""
    text = inspect.getdoc(function) or ""
    found = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    meanings: dict[str, str] = {}
    for entry in re.split(r"\n(?= {4}\S)", found[1].rstrip()) if found else []:
        names, separator, meaning = entry.strip().partition(":")
        if not separator:
            raise ValueError(f"{function.__name__}: no colon in the entry of Args: {entry.strip()!r}")
        for name in names.split(","):
            meanings[name.strip().lstrip("*")] = " ".join(meaning.split())
    return meanings


def type_text(annotation: Any, declared: dict[str, Any]) -> str:
    if declared.get("choices") and "dtype" not in str(annotation):
        return " or ".join(f'"{choice}"' for choice in declared["choices"].split())
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    text = text.replace("MaybeTensor", "Tensor | None")  # a type variable: a tensor for a tensor, None for None
    text = "" if text == "Any" else text.replace("torch.Tensor", "Tensor").replace("torch.dtype", "dtype")
    if "shapes" in declared:
        text = text.replace("Tensor", f"Tensor {shape_text(declared)}", 1)
    return text


def shape_text(declared: dict[str, Any]) -> str:
    """The alternatives, such as "[batch, heads] or [heads]"."""
    return " or ".join("[" + ", ".join(str(size) for size in shape) + "]" for shape in declared["shapes"])


KINDS = dict(tensor="Tensor", tensors="list[Tensor]", flag="bool", number="float", integer="int", text="str")


def fields_of(options: Any) -> list[Row]:
    """The fields of a named tuple of options, whose kinds are those of the declared op that takes them all. What its
    docstring leaves out is as of the public function of that op.
    """
    ops = declared_arguments().items()
    op, arguments = next((op, arguments) for op, arguments in ops if set(options._fields) <= set(arguments))
    meanings = meanings_of(options)
    rows = []
    for name in options._fields:
        default = options._field_defaults[name]
        text = KINDS[arguments[name]["kind"]] + " | None" * (default is None)
        if "shapes" in arguments[name]:
            text = text.replace("Tensor", f"Tensor {shape_text(arguments[name])}")
        rows.append(Row(name, text, default_text(default), meanings.pop(name, f"as of `{op}`")))
    if meanings:
        raise ValueError(f"{options.__name__}: Args describes {', '.join(meanings)}, which it does not have")
    return rows


def default_text(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return ""
    is_plain = isinstance(value, enum.Enum) or str(value).startswith("torch.")
    return f"`{value}`" if is_plain else f"`{value!r}`"


def rows_of(name: str) -> list[Row]:
    function = find(name)
    if hasattr(function, "_field_defaults"):
        return fields_of(function)
    meanings = meanings_of(function)
    if inspect.isclass(function):
        meanings = {**meanings_of(function.__init__), **meanings}
    declared = declared_arguments().get(name.removeprefix("functional."), {})
    rows = []
    for parameter in inspect.signature(function).parameters.values():
        facts = declared.get(parameter.name, {})
        meaning = meanings.pop(parameter.name, "")
        if "shapes" in facts:  # the type says it
            meaning = meaning.removeprefix(shape_text(facts)).lstrip(",; ")
        star = "*" * (parameter.kind is parameter.VAR_POSITIONAL) + "**" * (parameter.kind is parameter.VAR_KEYWORD)
        annotation = "" if parameter.annotation is parameter.empty else parameter.annotation
        rows.append(Row(star + parameter.name, type_text(annotation, facts), default_text(parameter.default), meaning))
    if meanings:
        raise ValueError(f"{name}: Args describes {', '.join(meanings)}, which the signature does not have")
    return rows


def lines_of(names: str, written: str = "") -> list[str]:
    """The table of one function, or of several with the same parameters; `written` is the table as it stands."""
    kept = dict(ROW.findall(written))
    tables = [rows_of(name) for name in names.split(", ")]
    shared = {row.name: row for row in reversed([row for rows in tables for row in rows])}
    for name, rows in zip(names.split(", "), tables):
        differs = [row.name for row in rows if row.default != shared[row.name].default]
        if len(rows) != len(shared) or differs:
            raise ValueError(f"{names}: {name} has other parameters or defaults ({', '.join(differs)})")
    lines = ["| name | type | default | meaning |", "| --- | --- | --- | --- |"]
    for rows in merged(tables[0]):
        row = rows[0]
        defaults = dict.fromkeys(each.default for each in rows)
        cells = [", ".join(f"`{each.name}`" for each in rows), row.type, ", ".join(defaults), row.meaning]
        cells = [cell.replace("|", "\\|") for cell in cells]
        lines.append("| " + " | ".join([*cells[:3], cells[3] or kept.get(row.name, "")]) + " |")
    return lines


def merged(rows: list[Row]) -> list[list[Row]]:
    """Neighbours that one entry of the docstring describes, and that have one type, share a line."""
    groups: list[list[Row]] = []
    for row in rows:
        last = groups[-1][-1] if groups else None
        if last and row.meaning and (row.meaning, row.type) == (last.meaning, last.type):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def updated(text: str) -> str:
    return MARKED.sub(lambda found: found[1] + "\n".join(lines_of(found[2], found[3])) + "\n" + found[4], text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--update", type=Path, nargs="+", default=[])
    parser.add_argument("--check", type=Path, nargs="+", default=[])
    arguments = parser.parse_args()
    for name in arguments.names:
        print("\n".join(lines_of(name)))
    for document in arguments.update:
        document.write_text(updated(document.read_text()))
    stale = [document for document in arguments.check if updated(document.read_text()) != document.read_text()]
    for document in stale:
        print(
            f"{document}: an option table differs; run python tools/option_tables.py --update {document}",
            file=sys.stderr,
        )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
