"""Segments with a carried past: full causal attention where all of it is kept, and never another sequence's."""

from __future__ import annotations

import pytest
import torch
from kernel_pytorch.advanced_memory import LongSequenceOptimizer, SegmentedAttentionMemory
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
