"""The vLLM backend of examples/serving against a record of the interface that it relies on: names and parameters of
vLLM's v1 engine as of 2026. vLLM itself is not needed."""

from __future__ import annotations

import abc
import enum
import importlib
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "serving"


class _Type(str, enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class _Backend(abc.ABC):
    @staticmethod
    @abc.abstractmethod
    def get_name() -> str: ...

    @staticmethod
    @abc.abstractmethod
    def get_impl_cls() -> Any: ...

    @staticmethod
    @abc.abstractmethod
    def get_builder_cls() -> Any: ...

    @staticmethod
    @abc.abstractmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]: ...


class _Builder(abc.ABC):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.device = device

    @abc.abstractmethod
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any: ...


class _Impl(abc.ABC):
    @abc.abstractmethod
    def __init__(self, num_heads: int, head_size: int, scale: float, *_: Any, **__: Any) -> None: ...

    @abc.abstractmethod
    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any, **_: Any
    ) -> Any: ...


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    registered: dict[Any, str] = {}
    interface = types.ModuleType("vllm.v1.attention.backend")
    interface.__dict__.update(
        AttentionBackend=_Backend,
        AttentionCGSupport=enum.Enum("AttentionCGSupport", "ALWAYS NEVER"),
        AttentionImpl=_Impl,
        AttentionMetadata=type("AttentionMetadata", (), {}),
        AttentionMetadataBuilder=_Builder,
        AttentionType=_Type,
    )
    registry = types.ModuleType("vllm.v1.attention.backends.registry")
    registry.__dict__.update(
        AttentionBackendEnum=enum.Enum("AttentionBackendEnum", "CUSTOM FLASH_ATTN"),
        register_backend=lambda backend, class_path: registered.__setitem__(backend, class_path),
    )
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "vllm_backend", raising=False)
    module = importlib.import_module("vllm_backend")
    module.register()
    ((which, path),) = registered.items()
    assert which.name == "CUSTOM"
    owner, _, name = path.rpartition(".")
    return getattr(sys.modules[owner], name)


def _common(lengths: list[int], counts: list[int], block_size: int) -> Any:
    """What vLLM gives a builder; the batch is padded by one request."""
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    tables = torch.tensor([[1, 3, 0], [2, 4, 0], [0, 0, 0]], dtype=torch.int32)
    slots = []
    for row, (length, count) in enumerate(zip(lengths, counts)):
        for position in range(length - count, length):
            slots.append(int(tables[row, position // block_size]) * block_size + position % block_size)
    return SimpleNamespace(
        num_actual_tokens=sum(counts),
        max_query_len=max(counts),
        query_start_loc=torch.cat([starts, starts[-1:]]),
        seq_lens=torch.tensor([*lengths, 0], dtype=torch.int32),
        block_table_tensor=tables,
        slot_mapping=torch.tensor([*slots, -1]),
        causal=True,
    )


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_a_batch_as_vllm_sends_it(backend: Any, cache_dtype: str) -> None:
    block_size, heads, key_heads, size = 4, 4, 2, 16
    shape = backend.get_kv_cache_shape(6, block_size, key_heads, size, cache_dtype)
    stored = torch.float32 if cache_dtype == "auto" else torch.uint8
    cache = torch.zeros(shape, dtype=stored)
    layer = SimpleNamespace(_k_scale=torch.tensor(0.05), _v_scale=torch.tensor(0.05))
    builder = backend.get_builder_cls()(None, ["layer"], None, torch.device("cpu"))
    impl = backend.get_impl_cls()(heads, size, 0.25, key_heads, None, 5, cache_dtype, logits_soft_cap=30.0)
    assert (impl.num_heads, impl.head_size, impl.scale) == (heads, size, 0.25)  # what vLLM asks of every one
    torch.manual_seed(0)
    keys, values = torch.randn(2, 8, key_heads, size), torch.randn(2, 8, key_heads, size)
    query = torch.randn(2, 8, heads, size)
    kept = keys, values
    if cache_dtype == "fp8":
        kept = tuple((tensor / 0.05).to(torch.float8_e4m3fn).float() * 0.05 for tensor in kept)
    # First 5 and 3 tokens of two prompts, then one and four more next to each other.
    done = [0, 0]
    for counts in ([5, 3], [1, 4]):
        lengths = [before + count for before, count in zip(done, counts)]
        metadata = builder.build(0, _common(lengths, counts, block_size))
        rows = [
            torch.cat([tensor[r, done[r] : lengths[r]] for r in range(2)] + [torch.zeros_like(tensor[0, :1])])
            for tensor in (query, keys, values)
        ]
        output = torch.full((sum(counts) + 1, heads * size), 7.0)
        impl.forward(layer, *rows, cache, metadata, output)
        done = lengths
        first = 0
        for r, count in enumerate(counts):
            for i in range(count):
                position = lengths[r] - count + i
                low = max(0, position - 4)
                k, v = (t[r, low : position + 1].repeat_interleave(heads // key_heads, 1) for t in kept)
                scores = torch.einsum("hd,khd->hk", query[r, position], k) * 0.25
                weights = torch.softmax(30 * torch.tanh(scores / 30), -1)
                expected = torch.einsum("hk,khd->hd", weights, v)
                assert torch.allclose(output[first + i].view(heads, size), expected, atol=1e-4), (r, position)
            first += count
        assert (output[-1] == 7).all()  # padding is left alone


def test_what_it_does_not_serve_is_refused(backend: Any) -> None:
    with pytest.raises(NotImplementedError, match="it serves decoders"):
        backend.get_impl_cls()(4, 16, 0.25, 2, attn_type=_Type.ENCODER_ONLY)
    impl = backend.get_impl_cls()(4, 16, 0.25, 2)
    mixed = _common([5, 3], [5, 3], 4)
    mixed.causal = torch.tensor([True, False])
    with pytest.raises(NotImplementedError, match="causal and not"):
        backend.get_builder_cls()(None, ["layer"], None, torch.device("cpu")).build(0, mixed)
    with pytest.raises(NotImplementedError, match="FP8"):
        impl.forward(None, *[torch.zeros(1)] * 4, None, torch.zeros(1), output_scale=torch.ones(1))
    assert (impl.forward(None, *[torch.zeros(1)] * 4, None, torch.ones(2)) == 0).all()
