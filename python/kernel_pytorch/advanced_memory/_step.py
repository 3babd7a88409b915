"""A model's blocks under another forward, and training steps of it that leave nothing behind."""

from __future__ import annotations

import contextlib
import re
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}


def parse_bytes(size: str | int | float, what: str = "budget") -> int:
    """40 * 2**30, "40GiB" or "42.9GB" as a number of bytes."""
    if isinstance(size, (int, float)):
        value, unit = float(size), ""
    else:
        match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", size)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f'fit_memory: {what} is "{size}"; give bytes, or text such as "40GiB" or "512MB"')
        value, unit = float(match[1]), match[2].upper()
    if not 0 <= value < float("inf"):
        raise ValueError(f"fit_memory: {what} is {size}; it must be a number of bytes from 0 on")
    return int(value * _UNITS[unit])


def bytes_text(size: float) -> str:
    """40 * 2**30 as "40.00 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.3f} GiB"


class _Forward:
    """A block's forward under a plan, in the module's own dictionary. A copy of the module has its plain forward."""

    def __init__(self, block: nn.Module, name: str, run: Callable[..., Any]) -> None:
        self.block, self.name, self.plain, self._run = block, name, block.forward, run
        self.__wrapped__ = block.forward  # for inspect.signature

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # hooks and ops of one call are Python's here
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        return self._run(self.name, self.plain, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _plain_forward(memo.get(id(self.block), self.block))

    def __reduce__(self) -> Any:
        return _plain_forward, (self.block,)


def _plain_forward(block: nn.Module) -> Any:
    return types.MethodType(type(block).forward, block)


class InstalledForward:
    """A forward that stands in a module's place until it is removed."""

    def __init__(self, block: nn.Module, name: str, run: Callable[..., Any]) -> None:
        self._block = block
        self._before = block.__dict__.get("forward")
        block.forward = _Forward(block, name, run)

    def remove(self) -> None:
        if self._before is None:
            self._block.__dict__.pop("forward", None)
        else:
            self._block.forward = self._before


@contextlib.contextmanager
def installed(blocks: dict[str, nn.Module], run: Callable[..., Any]) -> Iterator[None]:
    forwards = [InstalledForward(block, name, run) for name, block in blocks.items()]
    try:
        yield
    finally:
        for forward in forwards:
            forward.remove()


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated parts of a model: elements of its outermost lists, and without lists its direct children."""
    found: dict[str, nn.Module] = {}

    def walk(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1:
                found.update({f"{inner}.{place}": one for place, one in child.named_children()})
            else:
                walk(child, inner)

    if isinstance(model, nn.Sequential):
        return dict(model.named_children())
    walk(model, "")
    return found or dict(model.named_children())


def named_blocks(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            raise ValueError(
                f'fit_memory: blocks has "{name}", which {type(model).__name__} has not; its blocks are '
                f"{', '.join(find_blocks(model)) or 'none'}"
            )
    return {name: modules[name] for name in names}


class Step:
    """Steps of a model that leave nothing behind, inside `unchanged`: gradients are dropped, at the end of the step or,
    with `releases`, each when it is complete; random numbers and buffers are put back."""

    def __init__(
        self, model: nn.Module, sample: Any, loss: Callable[[Any], Tensor] | None, releases: bool = False
    ) -> None:
        self.model, self.loss, self.releases = model, loss, releases
        self.args, self.kwargs = _arguments(sample)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        if not self.parameters:
            raise ValueError(
                f"fit_memory: no parameter of {type(model).__name__} requires a gradient: nothing is saved"
            )

    def forward(self) -> Any:
        return self.model(*self.args, **self.kwargs)

    def run(self) -> None:
        output = self.forward()
        if self.loss is not None:
            targets, weights = [self.loss(output)], None
        elif getattr(output, "loss", None) is not None:
            targets, weights = [output.loss], None
        else:
            targets = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
            weights = [torch.ones_like(leaf) for leaf in targets]
        del output
        if self.releases:
            torch.autograd.backward(targets, weights)
        else:  # no hook of a parameter runs: neither an optimizer's nor DDP's
            torch.autograd.grad(targets, self.parameters, weights, allow_unused=True)

    def milliseconds(self, repetitions: int = 3) -> float:
        times = []
        for _ in range(repetitions):
            self._wait()
            start = time.perf_counter()
            self.run()
            self._wait()
            times.append((time.perf_counter() - start) * 1e3)
        return min(times)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices), self._releasing():
                yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)

    @contextlib.contextmanager
    def _releasing(self) -> Iterator[None]:
        """In place of what steps parameters inside backward, hooks that drop their gradients."""
        if not self.releases:
            yield
            return
        before = [(one, one.grad, one._post_accumulate_grad_hooks) for one in self.parameters]
        try:
            for parameter in self.parameters:
                parameter.grad = None
                parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]
                parameter.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
            yield
        finally:
            for parameter, gradient, hooks in before:
                parameter.grad, parameter._post_accumulate_grad_hooks = gradient, hooks


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, dict):
        return (), sample
    return (tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)), {}
