"""ejKernel's configs: frozen dataclasses, with what they mean for kernels here.

A kernel of the library has configs of its own, as texts ("key_block=128 stages=2"). ejKernel's numbers pick among
those: a request that no config of the problem answers raises and lists what there is, since it would have no effect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KernelConfig:
    """A kernel and its config, as the library chooses, stores and prints them."""

    kernel: str
    config: str = ""

    @property
    def text(self) -> str:
        return f"{self.kernel} {self.config}".strip()

    @property
    def values(self) -> dict[str, str]:
        return dict(word.split("=", 1) for word in self.config.split() if "=" in word)

    @classmethod
    def parse(cls, text: str) -> KernelConfig:
        kernel, _, config = text.partition(" ")
        return cls(kernel, config)


@dataclass(frozen=True)
class BwdParams:
    """Tiles of a backward; None: any."""

    blocksize_m: int | None = None
    blocksize_k: int | None = None
    blocksize_n: int | None = None
    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None

    def asked(self) -> dict[str, int]:
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@dataclass(frozen=True)
class FwdParams(BwdParams):
    """Tiles of a forward; None: any."""

    blocksize_heads: int | None = None
    blocksize_keys: int | None = None
    num_key_splits: int | None = None


def answers(asked: Mapping[str, int], config: KernelConfig) -> bool:
    """Whether a kernel's config has these numbers."""
    has = _numbers(config.values)
    return all(value in has.get(name, ()) for name, value in asked.items())


def _numbers(values: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """ejKernel's names for what our configs say; the first name that a config has counts."""
    numbers = {name: int(value) for name, value in values.items() if value.lstrip("-").isdigit()}
    rows = 16 * numbers.get("warps", 0) * numbers.get("row_blocks", 1)  # of one tile of the kernels on mma
    warpgroups = numbers.get("warpgroups", 0)
    named = {
        "q_blocksize": [numbers.get("queries"), 64 * warpgroups, rows],
        "kv_blocksize": [numbers.get("key_block"), numbers.get("keys"), numbers.get("columns")],
        "num_warps": [numbers.get("warps"), 4 * warpgroups],
        "num_stages": [numbers.get("stages")],
    }
    return {name: tuple(one for one in found if one)[:1] for name, found in named.items()}


def _params(kind: type[Any], value: Any) -> Any:
    return kind(**value) if isinstance(value, Mapping) else value


@dataclass(frozen=True)
class OperationConfig:
    """What every config has. `kernel` and `backward_kernel` are ours: "name" or "name config" (`kpt explain`)."""

    platform: str = "auto"
    backend: str = "any"
    kernel: str | None = None
    backward_kernel: str | None = None


@dataclass(frozen=True)
class _TiledConfig(OperationConfig):
    fwd_params: FwdParams | None = None  # a dictionary is converted
    bwd_params: BwdParams | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "fwd_params", _params(FwdParams, self.fwd_params))
        object.__setattr__(self, "bwd_params", _params(BwdParams, self.bwd_params))


@dataclass(frozen=True)
class FlashAttentionConfig(_TiledConfig):
    pass


@dataclass(frozen=True)
class BlockSparseAttentionConfig(_TiledConfig):
    pass


@dataclass(frozen=True)
class RingAttentionConfig(_TiledConfig):
    pass


@dataclass(frozen=True)
class ScaledDotProductAttentionConfig(_TiledConfig):
    pass


@dataclass(frozen=True)
class AttentionConfig(OperationConfig):
    pass


@dataclass(frozen=True)
class GroupedMatmulConfig(OperationConfig):
    pass


@dataclass(frozen=True)
class MeanPoolingConfig(OperationConfig):
    pass


@dataclass(frozen=True)
class RecurrentAttentionConfig(OperationConfig):
    pass


@dataclass(frozen=True)
class GLAttentionConfig(OperationConfig):
    pass


@dataclass(frozen=True)
class LightningAttentionConfig(OperationConfig):
    pass


@dataclass(frozen=True)
class NativeSparseAttentionConfig(OperationConfig):
    block_size: int = 64  # a part of the meaning
