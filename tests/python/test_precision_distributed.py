"""FP8 over two processes (gloo): the same scales, steps and skips on both, under DDP and FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as distributed
from ranks import spawn
from torch import nn

from kernel_pytorch import precision

WRAPPERS = ("ddp", "fsdp2")
pytestmark = pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch has no gloo here")


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def _wrap(model: nn.Module, how: str) -> nn.Module:
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.save({how: _train(rank, how) for how in WRAPPERS}, Path(folder) / f"{rank}.pt")
    distributed.destroy_process_group()


def _train(rank: int, how: str) -> dict[str, object]:
    config = precision.FP8Config(scaling_strategy="delayed", max_grad_norm=1.0)
    model = _wrap(precision.convert_model_to_fp8(_model(), config), how)
    trainer = precision.FP8TrainingEngine(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(2)
    x = torch.randn(2, 24, 16)
    x[1] *= 3  # the second process sees larger values, which both must scale for
    stepped = []
    for step in range(6):
        mine = x[rank].clone()
        if step == 4 and rank == 1:
            mine[0, 0] = float("nan")
        trainer.training_step(mine, x[rank] * 0.5)
        stepped.append(trainer.optimizer_step(optimizer))
    weights = [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]
    scales = torch.stack([layer.fp8_scale for layer in precision.fp8_layers(model).values()])
    return {"stepped": stepped, "weights": weights, "scales": scales, "amax_of_both": float(x.abs().max())}


def test_two_processes_scale_and_skip_alike(tmp_path: Path) -> None:
    spawn(_work, tmp_path, 2)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for how in WRAPPERS:
        first, second = results[0][how], results[1][how]
        assert first["stepped"] == second["stepped"] == [True, True, True, True, False, True], how
        assert torch.equal(first["scales"], second["scales"])
        assert all(torch.equal(a, b) for a, b in zip(first["weights"], second["weights"]))
        assert not any(torch.equal(a, b) for a, b in zip(first["weights"], _model().parameters()))
        expected = first["amax_of_both"] / 448 * 4  # margin 2
        assert float(first["scales"][0, 0]) == pytest.approx(expected)
