"""torch's context_parallel by our schedules: unmodified models on 2 and 4 processes equal one, forward and backward."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
import torch.nn.functional as torch_functional
from kernel_pytorch._optimize.patterns.calls import ATTENTION
from kernel_pytorch._rebind import rebind
from kernel_pytorch.attention import create_attention, create_context_parallel_attention, create_ring_attention
from kernel_pytorch.attention.distributed import gather_sequence, shard_sequence
from kernel_pytorch.compat.torch_context_parallel import context_parallel, context_parallel_unshard
from ranks import member, spawn_to_the_end
from torch import Tensor, nn

import kernel_pytorch

pytestmark = pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch has no gloo here")
SCHEDULES = ("ring", "zigzag", "allgather", "ulysses")
MEMBERS, ROWS, WIDTH, HEADS = 4, 32, 32, 4
SDPA = torch_functional.scaled_dot_product_attention


class Attention(nn.Module):
    """As people write it: projections, rotary embedding, torch's attention with fewer heads of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, HEADS // 2, -1)).permute(2, 0, 3, 1, 4)
        q, k = (_turned(t, cos, sin) for t in (q, k))
        y = torch_functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        return self.out(y.transpose(1, 2).flatten(2))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.layers = nn.ModuleList([Attention(), Attention()])
        angles = torch.arange(ROWS)[:, None] * torch.rand(WIDTH // HEADS // 2)
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1))
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1))

    def forward(self, tokens: Tensor, **options: Any) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x, self.cos, self.sin, **options)
        return self.head(x)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return torch_functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _text() -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    return torch.randint(50, (2, ROWS)), torch.randint(50, (2, ROWS))


def _assert_gradients(model: nn.Module, whole: nn.Module, group: Any) -> None:
    """Means over a rank's tokens: their average is the mean over all."""
    for (name, mine), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert mine.grad is not None
        distributed.all_reduce(mine.grad, group=group)
        mine.grad /= distributed.get_world_size(group)
        torch.testing.assert_close(
            mine.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


def _equals_one_process(group: Any, schedule: str, options: dict[str, Any], how: str = "") -> None:
    whole, model = Model(), Model()
    tokens, labels = _text()
    expected = whole(tokens, **options)
    _loss(expected, labels).backward()
    buffers, memory = [tokens, labels, model.cos, model.sin], model.cos.data_ptr()
    kept = [buffer.clone() for buffer in buffers]
    run = torch.compile(model, backend="aot_eager") if how == "compiled" else model
    if how == "optimized":  # its attention is torch's again inside
        for layer in model.layers:
            layer.forward = types.MethodType(rebind(Attention.forward, ATTENTION), layer)
    with context_parallel(group, buffers=buffers, buffer_seq_dims=[1, 1, 0, 0], schedule=schedule):
        assert tokens.shape == (2, ROWS // distributed.get_world_size(group))
        logits = run(tokens, **options)
        _loss(logits, labels).backward()
        (output,) = context_parallel_unshard(group, [logits.detach()], [1], schedule=schedule)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    _assert_gradients(model, whole, group)
    assert all(torch.equal(a, b) for a, b in zip(buffers, kept, strict=True)) and model.cos.data_ptr() == memory
    assert torch_functional.scaled_dot_product_attention is SDPA
    assert how != "compiled" or torch._dynamo.utils.counters["stats"]["unique_graphs"] > 2


def _masked(schedule: str) -> list[dict[str, Any]]:
    torch.manual_seed(5)
    rows = torch.rand(ROWS, ROWS) > 0.3
    rows |= torch.eye(ROWS, dtype=torch.bool)
    keys = (torch.rand(2, 1, 1, ROWS) > 0.4).float().log().clamp_min(-1e4)
    return [{"attn_mask": keys}] if schedule == "ulysses" else [{"attn_mask": rows}, {"attn_mask": keys}]


def _models_of_torch(group: Any, pair: Any) -> None:
    """nn.MultiheadAttention without weights, in a layer that has a fast path which would not see the other ranks."""
    torch.manual_seed(6)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True)
    x = torch.randn(2, ROWS, WIDTH)
    for mode in (layer.train, layer.eval):
        mode()
        with torch.no_grad():
            expected, mine = layer(x), x.clone()
            with context_parallel(pair, buffers=[mine], buffer_seq_dims=[1]):
                part = layer(mine)
        torch.testing.assert_close(context_parallel_unshard(pair, [part], [1])[0], expected, rtol=1e-5, atol=1e-5)
    heads = [torch.randn(3, ROWS, 8) for _ in range(3)]  # three dimensions
    mask = torch.randn(3, ROWS, ROWS)
    expected = SDPA(*heads, attn_mask=mask, scale=0.2)
    cut = [*(tensor.clone() for tensor in heads), mask.clone()]
    with context_parallel(group, buffers=cut, buffer_seq_dims=[1, 1, 1, -2], no_restore_buffers={cut[0]}):
        part = SDPA(*cut[:3], attn_mask=cut[3], scale=0.2)
    assert cut[0].shape == (3, ROWS // MEMBERS, 8) and torch.equal(cut[1], heads[1])
    torch.testing.assert_close(context_parallel_unshard(group, [part], [-2])[0], expected, rtol=1e-5, atol=1e-5)


def _layers_in_fsdp_and_compiled(mesh: Any) -> None:
    """Parameters sharded over the ranks that share the sequence; the compiler breaks its graph where ranks exchange."""
    from torch.distributed.fsdp import fully_shard

    group = mesh.get_group()
    x = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(8))
    for create in (create_ring_attention, create_context_parallel_attention):
        sizes = {} if create is create_ring_attention else {"context_parallel_size": 2}
        for shard, compiled, cut in ((True, False, True), (False, True, True), (True, True, True), (True, True, False)):
            torch.manual_seed(9)
            layer = create(WIDTH, HEADS, group=group, sharded=cut, schedule="zigzag", causal=True, **sizes)
            plain = create_attention(WIDTH, HEADS, causal=True)
            plain.load_state_dict(layer.state_dict())
            expected = plain(x)
            expected.square().mean().backward()
            if shard:
                fully_shard(layer, mesh=mesh)
            if compiled:
                layer.compile(backend="aot_eager")
            output = layer(shard_sequence(x, group=group, schedule="zigzag") if cut else x)
            (output.square().mean() * (1 if cut else 2)).backward()  # of the whole each rank has its tokens' share
            whole = gather_sequence(output.detach(), group=group, schedule="zigzag") if cut else output
            torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-6)
            if not shard:
                _assert_gradients(layer, plain, group)
                continue
            for mine, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-6)


def _refusals(group: Any, mesh: Any) -> None:
    from torch.distributed.tensor import experimental

    heads = [torch.randn(1, 2, 8, 8) for _ in range(3)]
    mha = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(1, 8, 16)
    with context_parallel(group):
        for what, message in (
            (lambda: mha(x, x, x), "need_weights=False"),
            (lambda: kernel_pytorch.functional.attention(*heads), "this rank's part of the sequence alone"),
            (lambda: SDPA(*heads, attn_mask=torch.ones(8, 8).bool()), r"must end with \(8 or 32, 32\)"),
            (lambda: SDPA(heads[0], *(h[:, :1] for h in heads[1:])), "enable_gqa=True"),
        ):
            with pytest.raises(RuntimeError, match=message):
                what()
    model, (tokens, _) = Model(), _text()
    with context_parallel(group, buffers=[tokens, model.cos, model.sin], buffer_seq_dims=[1, 0, 0]):
        late = model(tokens, is_causal=True).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # cos is whole again
        late.backward()
    odd = [torch.zeros(2, 32), torch.zeros(30)]
    with pytest.raises(ValueError, match="30 rows"), context_parallel(group, buffers=odd, buffer_seq_dims=[1, 0]):
        pass
    assert odd[0].shape == (2, 32)  # none is cut where one cannot be
    torchs = experimental.context_parallel(mesh, buffers=[torch.zeros(2, 32)], buffer_seq_dims=[1])
    with torchs, pytest.raises(RuntimeError, match="inside torch's context_parallel this call would attend"):
        kernel_pytorch.functional.attention(*heads)
    ours = context_parallel(group, buffers=[torch.zeros(8, requires_grad=True)], buffer_seq_dims=[0])
    with pytest.raises(ValueError, match=r"buffers\[0\] wants a gradient"), ours:
        pass


def _work(rank: int, folder: str) -> None:
    with member(rank, folder, MEMBERS):
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (MEMBERS,))
        everyone = mesh.get_group()
        meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        pair = meshes["inner"].get_group()
        for schedule in SCHEDULES:
            _equals_one_process(everyone, schedule, {"is_causal": True})
            for options in ({"is_causal": True}, {}, *_masked(schedule)):
                _equals_one_process(pair, schedule, options)
        _equals_one_process(pair, "zigzag", {"is_causal": True}, how="optimized")
        if rank < 2:  # the compiler takes seconds to start
            _equals_one_process(pair, "zigzag", {"is_causal": True}, how="compiled")
            _layers_in_fsdp_and_compiled(meshes["inner"])
        _models_of_torch(mesh, pair)
        _refusals(everyone, mesh)


def test_unmodified_models_on_many_processes_equal_one(tmp_path: Path) -> None:
    spawn_to_the_end(_work, tmp_path, MEMBERS)
