"""libkernel_pytorch.so through ctypes: one thin call for each function of kernel_pytorch/c/kernel_pytorch.h.

Requests and results are JSON; a failure becomes KernelPyTorchError with the library's own message. The library is
loaded at the first call, so importing this costs nothing.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ._paths import library_path

__all__ = [
    "Callbacks",
    "KernelPyTorchError",
    "call",
    "call_for_handle",
    "call_with_callbacks",
    "check",
    "declarations",
    "import_cache",
    "load",
    "pop_autotune",
    "push_autotune",
    "version",
]

ProgressCallback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p)
InterruptedCallback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)

_CODES = {1: "invalid argument", 2: "unsupported", 3: "device", 4: "internal"}


class KernelPyTorchError(RuntimeError):
    """A failure in the core. `code` is "invalid argument", "unsupported", "device" or "internal"."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


_lock = threading.Lock()
_library: ctypes.CDLL | None = None


def _nvrtc_directories() -> Iterator[str]:
    """Folders of installed wheels that hold an NVRTC, found without importing what is in them."""
    patterns = {"nvidia": "*/lib", "torch": "lib"}
    for package, pattern in patterns.items():
        spec = importlib.util.find_spec(package)
        for location in (spec.submodule_search_locations or []) if spec else []:
            for folder in sorted(Path(location).glob(pattern)):
                if ":" not in str(folder) and next(folder.glob("libnvrtc.so*"), None):
                    yield str(folder)


def _open() -> ctypes.CDLL:
    library = ctypes.CDLL(str(library_path("kernel_pytorch")))
    library.kp_version.restype = ctypes.c_char_p
    library.kp_last_error.restype = ctypes.c_char_p
    library.kp_free.argtypes = [ctypes.c_void_p]
    library.kp_free.restype = None
    library.kp_overlay_pop.argtypes = [ctypes.c_int64]
    return library


def declarations() -> list[dict[str, Any]]:
    """kp_declarations. Importing an op needs them, so this does not search for NVRTC as load does."""
    library = _library or _open()
    result = ctypes.c_void_p()
    _check(library, library.kp_declarations(ctypes.byref(result)))
    found: list[dict[str, Any]] = json.loads(_take(library, result))["declarations"]
    return found


def load() -> ctypes.CDLL:
    """The library, loaded once, with the folders in which this Python's packages keep NVRTC."""
    global _library
    with _lock:
        if _library is None:
            library = _open()
            request = json.dumps({"directories": list(_nvrtc_directories())})
            _check(library, library.kp_set_nvrtc_directories(request.encode()))
            _library = library
        return _library


def _check(library: ctypes.CDLL, status: int) -> None:
    if status != 0:
        message = library.kp_last_error().decode("utf-8", "replace")
        raise KernelPyTorchError(message, _CODES.get(status, "internal"))


def check(status: int) -> None:
    """Raises what the library says of a status that is not 0."""
    _check(load(), status)


def _encode(request: Any) -> bytes | None:
    if request is None:
        return None
    text = json.dumps(request)
    return text.encode()


def _take(library: ctypes.CDLL, result: ctypes.c_void_p) -> str:
    """Copies a text that the library gave and hands it back to be freed."""
    assert result.value is not None
    try:
        return ctypes.string_at(result.value).decode()
    finally:
        library.kp_free(result)


def call(function: str, *, request: Any = None, has_request: bool = True) -> Any:
    """Calls kp_<function>(request, &result) and returns the parsed result."""
    return json.loads(call_for_text(function, request=request, has_request=has_request))


def call_for_text(function: str, *, request: Any = None, has_request: bool = True) -> str:
    """As call, with the result as text."""
    library = load()
    result = ctypes.c_void_p()
    arguments: list[Any] = [_encode(request)] if has_request else []
    _check(library, getattr(library, f"kp_{function}")(*arguments, ctypes.byref(result)))
    return _take(library, result)


def call_for_handle(function: str, request: Any) -> int:
    """Calls kp_<function>(request, &handle)."""
    library = load()
    handle = ctypes.c_int64()
    _check(library, getattr(library, f"kp_{function}")(_encode(request), ctypes.byref(handle)))
    return handle.value


def call_plain(function: str, *arguments: Any) -> None:
    """Calls kp_<function>(arguments...), which gives nothing back but through them."""
    library = load()
    _check(library, getattr(library, f"kp_{function}")(*arguments))


class Callbacks:
    """What the library calls while it works. An exception inside stops the work and is kept: it must not unwind through
    the library."""

    def __init__(self, progress: Callable[[dict[str, Any]], None], interrupted: Callable[[], bool]) -> None:
        self.raised: list[BaseException] = []
        self._progress, self._interrupted = progress, interrupted
        self.arguments = (ProgressCallback(self._on_progress), InterruptedCallback(self._on_interrupted), None)

    def _on_progress(self, _state: object, text: bytes) -> None:
        try:
            self._progress(json.loads(text))
        except BaseException as error:
            self.raised.append(error)

    def _on_interrupted(self, _state: object) -> int:
        try:
            return int(bool(self.raised) or self._interrupted())
        except BaseException as error:
            self.raised.append(error)
            return 1

    def entered_from(self, frame: FrameType | None) -> bool:
        """Whether a frame runs inside one of them."""
        codes = (Callbacks._on_progress.__code__, Callbacks._on_interrupted.__code__)
        while frame is not None and not (frame.f_code in codes and frame.f_locals.get("self") is self):
            frame = frame.f_back
        return frame is not None


def call_with_callbacks(function: str, request: Any, callbacks: Callbacks) -> Any:
    """Calls a function that reports its progress. An exception of a callback is raised after it."""
    library = load()
    result = ctypes.c_void_p()
    _check(library, getattr(library, f"kp_{function}")(_encode(request), *callbacks.arguments, ctypes.byref(result)))
    text = _take(library, result)
    if callbacks.raised:
        raise callbacks.raised[0]
    return json.loads(text)


def push_autotune(request: Any, callbacks: Callbacks) -> int:
    """kp_autotune_push: a handle. The callbacks have to live until it is popped."""
    library = load()
    handle = ctypes.c_int64()
    _check(library, library.kp_autotune_push(_encode(request), *callbacks.arguments, ctypes.byref(handle)))
    return handle.value


def pop_autotune(handle: int) -> Any:
    """kp_autotune_pop: what the scope tuned and what it did not."""
    library = load()
    result = ctypes.c_void_p()
    _check(library, library.kp_autotune_pop(ctypes.c_int64(handle), ctypes.byref(result)))
    return json.loads(_take(library, result))


def import_cache(text: bytes) -> int:
    """kp_cache_import: rows written."""
    library = load()
    rows = ctypes.c_int64()
    _check(library, library.kp_cache_import(text, ctypes.c_size_t(len(text)), ctypes.byref(rows)))
    return rows.value


def version() -> str:
    """The library's version."""
    text: bytes = load().kp_version()
    return text.decode()
