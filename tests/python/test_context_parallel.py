"""Context parallel attention over gloo: every schedule, option and gradient equals one process; failures are named."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernel_pytorch.functional as F
import pytest
import torch
import torch.distributed as distributed
from kernel_pytorch.attention import create_attention, create_context_parallel_attention, create_ring_attention
from kernel_pytorch.attention.distributed import (
    ContextParallelAttention,
    ContextParallelConfig,
    ContextParallelError,
    _exchange,
    context_parallel_attention,
    gather_sequence,
    plan_context_parallel,
    shard_sequence,
)
from kernel_pytorch.attention.distributed.context_parallel import _warn_of_fallback
from ranks import spawn
from torch import Tensor

pytestmark = pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch has no gloo here")
SCHEDULES = ("ring", "zigzag", "allgather", "ulysses")
MEMBERS = 4


def _relative(score: Any, b: Any, h: Any, q: Any, k: Any, table: Any) -> Any:
    return score + table[h, (q - k).maximum(0)]


def _tensors(dtype: torch.dtype, rows: int, key_heads: int) -> list[Tensor]:
    torch.manual_seed(7)
    heads = 4
    shapes = [(2, rows, heads, 16), (2, rows, key_heads, 16), (2, rows, key_heads, 8)]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def _options(name: str, rows: int) -> dict[str, Any]:
    torch.manual_seed(11)
    return {
        "full": {},
        "causal": {"causal": True},
        "window": {"window": (9, 3)},
        "causal window": {"causal": True, "window": (13, 0), "softcap": 2.0},
        "alibi sinks": {"causal": True, "alibi_slopes": torch.rand(4), "sinks": torch.randn(4)},
        "bias": {"bias": torch.randn(1, 4, rows, rows), "causal": True},
        "mask": {"mask": torch.rand(2, 1, rows, rows) > 0.4},
        "padding": {"mask": torch.rand(2, 1, 1, rows) > 0.4, "bias": torch.randn(4, 1, rows)},
        "dropout": {"dropout_p": 0.3, "seed": torch.tensor([3, 5]), "causal": True},
        "segments": {"query_segment_ids": torch.arange(rows).div(11, rounding_mode="floor").repeat(2, 1) - 1},
        "lengths": {"key_lengths": torch.tensor([rows - 5, rows // 3])},
        "mods": {
            "score_mod": _relative,
            "mask_mod": lambda b, h, q, k, table: (k <= q + h) | (k < 3),
            "captured": (torch.randn(4, 64),),
        },
    }[name]


REFUSED = {("ulysses", "bias"), ("ulysses", "mask"), ("ulysses", "dropout")}
OPTIONS = ("full", "causal", "window", "causal window", "alibi sinks", "bias", "mask", "padding", "dropout")
OPTIONS += ("segments", "lengths", "mods")


def _local(options: dict[str, Any], cut: Callable[..., Tensor]) -> dict[str, Any]:
    """What a member gives: bias and mask of its queries, its own ids."""
    local = dict(options)
    for name in ("bias", "mask"):
        if name in options and options[name].shape[-2] != 1:
            local[name] = cut(options[name], options[name].dim() - 2)
    if "query_segment_ids" in options:
        local["query_segment_ids"] = cut(options["query_segment_ids"], 1)
    return local


def _learned(options: dict[str, Any]) -> list[Tensor]:
    learned = [options[name] for name in ("bias", "sinks") if name in options] + list(options.get("captured", ()))
    return [tensor.detach().requires_grad_() for tensor in learned]


def _with(options: dict[str, Any], learned: list[Tensor]) -> dict[str, Any]:
    names = [name for name in ("bias", "sinks") if name in options]
    changed = {**options, **dict(zip(names, learned))}
    if "captured" in options:
        changed["captured"] = tuple(learned[len(names) :])
    return changed


def _compare(group: Any, schedule: str, name: str, dtype: torch.dtype, rows: int = 32, key_heads: int = 2) -> None:
    whole = _tensors(dtype, rows, key_heads)
    options = _options(name, rows)
    learned = _learned(options)
    expected, lse = F.attention(*whole, layout="bshd", return_lse=True, **_with(options, learned))
    weights, lse_weights = torch.randn(expected.shape).to(dtype), torch.randn_like(lse)
    kept = lse.isfinite()
    loss = (expected * weights).sum() + (lse.where(kept, 0) * lse_weights).sum()
    loss.backward()

    def cut(tensor: Tensor, dim: int = 1) -> Tensor:
        return shard_sequence(tensor, dim, group=group, schedule=schedule)

    parts = [cut(tensor.detach()).requires_grad_() for tensor in whole]
    mine = [tensor.detach().requires_grad_() for tensor in learned]
    local = _local(_with(options, mine), cut)
    output, part_lse = context_parallel_attention(*parts, group=group, schedule=schedule, return_lse=True, **local)
    tolerance = 3e-6 if dtype is torch.float32 else 0.03
    torch.testing.assert_close(output, cut(expected), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(part_lse, cut(lse, 2), rtol=3e-6, atol=3e-6)
    finite = part_lse.isfinite()
    loss = (output * cut(weights)).sum() + (part_lse.where(finite, 0) * cut(lse_weights, 2)).sum()
    loss.backward()
    for part, tensor in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.grad, cut(tensor.grad), rtol=5 * tolerance, atol=5 * tolerance)
    for one, other in zip(mine, learned, strict=True):  # each member has its share
        distributed.all_reduce(one.grad, group=group)
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-5, atol=2e-5)


def _compare_packs(group: Any, schedule: str, dtype: torch.dtype, **options: Any) -> None:
    torch.manual_seed(5)
    starts = torch.tensor([0, 5, 5, 23, 30, 41, 46])  # of 48 tokens; the last two are nobody's
    whole = [torch.randn(48, heads, 16, dtype=dtype).requires_grad_() for heads in (4, 2, 2)]
    expected, lse = F.attention(*whole, cu_seqlens_q=starts, cu_seqlens_k=starts, return_lse=True, **options)
    weights = torch.randn(expected.shape).to(dtype)
    (expected * weights).sum().backward()

    def cut(tensor: Tensor, dim: int = 0) -> Tensor:
        return shard_sequence(tensor, dim, group=group, schedule=schedule)

    parts = [cut(tensor.detach()).requires_grad_() for tensor in whole]
    output, part_lse = context_parallel_attention(
        *parts, group=group, schedule=schedule, cu_seqlens=starts, return_lse=True, **options
    )
    tolerance = 3e-6 if dtype is torch.float32 else 0.03
    torch.testing.assert_close(output, cut(expected), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(part_lse, cut(lse, 1), rtol=3e-6, atol=3e-6)
    (output * cut(weights)).sum().backward()
    for part, tensor in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.grad, cut(tensor.grad), rtol=5 * tolerance, atol=5 * tolerance)


def _equal_one_process(pair: Any) -> None:
    for group in (distributed.group.WORLD, pair):
        for schedule in SCHEDULES:
            for name in OPTIONS:
                if (schedule, name) in REFUSED:
                    with pytest.raises(ValueError, match='use schedule="ring"'):
                        _compare(group, schedule, name, torch.float32)
                else:
                    _compare(group, schedule, name, torch.float32)
            _compare(group, schedule, "causal", torch.bfloat16, key_heads=1 if schedule == "ulysses" else 4)
            _compare_packs(group, schedule, torch.float32, causal=True)
            _compare_packs(group, schedule, torch.float32, window=(4, 2))
            _compare_packs(group, schedule, torch.bfloat16, causal=True)
    whole = torch.randn(2, 32, 3)
    distributed.broadcast(whole, 0)
    for schedule in SCHEDULES:
        part = shard_sequence(whole, group=pair, schedule=schedule)
        assert torch.equal(gather_sequence(part, group=pair, schedule=schedule), whole)


def _layers_equal_one_process(pair: Any) -> None:
    torch.manual_seed(2)
    whole = create_attention(32, 4, kv_heads=2, causal=True)
    x = torch.randn(2, 32, 32, requires_grad=True)
    weights = torch.randn(2, 32, 32)
    expected = whole(x)
    (expected * weights).sum().backward()
    for schedule in (*SCHEDULES, "auto"):
        for sharded in (False, True) if schedule != "auto" else (False,):
            layer = create_context_parallel_attention(
                32, 4, 2, group=pair, schedule=schedule, kv_heads=2, sharded=sharded, causal=True
            )
            layer.load_state_dict(whole.state_dict())
            mine = shard_sequence(x.detach(), group=pair, schedule=schedule) if sharded else x.detach().clone()
            mine.requires_grad_()
            output = layer(mine)
            if sharded:
                (output * shard_sequence(weights, group=pair, schedule=schedule)).sum().backward()
                output = gather_sequence(output, group=pair, schedule=schedule)
            else:
                (output * weights).sum().backward()
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
            for parameter, wanted in zip(layer.parameters(), whole.parameters(), strict=True):
                distributed.all_reduce(parameter.grad, group=pair)  # each member has its tokens' share
                torch.testing.assert_close(parameter.grad, wanted.grad, rtol=1e-4, atol=1e-5)


def _layers_read_masks_as_one_process(pair: Any) -> None:
    """Whole and sharded layers, with every form of a mask that the rule has."""
    torch.manual_seed(3)
    whole = create_attention(32, 4, kv_heads=2)
    x = torch.randn(2, 32, 32)
    kept = torch.arange(32)[None] < torch.tensor([[32], [21]])
    rows = torch.rand(2, 1, 32, 32) < 0.7
    masks = {
        "integers": kept.long(),
        "padding": kept,
        "additive padding": torch.zeros(2, 32).masked_fill(~kept, -torch.inf),
        "additive rows": torch.randn(2, 4, 32, 32),
        "rows": rows,
        "matrix": rows[0, 0],
    }
    for name, mask in masks.items():
        expected = whole(x, attention_mask=mask)
        has_rows = mask.shape[-2] == 32
        for schedule in SCHEDULES[:3] if has_rows else SCHEDULES:
            for sharded in (False, True):
                layer = create_context_parallel_attention(
                    32, 4, 2, group=pair, schedule=schedule, kv_heads=2, sharded=sharded
                )
                layer.load_state_dict(whole.state_dict())
                mine, own = x, mask
                if sharded:
                    mine = shard_sequence(x, group=pair, schedule=schedule)
                    own = shard_sequence(mask, mask.dim() - 2, group=pair, schedule=schedule) if has_rows else mask
                output = layer(mine, own)
                output = gather_sequence(output, group=pair, schedule=schedule) if sharded else output
                torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def _fully_sharded_layer_trains(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (MEMBERS,))
    torch.manual_seed(2)
    layer = create_ring_attention(32, 4, group=mesh.get_group(), sharded=True, causal=True)
    plain = create_attention(32, 4, causal=True)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(1, 32, 32)
    plain(x).square().mean().backward()
    fully_shard(layer, mesh=mesh)
    mine = shard_sequence(x, group=mesh.get_group(), schedule="zigzag")
    layer(mine).square().mean().backward()  # FSDP2 averages, as the mean over all tokens does
    for parameter, wanted in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted.grad, rtol=1e-4, atol=1e-6)


def _name_who_disagrees(rank: int) -> None:
    everyone = distributed.group.WORLD
    rows = 6 if rank == 2 else 8
    heads = [torch.randn(1, rows, 4, 16) for _ in range(3)]
    with pytest.raises(ContextParallelError, match=r"query must be the same.*rank 2 has \[1, 6, 4, 16\], rank 0 has"):
        context_parallel_attention(*heads, group=everyone)
    heads = [torch.randn(1, 8, 4, 16) for _ in range(3)]
    with pytest.raises(ContextParallelError, match=r"causal must be the same.*rank 1 has null, rank 0 has true"):
        context_parallel_attention(*heads, group=everyone, **({} if rank == 1 else {"causal": True}))
    assert context_parallel_attention(*heads, group=everyone).shape == (1, 8, 4, 16)  # the group still works


def _name_who_died(rank: int, pair: Any) -> None:
    heads = [torch.randn(1, 8, 4, 16) for _ in range(3)]
    if rank == 2:
        _exchange.Exchange.shift = lambda *_: os._exit(0)  # in the middle of the ring
    began = time.monotonic()
    with pytest.raises(ContextParallelError, match="rank 2 died"):  # also where a neighbour left because of it
        context_parallel_attention(*heads, group=distributed.group.WORLD)
    if rank == 0:  # rank 1 has left by now, or does so while this waits for its header
        with pytest.raises(ContextParallelError, match="rank 1 died"):
            context_parallel_attention(*heads, group=pair)
    assert time.monotonic() - began < 60  # the group's time-out


def _work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    time_out = datetime.timedelta(seconds=60)
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=MEMBERS, timeout=time_out)
    pairs = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    _equal_one_process(pairs[rank // 2])
    _layers_equal_one_process(pairs[rank // 2])
    _layers_read_masks_as_one_process(pairs[rank // 2])
    _fully_sharded_layer_trains(rank)
    _name_who_disagrees(rank)
    Path(folder, f"{rank} agrees").touch()
    distributed.barrier()
    _name_who_died(rank, pairs[0])
    Path(folder, f"{rank} survived").touch()
    os._exit(0)  # the group is broken: leaving it in order would wait for the dead


def test_processes_are_one_process_and_failures_are_named(tmp_path: Path) -> None:
    spawn(_work, tmp_path, MEMBERS)
    for rank in range(MEMBERS):
        assert Path(tmp_path, f"{rank} agrees").exists(), rank
        assert rank == 2 or Path(tmp_path, f"{rank} survived").exists(), rank


def test_one_process_streams_over_keys() -> None:
    for name in OPTIONS:
        whole = _tensors(torch.float32, 32, 2)
        options = _options(name, 32)
        learned = _learned(options)
        expected = F.attention(*whole, layout="bshd", **_with(options, learned))
        weights = torch.randn_like(expected)
        expected_grads = torch.autograd.grad((expected * weights).sum(), [*whole, *learned])
        output = context_parallel_attention(*whole, key_chunk=9, **_with(options, learned))
        torch.testing.assert_close(output, expected, rtol=3e-6, atol=3e-6)
        grads = torch.autograd.grad((output * weights).sum(), [*whole, *learned])
        for grad, wanted in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(grad, wanted, rtol=2e-5, atol=2e-5)
        same = context_parallel_attention(*whole, **_with(options, learned))
        assert torch.equal(same, F.attention(*whole, layout="bshd", **_with(options, learned)))


def test_refusals_say_what_to_do() -> None:
    heads = [torch.randn(1, 8, 4, 16) for _ in range(3)]
    for options, message in (
        ({"schedule": "spiral"}, "use one of ring, zigzag"),
        ({"block_mask": object()}, "give its mask_mod"),
        ({"cu_seqlens_q": torch.tensor([0, 8])}, "give cu_seqlens"),
    ):
        with pytest.raises(ValueError, match=message):
            context_parallel_attention(*heads, **options)


def test_layers_of_one_process() -> None:
    torch.manual_seed(2)
    x = torch.randn(2, 48, 32)
    for causal in (False, True):
        layer = create_ring_attention(32, 4, kv_heads=2, **({"causal": True} if causal else {}))
        plain = create_attention(32, 4, kv_heads=2, causal=causal)
        plain.load_state_dict(layer.state_dict())
        torch.testing.assert_close(layer(x), plain(x))
    assert create_context_parallel_attention(32, 4, kv_heads=2)(x).shape == x.shape
    streaming = create_ring_attention(32, 4, kv_heads=2, chunk_size=10, causal=True)
    streaming.load_state_dict(layer.state_dict())
    torch.testing.assert_close(streaming(x), layer(x), rtol=1e-5, atol=1e-6)
    padding = torch.arange(48)[None] < torch.tensor([[48], [20]])
    shorter = layer(x[1:, :20])
    torch.testing.assert_close(layer(x, padding)[1:, :20], shorter, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="the sequence has 48 places, max_sequence_length is 40"):
        create_ring_attention(32, 4, max_sequence_length=40)(x)


def test_more_members_than_processes_are_one_process_that_says_so_once() -> None:
    _warn_of_fallback.cache_clear()
    with pytest.warns(UserWarning, match="context_parallel_size is 4 .* Start the processes with torchrun"):
        layer = create_context_parallel_attention(64, 8, 4)
    plain = create_attention(64, 8)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 30, 64)
    torch.testing.assert_close(layer(x), plain(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        create_context_parallel_attention(64, 8, 4, [torch.device("cpu")] * 4)(x)
        ContextParallelAttention(64, 8, ContextParallelConfig(4))
    with pytest.raises(RuntimeError, match=r"sharded=True .* no other process holds the other parts"):
        create_context_parallel_attention(64, 8, 4, sharded=True)
    with pytest.raises(ValueError, match="device_mesh has 1 devices, context_parallel_size is 4; give one for each"):
        create_context_parallel_attention(64, 8, 4, ["cpu"])
    with pytest.raises(TypeError, match="device_mesh is 'cpu'; give a torch DeviceMesh, or a list"):
        create_context_parallel_attention(64, 8, 4, "cpu")


@pytest.mark.parametrize("create", [create_ring_attention, create_context_parallel_attention])
def test_misspelt_options_name_the_call(create: Any) -> None:
    with pytest.raises(TypeError, match=rf"{create.__name__}: there is no argument 'causl'; did you mean 'causal'"):
        create(64, 8, causl=True)


def test_streaming_imports_no_compiler() -> None:
    """chunk_size once imported torch._dynamo at its first call, which takes ten seconds."""
    code = (
        "import sys, torch; from kernel_pytorch.attention import create_ring_attention\n"
        "x = torch.randn(1, 8, 16, requires_grad=True)\n"
        "create_ring_attention(16, 2, chunk_size=4)(x).sum().backward()\n"
        "assert 'torch._dynamo' not in sys.modules and 'sympy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_plans_say_why() -> None:
    plan = plan_context_parallel(8, 1 << 20, 36, 128, key_heads=9, causal=True)
    assert plan.schedule == "zigzag" and "36 heads" in plan.reason
    assert plan.best_of(("ring", "allgather")) in ("ring", "allgather")
    assert [one["schedule"] for one in plan.schedules] == list(SCHEDULES)
    slow = plan_context_parallel(8, 1 << 16, 36, 128, key_heads=36, causal=True, link_bytes_per_second=1e9)
    assert slow.schedules[1]["exposed_us"] > slow.schedules[1]["work_us"]
    with pytest.raises(RuntimeError, match="no schedule is possible"):
        plan_context_parallel(8, 1001, 32, 128)
