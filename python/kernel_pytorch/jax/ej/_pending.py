"""ejKernel's functions that this library has no kernels for yet. Each raises one sentence."""

from __future__ import annotations

from typing import Any, NoReturn

from ._registry import PENDING_SENTENCE


def _pending(name: str) -> Any:
    def function(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(PENDING_SENTENCE.format(name=name))

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Not here yet: {name} raises NotImplementedError."
    return function


apply_native_sparse_attention = _pending("apply_native_sparse_attention")
flash_mla = _pending("flash_mla")
mla_attention = _pending("mla_attention")
native_sparse_attention = _pending("native_sparse_attention")
