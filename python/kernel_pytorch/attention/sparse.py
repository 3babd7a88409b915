"""Sparse attention: a layer that computes a share of the blocks of its scores, exactly, and says which share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..functional import BlockLists, attention, rope, select_blocks, select_by_scores
from .config import AttentionConfig
from .layers import FlashAttention3
from .sparse_patterns import (
    Pack,
    SparsePattern,
    SparsityGate,
    fixed_lists,
    fixed_scores,
    usual_block,
    visible_blocks,
)

_KEPT_SHAPES = 16  # lists of so many shapes are kept


class DynamicSparseAttention(FlashAttention3):
    """FlashAttention3 that leaves `sparsity_ratio` of its blocks of scores out; the others are exact.

    A block is `block_size` queries by as many keys (None: 16 to 128, by the length of the sequence). Rows keep their
    diagonal and, but for RANDOM, `local` neighbours and the first `sinks` blocks, whatever the ratio: short sequences
    may be less sparse than asked. `get_attention_stats` tells what was computed. Parameters are those of
    FlashAttention3, so that a dense layer's state_dict fits; LEARNED adds those of its gate.

    LEARNED: a block's gate adds nothing to the scores, but has the gradient of what it lets through (straight-through);
    in training noise makes it try others. Add `sparsity_loss()` to the model's loss: it pulls the share of open gates
    to what the ratio leaves.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        sparsity_ratio: float = 0.9,
        pattern: SparsePattern | str = SparsePattern.DYNAMIC_THRESHOLD,
        *,
        causal: bool = False,
        kv_heads: int | None = None,
        block_size: int | None = None,
        sinks: int = 1,
        local: int = 1,
        key_parts: int = 4,
        bias: bool = False,
        attention_dropout: float = 0.0,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        config = AttentionConfig(
            d_model, num_heads, kv_heads=kv_heads, causal=causal, bias=bias, attention_dropout=attention_dropout
        )
        super().__init__(config, device, dtype)
        if not 0.0 <= sparsity_ratio <= 1.0:
            raise ValueError(f"DynamicSparseAttention: sparsity_ratio is {sparsity_ratio}; use one from 0 to 1")
        if block_size is not None and (block_size < 1 or block_size % key_parts):
            raise ValueError(
                f"DynamicSparseAttention: block_size is {block_size}, which {key_parts} key_parts do not divide"
            )
        self.pattern = _pattern(pattern)
        self.sparsity_ratio, self.block_size, self.seed = sparsity_ratio, block_size, seed
        self.sinks, self.local, self.key_parts = sinks, local, key_parts
        assert config.head_dim is not None
        learned = self.pattern is SparsePattern.LEARNED
        self.gate = SparsityGate(num_heads, config.head_dim, device, dtype) if learned else None
        self._shapes: dict[tuple[Any, ...], Any] = {}
        self._computed: Callable[[], dict[str, int]] | None = None  # waits for the device
        self._gates: Tensor | None = None

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
        return self._attend(query, key, value, attention_mask, key_lengths, rotary, pack, lambda q, k, pack: {})

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
        blocks = self._computed()
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
        key = query if key is None else key
        value = key if value is None else value
        q, k, v = self._heads(self.q_proj(query)), self._heads(self.k_proj(key)), self._heads(self.v_proj(value))
        if rotary is not None:
            q, k = rope(q, k, *rotary, positions=None if pack is None else pack.positions(q.shape[0]))
        options = self._options(q, k, mask, key_lengths)
        if pack is not None:
            options |= {"cu_seqlens_q": pack.cu_seqlens, "cu_seqlens_k": pack.cu_seqlens}
            options |= {"max_seqlen_q": pack.longest, "max_seqlen_k": pack.longest}
        attended = attention(q, k, v, layout="bshd", **options, **blocks(q, k, pack))
        return self.out_proj(attended.flatten(-2))  # type: ignore[no-any-return]

    def _blocks(self, q: Tensor, k: Tensor, pack: Pack | None = None) -> dict[str, Any]:
        """attention's options for the blocks of q and k, [batch, sequence, heads, size] or [tokens, heads, size]."""
        queries, keys = (q.shape[1], k.shape[1]) if pack is None else (pack.longest, pack.longest)
        block = usual_block(keys) if self.block_size is None else self.block_size
        options: dict[str, Any] = {}
        if self.pattern is SparsePattern.DYNAMIC_THRESHOLD:
            packed: dict[str, Any] = {}
            if pack is not None:
                packed = {"cu_seqlens_q": pack.cu_seqlens, "max_seqlen_q": queries, "max_seqlen_k": keys}
            lists = select_blocks(
                q, k, sparsity=self.sparsity_ratio, block_size=block, causal=self.config.causal, layout="bshd",
                key_parts=self.key_parts, sinks=self.sinks, local=self.local, gradients=_wants_gradients(q, k),
                **packed,
            )  # fmt: skip
        elif self.gate is not None:
            lists, options = self._open_gates(self.gate, q, k, block, queries, keys, pack)
        elif pack is None or self.pattern is SparsePattern.STRIDED:
            lists = self._fixed(queries, keys, block, q.device)
        else:
            lists = self._fixed_of_pack(pack, block, _wants_gradients(q, k))
        batch = q.shape[0]
        self._computed = lambda: self._count(lists, batch, queries, keys, block, pack)
        return {"block_mask": lists, **options}

    def _count(
        self, lists: BlockLists, batch: int, queries: int, keys: int, block: int, pack: Pack | None
    ) -> dict[str, int]:
        causal, heads = self.config.causal, self.config.num_heads
        if pack is None:
            counts, batch_heads = lists.counts(), batch * heads
            total = batch_heads * visible_blocks(queries, keys, block, causal)
            computed = batch_heads // max(counts.shape[0] * counts.shape[1], 1) * int(counts.sum())
        else:  # lists of the longest sequence may name blocks that another does not have
            visible, listed = pack.visible_blocks(block, causal), lists.block_map()
            total, computed = heads * int(visible.sum()), heads // listed.shape[1] * int((visible & listed).sum())
        return {"block_size": block, "blocks_total": total, "blocks_computed": computed}

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

        def pass_through(score: Any, b: Any, h: Any, i: Any, j: Any, through: Any) -> Any:
            return score + through[b, h, i // block, j // block]

        return lists, {"score_mod": pass_through, "captured": (nothing,)}

    def _seen(self, gates: Tensor, queries: int, keys: int, block: int) -> Tensor:
        if not self.config.causal:
            return gates
        rows, columns = gates.shape[-2:]
        last = torch.arange(1, rows + 1, device=gates.device).mul(block).clamp(max=queries).add(keys - queries - 1)
        return gates[..., torch.arange(columns, device=gates.device) * block <= last[:, None]]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sparsity_ratio={self.sparsity_ratio}, blocks={self.pattern.value}"


def create_sparse_attention(
    d_model: int,
    num_heads: int,
    sparsity_ratio: float = 0.9,
    pattern: SparsePattern | str = SparsePattern.DYNAMIC_THRESHOLD,
    **options: Any,
) -> DynamicSparseAttention:
    """A DynamicSparseAttention; options are its keyword arguments (causal, kv_heads, block_size, device, ...)."""
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
