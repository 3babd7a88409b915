"""The fields of a report and their check. A report may come from a file, so nothing is believed before it passed here.

A type is a word: "str", "int", "float", "bool", with "?" behind it where null stands for unknown. JSON has no NaN and
no infinity, and a failed comparison may give either: they travel as the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["check", "jsonable"]

_TOP = {"title": "str", "goal": "str", "accuracy": "str", "command": "str"}
_TABLES = {
    "measurements": {
        "name": "str",
        "median_us": "float",
        "low_us": "float",
        "high_us": "float",
        "samples": "int",
        "peak_bytes": "int?",
        "launches": "int?",
    },
    "replacements": {
        "path": "str",
        "pattern": "str",
        "from": "str",
        "to": "str",
        "predicted_us_before": "float?",
        "predicted_us_after": "float?",
        "reason": "str",
        "kernel": "str?",
    },
    "refusals": {"path": "str", "pattern": "str", "reason": "str"},
    "tuning": {
        "op": "str",
        "problem": "str",
        "calls": "int",
        "share": "float",
        "from": "str",
        "to": "str?",
        "from_us": "float?",
        "to_us": "float?",
        "kept": "bool",
        "reason": "str",
    },
    "numerics": {
        "path": "str",
        "quantity": "str",
        "max_abs": "float",
        "relative": "float",
        "tolerance": "float",
        "ok": "bool",
    },
}
_LATER = ("tuning",)  # reports of earlier versions lack it
_MODEL = {"name": "str", "parameters": "int"}
_KERNEL = {
    "name": "str",
    "calls": "int",
    "total_us": "float",
    "bytes": "float?",
    "flops": "float?",
    "ours": "bool",
}
_ROOFS = {"copy_bytes_per_second": "float", "matmul_flops_per_second": "float", "dtype": "str"}
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def check(data: Mapping[str, Any]) -> dict[str, Any]:
    """A checked copy of `data`; a ValueError names the field that is missing or of the wrong type.

    Fields that are not known are kept where they stand (environments grow), and the page shows those it can.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"report: the data is a {type(data).__name__}; it must be a dict")
    result = {**data, **_fields(data, _TOP, "")}
    for table, types in _TABLES.items():
        rows = [] if table in _LATER and table not in data else _member(data, table)
        result[table] = _rows(rows, types, table)
    environment = _member(data, "environment")
    _require(isinstance(environment, Mapping), "environment", environment, "a dict")
    result["environment"] = {str(key): value for key, value in environment.items()}
    model = _member(data, "model")
    result["model"] = _fields(model, _MODEL, "model")
    result["model"]["inputs"] = _texts(_member(model, "inputs", "model."), "model.inputs")
    kernels = _member(data, "kernels")
    result["kernels"] = {
        side: _rows(_member(kernels, side, "kernels."), _KERNEL, f"kernels.{side}") for side in ("before", "after")
    }
    roofs = _member(data, "roofs")
    result["roofs"] = None if roofs is None else _fields(roofs, _ROOFS, "roofs")
    result["notes"] = _texts(_member(data, "notes"), "notes")
    return result


def jsonable(value: Any) -> Any:
    """`value` with NaN and infinities as strings, which `check` reads back."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _member(data: Any, name: str, where: str = "") -> Any:
    _require(isinstance(data, Mapping), where.rstrip(".") or "the report", data, "a dict")
    if name not in data:
        raise ValueError(f"report: {where}{name} is missing; every field is there, with null where it is unknown")
    return data[name]


def _rows(rows: Any, types: Mapping[str, str], where: str) -> list[dict[str, Any]]:
    is_list = isinstance(rows, Sequence) and not isinstance(rows, str)
    _require(is_list, where, rows, "a list")
    return [_fields(row, types, f"{where}[{index}]") for index, row in enumerate(rows)]


def _texts(values: Any, where: str) -> list[str]:
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    _require(is_list, where, values, "a list")
    return [_value(value, "str", f"{where}[{index}]") for index, value in enumerate(values)]


def _fields(row: Any, types: Mapping[str, str], where: str) -> dict[str, Any]:
    dotted = f"{where}." if where else ""
    return {name: _value(_member(row, name, dotted), kind, dotted + name) for name, kind in types.items()}


def _value(value: Any, kind: str, where: str) -> Any:
    name = kind.rstrip("?")
    if value is None and kind.endswith("?"):
        return None
    if name == "float":
        if isinstance(value, str) and value in _NOT_FINITE:
            return _NOT_FINITE[value]
        _require(isinstance(value, (int, float)) and not isinstance(value, bool), where, value, "a number")
        return float(value)
    if name == "int":
        _require(isinstance(value, int) and not isinstance(value, bool), where, value, "an integer")
    elif name == "bool":
        _require(isinstance(value, bool), where, value, "true or false")
    else:
        _require(isinstance(value, str), where, value, "a text")
    return value


def _require(condition: bool, where: str, value: Any, wanted: str) -> None:
    if not condition:
        raise ValueError(f"report: {where} is {value!r:.60}; it must be {wanted}")
