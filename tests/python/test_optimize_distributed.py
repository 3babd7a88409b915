"""optimize with FSDP2 and tensor parallelism: before them it works on, after them it says what stays."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from kernel_pytorch._optimize import demo_models  # noqa: E402
from test_optimize import always, one_thread, optimize, patterns  # noqa: E402, F401


@pytest.fixture
def group(tmp_path):
    """A group of this process alone: the same code as with many."""
    if not dist.is_available():
        pytest.skip("torch without torch.distributed")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model_and_input():
    torch.manual_seed(0)
    return demo_models.Llama(32, 2, 4, 2, 96, 64), torch.randint(96, (2, 11))


def test_sharded_afterwards(group, always):  # noqa: F811
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, x = model_and_input()
    reference = copy.deepcopy(model)
    names = list(model.state_dict())
    assert "residual + norm" in patterns(optimize(model, x, goal="train"))
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert list(model.state_dict()) == names
    output, expected = model(x), reference(x)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    output.square().mean().backward()
    expected.square().mean().backward()
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters()):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_tensor_parallel_afterwards(group, always):  # noqa: F811
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, x = model_and_input()
    reference = copy.deepcopy(model)
    optimize(model, x, goal="train")
    plan = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, init_device_mesh("cpu", (1,)), plan)
    torch.testing.assert_close(model(x), reference(x), rtol=1e-4, atol=1e-5)


def test_tensor_parallel_before_is_refused_by_name(group, always):  # noqa: F811
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, x = model_and_input()
    reference = copy.deepcopy(model)
    plan = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, init_device_mesh("cpu", (1,)), plan)
    result = optimize(model, x, goal="train")
    reasons = {one["path"]: one["reason"] for one in result.report.data["refusals"]}
    assert "DTensor" in reasons["layers.0.mlp.gate_proj"], reasons
    assert "optimize first" in reasons["layers.0.mlp.gate_proj"]
    assert "rms_norm" in patterns(result)  # what is not parallel is still replaced
    torch.testing.assert_close(model(x), reference(x), rtol=1e-4, atol=1e-5)


def test_no_graphs_of_a_model_that_ranks_share(monkeypatch):
    from types import SimpleNamespace

    from kernel_pytorch._optimize import agreement
    from kernel_pytorch._optimize.patterns import graphs

    monkeypatch.setattr(agreement, "_devices", [torch.device("cpu")])
    context = SimpleNamespace(device=torch.device("cuda"), compiled=False, trains=False)
    refusal = graphs.find(context, "", torch.nn.Linear(4, 4), None)
    assert "ranks exchange tensors" in refusal.reason
