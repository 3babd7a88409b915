"""Segments with a carried past: full causal attention where all of it is kept, and never another sequence's."""

from __future__ import annotations

import pytest
import torch
from kernel_pytorch.advanced_memory import (
    IncrementalSequenceCache,
    LongSequenceOptimizer,
    SegmentedAttentionMemory,
    StreamingSequenceProcessor,
)
from kernel_pytorch.functional import attention


def _memory(memory_length: int, segment_length: int = 7) -> SegmentedAttentionMemory:
    torch.manual_seed(1)
    return SegmentedAttentionMemory(32, 4, segment_length, memory_length, kv_heads=2)


def _heads(memory: SegmentedAttentionMemory, x: torch.Tensor) -> list[torch.Tensor]:
    layer = memory.attention
    return [layer._heads(project(x)) for project in (layer.q_proj, layer.k_proj, layer.v_proj)]


def test_the_whole_past_is_full_causal_attention() -> None:
    memory = _memory(35)
    x = torch.randn(2, 37, 32, requires_grad=True)
    expected = memory.attention(x)  # causal, in one call
    output = memory(x)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn_like(output)
    wanted = torch.autograd.grad((expected * weights).sum(), [x, *memory.parameters()])
    for grad, one in zip(torch.autograd.grad((output * weights).sum(), [x, *memory.parameters()]), wanted, strict=True):
        torch.testing.assert_close(grad, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("memory_length", [0, 3, 12])
def test_a_short_memory_is_a_mask(memory_length: int) -> None:
    memory = _memory(memory_length)
    x = torch.randn(2, 37, 32)
    place = torch.arange(37)
    first_seen = place.div(7, rounding_mode="floor") * 7 - memory_length
    mask = (place[None] <= place[:, None]) & (place[None] >= first_seen[:, None])
    attended = attention(*_heads(memory, x), layout="bshd", mask=mask)
    expected = memory.attention.out_proj(attended.flatten(-2))
    torch.testing.assert_close(memory(x), expected, rtol=1e-5, atol=1e-6)


def test_segments_are_one_sequence_and_sequences_stay_apart() -> None:
    memory = _memory(12)
    x = torch.randn(2, 37, 32)
    whole = memory(x)
    cut = LongSequenceOptimizer(7).segment_sequence(x)
    assert [segment.shape[1] for segment in cut] == [7] * 5 + [2]
    assert cut[0].data_ptr() == x.data_ptr()  # views
    for _ in range(2):  # the second time the first segment begins anew
        torch.testing.assert_close(torch.cat([memory(segment) for segment in cut], 1), whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(memory(x), whole)  # a whole sequence neither reads nor writes what is carried
    with pytest.raises(ValueError, match="begins at place 14; what is carried ends at place 37 of 2 sequences"):
        memory(cut[2])
    memory.reset()
    with pytest.raises(ValueError, match="begins at place 7; what is carried ends at place 0"):
        memory(cut[1])
    for segment in cut[:1]:
        memory(segment)
    with pytest.raises(ValueError, match="a segment of 1 sequences begins at place 7"):
        memory(LongSequenceOptimizer(7).segment_sequence(x[:1])[1])


def test_state_in_and_out() -> None:
    memory = _memory(12)
    x = torch.randn(2, 35, 32)
    whole = memory(x)
    state, outputs = None, []
    for segment in x.split(14, 1):  # two segments a call
        output, state = memory.stream(segment, state)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-5, atol=1e-6)
    assert state is not None and state.place == 35 and state.key.shape == (2, 12, 2, 8)
    empty, same = memory.stream(x[:, :0], state)
    assert empty.shape == (2, 0, 32) and same.place == 35
    with pytest.raises(ValueError, match="use at least 1 and 0"):
        _memory(-1)
    with pytest.raises(ValueError, match="max_segment_length is 0"):
        LongSequenceOptimizer(0)


@pytest.mark.parametrize("pieces", [[5, 1, 90, 3, 64, 37], [200], [1] * 40 + [160]])
def test_pieces_of_any_length_are_one_sequence(pieces: list[int]) -> None:
    torch.manual_seed(0)
    memory = SegmentedAttentionMemory(32, 4, segment_length=16, memory_length=48)
    processor = StreamingSequenceProcessor(memory, 32)
    for _ in range(2):  # flush begins anew
        x = torch.randn(2, 200, 32)
        with torch.no_grad():
            outputs = [processor.process(part) for part in x.split(pieces, 1)] + [processor.flush()]
            torch.testing.assert_close(torch.cat([one for one in outputs if one is not None], 1), memory(x))
    assert processor.flush() is None
    with pytest.raises(TypeError, match="Linear, which has no stream"):
        StreamingSequenceProcessor(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_cache_keeps_the_last_places() -> None:
    cache, keys, values = IncrementalSequenceCache(20), [], []
    moves, memory = 0, 0
    for step in range(100):
        places = 3 if step % 7 == 0 else 50 if step == 60 else 1
        key, value = torch.randn(2, places, 4, 8), torch.randn(2, places, 6)
        keys.append(key)
        values.append(value)
        kept = cache.append(key, value)
        moves += kept[0].untyped_storage().data_ptr() != memory
        memory = kept[0].untyped_storage().data_ptr()
        assert torch.equal(kept[0], torch.cat(keys, 1)[:, -20:])
        assert torch.equal(kept[1], torch.cat(values, 1)[:, -20:]) and len(cache) == kept[0].shape[1]
    assert moves < 20, "most calls copy their own places alone"
    cache.reset()
    assert len(cache) == 0 and torch.equal(cache.append(keys[0], values[0])[0], keys[0])
    with pytest.raises(ValueError, match="key has 1 sequences, the cache 2"):
        cache.append(keys[0][:1], values[0][:1])
