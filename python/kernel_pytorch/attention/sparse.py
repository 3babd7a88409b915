"""Sparse attention: a layer that computes a share of the blocks of its scores, exactly, and says which share."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._ops.support.masks import Sizes, mask_options
from ..core._checks import check_features, check_sequences
from ..core._names import SIZES, accepts_mask_names, check_known, renamed
from ..functional import BlockLists, rope, select_blocks, select_by_scores
from .config import FIELDS, AttentionConfig, config_of
from .layers import FlashAttention3
from .sparse_patterns import (
    Computed,
    Pack,
    SparsePattern,
    SparsityGate,
    fixed_lists,
    fixed_scores,
    reachable_sparsity,
    usual_block,
)

_KEPT_SHAPES = 16  # lists of so many shapes are kept
_TOLERANCE = 0.02  # a sparsity that falls short by more is said
_OWN_NAMES = ("sparsity_ratio", "pattern", "block_size", "sinks", "local", "key_parts", "seed", "device", "dtype")


class DynamicSparseAttention(FlashAttention3):
    """FlashAttention3 that leaves `sparsity_ratio` of its blocks of scores out; the others are exact.

    A block is `block_size` queries by as many keys (None: a power of two up to 128, as large as the length and the
    ratio allow). Rows keep their diagonal and, but for RANDOM, `local` neighbours and the first `sinks` blocks,
    whatever the ratio. Where that is more than the ratio leaves (a few dozen tokens, or a block_size that is too
    large), the layer computes what it must and warns with the sparsity that can be reached. `get_attention_stats` tells
    what was computed. Parameters are those of FlashAttention3, so that a dense layer's state_dict fits; LEARNED adds
    those of its gate. How far a sparse output is from the dense one depends on the weights: attention that is spread
    evenly, as an untrained layer's, loses what is left out; attention that agrees with few keys loses little.

    The default for training at 90 %: DYNAMIC_THRESHOLD from the first step, with blocks of 16 at 2,048 tokens
    (benchmarks/sparse_training.py). A model that was trained dense loses more when its layers are replaced.

    LEARNED: a block's gate adds nothing to the scores, but has the gradient of what it lets through (straight-through);
    in training noise makes it try others. Add `sparsity_loss()` to the model's loss: it pulls the share of open gates
    to what the ratio leaves.

    Args:
        d_model: features in and out, or an AttentionConfig.
        sparsity_ratio: share of the blocks to leave out, from 0 to below 1.
        pattern: a SparsePattern or its name: which blocks are left out.
        key_parts: DYNAMIC_THRESHOLD compares a row of queries with the means of so many parts of a block of keys.
        seed: of the patterns with random blocks.
        fields: of AttentionConfig (causal, kv_heads, bias, attention_dropout, ...).
    """

    def __init__(
        self,
        d_model: AttentionConfig | int | None = None,
        num_heads: int | None = None,
        sparsity_ratio: float = 0.9,
        pattern: SparsePattern | str = SparsePattern.DYNAMIC_THRESHOLD,
        *,
        block_size: int | None = None,
        sinks: int = 1,
        local: int = 1,
        key_parts: int = 4,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        config = config_of("DynamicSparseAttention", d_model, num_heads, fields, _OWN_NAMES)
        super().__init__(config, device=device, dtype=dtype)
        if not 0.0 <= sparsity_ratio < 1.0:
            raise ValueError(
                f"DynamicSparseAttention: sparsity_ratio is {sparsity_ratio}; use one from 0 to below 1, such as 0.9"
            )
        if block_size is not None and (block_size < 1 or block_size % key_parts):
            raise ValueError(
                f"DynamicSparseAttention: block_size is {block_size}, which {key_parts} key_parts do not divide"
            )
        self.pattern = _pattern(pattern)
        self.sparsity_ratio, self.block_size, self.seed = sparsity_ratio, block_size, seed
        self.sinks, self.local, self.key_parts = sinks, local, key_parts
        assert config.head_dim is not None
        learned = self.pattern is SparsePattern.LEARNED
        self.gate = SparsityGate(config.num_heads, config.head_dim, device, dtype) if learned else None
        self._shapes: dict[tuple[Any, ...], Any] = {}
        self._computed: Computed | None = None
        self._gates: Tensor | None = None
        self._given_lists: BlockLists | None = None
        self._has_warned = False

    def __getstate__(self) -> dict[str, Any]:
        """Without what only serves the process and the call: lists by shape, and what the latest forward left."""
        return {**self.__dict__, "_shapes": {}, "_computed": None, "_gates": None}

    def compute_the_blocks_of(self, other: DynamicSparseAttention | None) -> None:
        """From now on, the blocks that `other` computed in its latest forward, whatever the content; None: its own."""
        if other is not None and other._computed is None:
            raise RuntimeError("compute_the_blocks_of: the other layer computed nothing yet; call it")
        self._given_lists = None if other is None or other._computed is None else other._computed.lists

    @accepts_mask_names
    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attention_mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """As FlashAttention3's; the attention_mask holds within the blocks that are computed.

        With cu_seqlens, [sequences + 1], the query (and key and value, of the same sequences) is packed as [tokens,
        embed_dim]: every sequence is attended to by itself, with blocks that count from where it begins, as sparse as
        if it were alone. No sequence is longer than max_seqlen; None waits for the device to find it. Then batch of
        attention_mask and key_lengths counts sequences.
        """
        pack = _pack(query, cu_seqlens, max_seqlen)
        return self._attend(query, key, value, attention_mask, key_lengths, rotary, pack, self._blocks)

    @accepts_mask_names
    def dense(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attention_mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """The same layer with every block."""
        pack = _pack(query, cu_seqlens, max_seqlen)
        return self._attend(query, key, value, attention_mask, key_lengths, rotary, pack, _every_block)

    def sparsity_loss(self) -> Tensor:
        """LEARNED: the square of how far the share of open gates of the latest forward is from what is asked."""
        if self._gates is None:
            raise RuntimeError(
                "sparsity_loss: there are no gates; it is for pattern LEARNED, after a forward with gradients"
            )
        return (self._gates.mean() - (1 - self.sparsity_ratio)).square()

    def get_attention_stats(self, hidden_states: Tensor | None = None, **options: Any) -> dict[str, Any]:
        """What the latest forward computed, counted in the lists that its kernel was given.

        With `hidden_states` (and forward's other arguments as options) the layer runs on them, sparse and dense, and
        `relative_error` and `largest_error` tell how far apart the outputs are. Waits for the device.
        """
        errors = {}
        if hidden_states is not None:
            with torch.no_grad():
                dense = self.dense(hidden_states, **options).float()
                difference = self(hidden_states, **options).float() - dense
            errors["relative_error"] = float(difference.norm() / dense.norm().clamp(min=1e-30))
            errors["largest_error"] = float(difference.abs().max()) if difference.numel() else 0.0
        if self._computed is None:
            raise RuntimeError("get_attention_stats: nothing was computed yet; call the layer, or give hidden_states")
        blocks = self._computed.blocks(self.config.num_heads, self.config.causal)  # waits for the device
        share = blocks["blocks_computed"] / max(blocks["blocks_total"], 1)
        return {
            "pattern": self.pattern.value,
            "sparsity_ratio": self.sparsity_ratio,
            **blocks,
            "computed_share": share,
            "actual_sparsity": 1 - share,
            **errors,
        }

    def _attend(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        mask: Tensor | None,
        key_lengths: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
        pack: Pack | None,
        blocks: Callable[[Tensor, Tensor, Pack | None], dict[str, Any]],
    ) -> Tensor:
        if pack is None:
            check_sequences(self, query, self.config.embed_dim, "query")
        q, k, v = self._projected(query, key, value)
        if rotary is not None:
            q, k = rope(q, k, *rotary, positions=None if pack is None else pack.positions(q.shape[0]))
        options = self._options(q, k, mask if pack is None else None, key_lengths)
        if pack is not None:
            sizes = Sizes(pack.cu_seqlens.shape[0] - 1, self.config.num_heads, pack.longest, pack.longest)
            options |= mask_options(type(self).__name__, mask, *sizes)
            options |= {"cu_seqlens_q": pack.cu_seqlens, "cu_seqlens_k": pack.cu_seqlens}
            options |= {"max_seqlen_q": pack.longest, "max_seqlen_k": pack.longest}
        attended = self._attention(q, k, v, **options, **blocks(q, k, pack))
        return self.out_proj(attended.flatten(-2))  # type: ignore[no-any-return]

    def _check_inputs(self, **inputs: Tensor) -> None:
        if inputs["query"].dim() != 2:
            return super()._check_inputs(**inputs)
        for name, tensor in inputs.items():  # packed
            check_features(self, tensor, self.config.embed_dim, name)

    def _blocks(self, q: Tensor, k: Tensor, pack: Pack | None = None) -> dict[str, Any]:
        """attention's options for the blocks of q and k, [batch, sequence, heads, size] or [tokens, heads, size]."""
        queries, keys = (q.shape[1], k.shape[1]) if pack is None else (pack.longest, pack.longest)
        block = self._block(queries, keys)
        options: dict[str, Any] = {}
        if self.pattern is SparsePattern.DYNAMIC_THRESHOLD:
            packed: dict[str, Any] = {}
            if pack is not None:
                packed = {"cu_seqlens_q": pack.cu_seqlens, "max_seqlen_q": queries, "max_seqlen_k": keys}
            lists = select_blocks(
                q, k, sparsity=self.sparsity_ratio, block_size=block, causal=self.config.causal, layout="bshd",
                key_parts=math.gcd(block, self.key_parts), sinks=self.sinks, local=self.local,
                gradients=_wants_gradients(q, k), **packed,
            )  # fmt: skip
        elif self.gate is not None:
            lists, options = self._open_gates(self.gate, q, k, block, queries, keys, pack)
        elif pack is None or self.pattern is SparsePattern.STRIDED:
            lists = self._fixed(queries, keys, block, q.device)
        else:
            lists = self._fixed_of_pack(pack, block, _wants_gradients(q, k))
        lists = lists if self._given_lists is None else self._given_lists
        self._computed = Computed(lists, q.shape[0], queries, keys, block, pack)
        return {"block_mask": lists, **options}

    def _block(self, queries: int, keys: int) -> int:
        """The size of a block; warns once where this layer cannot be as sparse as asked."""
        is_random, is_strided = self.pattern is SparsePattern.RANDOM, self.pattern is SparsePattern.STRIDED
        sinks, local = (0 if is_random or is_strided else self.sinks), (0 if is_random else self.local)
        reached = partial(
            reachable_sparsity, queries, keys, causal=self.config.causal, sinks=sinks, local=local,
            wanted=self.sparsity_ratio,
        )  # fmt: skip
        block = self.block_size
        if block is None:
            block = usual_block(queries, keys, self.sparsity_ratio, self.config.causal, reached)
        if not self._has_warned and reached(block) < self.sparsity_ratio - _TOLERANCE:
            self._has_warned = True
            smaller = "longer sequences" if self.block_size is None else "a smaller block_size, or longer sequences"
            warnings.warn(
                f"DynamicSparseAttention: sparsity_ratio is {self.sparsity_ratio}, and {queries} x {keys} tokens in "
                f"blocks of {block} reach {reached(block):.3f}, since a row keeps its own block, {local} on each side "
                f"and {sinks} first ones; use that ratio, fewer sinks and local, or {smaller}",
                stacklevel=2,
            )
        return block

    def _kept_by_shape(self, shape: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if shape not in self._shapes:
            if len(self._shapes) >= _KEPT_SHAPES:
                self._shapes.pop(next(iter(self._shapes)))
            self._shapes[shape] = make()
        return self._shapes[shape]

    def _fixed(self, queries: int, keys: int, block: int, device: torch.device) -> BlockLists:
        def make() -> BlockLists:
            return fixed_lists(
                self.pattern, queries, keys, heads=self.config.num_heads, block=block, sparsity=self.sparsity_ratio,
                causal=self.config.causal, sinks=self.sinks, local=self.local, seed=self.seed, device=device,
            )  # fmt: skip

        return self._kept_by_shape((queries, keys, block, self.sparsity_ratio, device), make)  # type: ignore[no-any-return]

    def _fixed_of_pack(self, pack: Pack, block: int, gradients: bool) -> BlockLists:
        """The same pattern in every sequence, with the share that its length asks for."""
        longest, device, lengths = pack.longest, pack.cu_seqlens.device, pack.lengths()
        scores = self._kept_by_shape(
            (longest, block, device),
            lambda: fixed_scores(
                self.pattern, longest, longest, heads=self.config.num_heads, block=block, seed=self.seed, device=device
            ),
        )
        is_random = self.pattern is SparsePattern.RANDOM
        return select_by_scores(
            scores.expand(lengths.shape[0], -1, -1, -1), longest, longest, sparsity=self.sparsity_ratio,
            block_size=block, causal=self.config.causal, sinks=0 if is_random else self.sinks,
            local=0 if is_random else self.local, query_lengths=lengths, gradients=gradients,
        )  # fmt: skip

    def _open_gates(
        self, gate: SparsityGate, q: Tensor, k: Tensor, block: int, queries: int, keys: int, pack: Pack | None
    ) -> tuple[BlockLists, dict[str, Any]]:
        logits = gate(q, k, block, pack)
        scores = logits
        if self.training:  # logistic noise: a gate opens with the probability that is its sigmoid
            uniform = torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)
            scores = logits + uniform.logit()
        learns = logits.requires_grad
        lists = select_by_scores(
            scores, queries, keys, sparsity=self.sparsity_ratio, block_size=block, causal=self.config.causal,
            sinks=self.sinks, local=self.local, threshold=0.0, gradients=learns or _wants_gradients(q, k),
            query_lengths=None if pack is None else pack.lengths(),
        )  # fmt: skip
        self._gates = None
        if not learns:
            return lists, {}
        gates = logits.sigmoid()
        if pack is None:
            self._gates = self._seen(gates, queries, keys, block)
        else:
            self._gates = gates[pack.visible_blocks(block, self.config.causal).expand_as(gates)]
        nothing = (gates - gates.detach()).float().contiguous()  # zeros with the gradient of the gates
        return lists, {"score_mod": partial(_pass_through, block=block), "captured": (nothing,)}

    def _seen(self, gates: Tensor, queries: int, keys: int, block: int) -> Tensor:
        if not self.config.causal:
            return gates
        rows, columns = gates.shape[-2:]
        last = torch.arange(1, rows + 1, device=gates.device).mul(block).clamp(max=queries).add(keys - queries - 1)
        return gates[..., torch.arange(columns, device=gates.device) * block <= last[:, None]]

    def extra_repr(self) -> str:
        config = self.config
        parts = [f"{config.embed_dim}", f"num_heads={config.num_heads}", f"sparsity_ratio={self.sparsity_ratio}"]
        parts += [f"pattern={self.pattern.value}", f"causal={config.causal}", f"kv_heads={config.kv_heads}"]
        parts += [f"block_size={self.block_size}", f"sinks={self.sinks}", f"local={self.local}"]
        return ", ".join(parts)


def _every_block(q: Tensor, k: Tensor, pack: Pack | None) -> dict[str, Any]:
    return {}


def _pass_through(score: Any, b: Any, h: Any, i: Any, j: Any, through: Any, *, block: int) -> Any:
    return score + through[b, h, i // block, j // block]


def create_sparse_attention(
    d_model: int | None = None,
    num_heads: int | None = None,
    sparsity_ratio: float = 0.9,
    pattern: SparsePattern | str = SparsePattern.DYNAMIC_THRESHOLD,
    **options: Any,
) -> DynamicSparseAttention:
    """A DynamicSparseAttention; options are its keyword arguments (causal, kv_heads, block_size, device, ...).

    sparsity_ratio also goes by the name sparsity.
    """
    options = renamed("create_sparse_attention", options, {"sparsity": "sparsity_ratio"})
    sparsity_ratio = options.pop("sparsity_ratio", sparsity_ratio)
    check_known("create_sparse_attention", options, (*_OWN_NAMES[2:], *FIELDS, *SIZES))
    return DynamicSparseAttention(d_model, num_heads, sparsity_ratio, pattern, **options)


def _pack(query: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Pack | None:
    if cu_seqlens is None:
        return None
    if query.dim() != 2:
        raise ValueError(
            f"DynamicSparseAttention: cu_seqlens are given and query has shape {list(query.shape)}; pack it as "
            "[tokens, embed_dim]"
        )
    if max_seqlen is None:
        max_seqlen = int(cu_seqlens.diff().max()) if cu_seqlens.shape[0] > 1 else 0
    return Pack(cu_seqlens.to(torch.int32), max_seqlen)


def _wants_gradients(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _pattern(pattern: SparsePattern | str) -> SparsePattern:
    try:
        return SparsePattern(pattern)
    except ValueError:
        known = ", ".join(p.value for p in SparsePattern)
        raise ValueError(f"DynamicSparseAttention: pattern is {pattern!r}; use one of {known}") from None
