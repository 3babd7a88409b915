"""ejKernel's registry: implementations of algorithms by platform and backend."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Platform(str, enum.Enum):
    TRITON = "triton"
    PALLAS = "pallas"
    CUDA = "cuda"
    XLA = "xla"


class Backend(str, enum.Enum):
    GPU = "gpu"
    TPU = "tpu"
    CPU = "cpu"
    ANY = "any"


class KernelSpec(NamedTuple):
    """An implementation and what it is for."""

    platform: Platform
    backend: Backend
    algorithm: str
    implementation: Callable[..., Any]
    priority: int = 0


class KernelRegistry:
    """Implementations by algorithm. Those here are kernel_pytorch's, which run on GPUs and CPUs."""

    def __init__(self) -> None:
        self._specs: dict[str, list[KernelSpec]] = {}

    def register(self, algorithm: str, platform: Any, backend: Any, priority: int = 0) -> Callable[[Any], Any]:
        """A decorator. Of several that fit, the one of the highest priority is found, and of those the first."""

        def add(implementation: Any) -> Any:
            spec = KernelSpec(Platform(platform), Backend(backend), algorithm, implementation, priority)
            specs = self._specs.setdefault(algorithm.lower(), [])
            specs.append(spec)
            specs.sort(key=lambda one: -one.priority)
            return implementation

        return add

    def replace(self, implementation: Any, by: Any) -> None:
        """Puts another function in the place of one, wherever it is registered."""
        for specs in self._specs.values():
            specs[:] = [
                one._replace(implementation=by) if one.implementation is implementation else one for one in specs
            ]

    def get(self, algorithm: str, platform: Any = None, backend: Any = None) -> Any:
        """The implementation for a platform and a backend; None and "auto" take any platform and this process's."""
        specs = self.list_implementations(algorithm)
        wanted = None if platform in (None, "auto") else _member(Platform, platform)
        is_any = backend in (None, "auto", "any", Backend.ANY)
        device = Backend(jax.default_backend()) if is_any else _member(Backend, backend)
        for spec in specs:
            if wanted in (None, spec.platform) and spec.backend in (device, Backend.ANY):
                return spec.implementation
        known = ", ".join(f"{spec.platform.value}/{spec.backend.value}" for spec in specs)
        raise ValueError(
            f"kernel_registry: {algorithm} has no implementation for platform {platform} and backend {device.value}; "
            f"it has {known}"
        )

    def list_algorithms(self) -> list[str]:
        return sorted(self._specs)

    def list_implementations(self, algorithm: str) -> list[KernelSpec]:
        if algorithm.lower() not in self._specs:
            raise ValueError(f"kernel_registry: no algorithm {algorithm!r}; there are {', '.join(self._specs)}")
        return list(self._specs[algorithm.lower()])

    def validate_signatures(self, algorithm: str | None = None, verbose: bool = False) -> bool:
        """Whether implementations of an algorithm, or of each, take the same arguments; `verbose` says which do not."""
        same = True
        for name in self.list_algorithms() if algorithm is None else [algorithm]:
            specs = self.list_implementations(name)
            first = inspect.signature(specs[0].implementation)
            for spec in specs[1:]:
                other = inspect.signature(spec.implementation)
                if other != first:
                    same = False
                    if verbose:
                        print(f"{name}: {spec.platform.value} takes {other}, {specs[0].platform.value} takes {first}")
        return same


def _member(kind: Any, value: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(one.value for one in kind)
        raise ValueError(f'kernel_registry: {kind.__name__.lower()} is "{value}"; it is one of {known}') from None


kernel_registry = KernelRegistry()


def registered(function: Any) -> Any:
    """Our own kernels: ejKernel's platform "cuda" on GPUs, and on CPUs "xla", for want of a name of its own."""
    kernel_registry.register(function.__name__, Platform.CUDA, Backend.GPU)(function)
    return kernel_registry.register(function.__name__, Platform.XLA, Backend.CPU)(function)
