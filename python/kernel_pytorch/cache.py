"""What is kept on disk: measurements (a SQLite store) and compiled kernels (cubins). In a shell: `kpt cache`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import _library
from .tuning import Key

__all__ = ["CacheInfo", "CacheProblems", "Measurement", "clear", "export", "import_", "info", "list", "verify"]


@dataclass(frozen=True)
class CacheInfo:
    """Where both caches are. `store_state` is "ready", or why only memory is used."""

    store_path: str
    store_state: str
    store_rows: int
    cubin_directory: str
    cubin_files: int
    cubin_bytes: int
    cubins_writable: bool


@dataclass(frozen=True)
class Measurement:
    """The fastest kernel and config for a key."""

    key: Key
    kernel: str
    config: str
    median_us: float
    spread_us: float
    date: str
    library_version: str


@dataclass(frozen=True)
class CacheProblems:
    """What is damaged: lines about the store, and cubin files with what is wrong with each."""

    store: tuple[str, ...]
    cubins: tuple[tuple[str, str], ...]

    def __bool__(self) -> bool:
        return bool(self.store or self.cubins)


def info() -> CacheInfo:
    """Where both caches are and how full."""
    fields: dict[str, Any] = _library.call("cache_info", has_request=False)
    store, cubins = fields["store"], fields["cubins"]
    return CacheInfo(
        store_path=store["path"],
        store_state=store["state"],
        store_rows=store["rows"],
        cubin_directory=cubins["directory"],
        cubin_files=cubins["files"],
        cubin_bytes=cubins["bytes"],
        cubins_writable=cubins["writable"],
    )


def export(path: str | os.PathLike[str] | None = None) -> str:
    """The measurements as JSON text, also written to `path` where one is given."""
    text = _library.call_for_text("cache_export", has_request=False)
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def import_(source: str | os.PathLike[str] | bytes) -> int:
    """Takes over measurements, from a file or from the bytes of an export: all of them or, with an error, none.

    Returns how many were written.
    """
    text = source if isinstance(source, bytes) else Path(source).read_bytes()
    return _library.import_cache(text)


def verify() -> CacheProblems:
    """Looks for damage in both caches; false in an `if` where there is none."""
    fields = _library.call("cache_verify", has_request=False)
    cubins = tuple((each["file"], each["problem"]) for each in fields["cubins"])
    return CacheProblems(tuple(fields["store"]), cubins)


def clear(op: str = "", *, store: bool = True, cubins: bool | None = None) -> tuple[int, int]:
    """Removes measurements (of one op, where it is named) and cubins (not when an op is named, unless asked for).

    Returns how many measurements and how many cubins were removed.
    """
    request = {"op": op, "store": store, "cubins": not op if cubins is None else cubins}
    fields = _library.call("cache_clear", request=request)
    return fields["rows_removed"], fields["files_removed"]


def list() -> tuple[Measurement, ...]:
    """Every measurement in the store."""
    rows = _library.call("cache_list", has_request=False)["measurements"]
    return tuple(Measurement(**{**row, "key": Key(**row["key"])}) for row in rows)
