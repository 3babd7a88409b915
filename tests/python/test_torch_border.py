"""No op takes a tensor that it cannot read or may not write: walked over every op and every one of its tensors."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from op_samples import (  # noqa: E402
    argument_name,
    clone,
    is_written,
    map_tensors,
    op_names,
    ops,
    samples,
    tensor_at,
    tensor_paths,
    with_tensor,
)
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import kernel_pytorch  # noqa: E402
from kernel_pytorch import core, functional  # noqa: E402

NAMES = op_names()
WITHOUT_SHAPES = ["evaluate_expression"]  # an op of the CPU alone
WRITING = [
    name for name in NAMES if any(a.alias_info is not None for a in getattr(ops, name).default._schema.arguments)
]


def cases(name):
    """(arguments, path) for every tensor of every sample of an op."""
    return [(args, path) for args in samples()[name] for path in tensor_paths(args)]


def results(outputs):
    return [] if outputs is None else [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def shapes_of(outputs):
    return [(tuple(output.shape), output.dtype) for output in results(outputs)]


def test_every_op_has_a_sample():
    assert sorted(samples()) == NAMES
    assert len(NAMES) >= 75 and {"optimizer_step_", "softmax_", "attention_part_"} <= set(WRITING)


@pytest.mark.parametrize("name", NAMES)
def test_meta_beside_real_tensors_raises(name):
    op = getattr(ops, name)
    for args, path in cases(name):
        if len(list(tensor_paths(args))) == 1:
            continue
        one_meta = with_tensor(args, path, tensor_at(args, path).to("meta"))
        one_real = with_tensor(map_tensors(args, lambda x: x.to("meta")), path, clone(tensor_at(args, path)))
        for mixed in (one_meta, one_real):
            with pytest.raises(
                (RuntimeError, NotImplementedError), match=r"^\w+( backward)?: |kernel_pytorch::"
            ) as raised:
                op(*mixed)
            message = str(raised.value)
            if name not in WITHOUT_SHAPES:
                assert argument_name(name, path) in message and "is on meta" in message and "is on cpu" in message
                assert "move all tensors to one device" in message


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_SHAPES])
def test_meta_and_fake_calls_give_the_shapes_of_real_ones(name):
    op = getattr(ops, name)
    for args in samples()[name]:
        expected = shapes_of(op(*map_tensors(args, clone)))
        assert shapes_of(op(*map_tensors(args, lambda x: x.to("meta")))) == expected
        with FakeTensorMode() as mode:
            fake = map_tensors(args, mode.from_tensor)
            outputs = results(op(*fake))
        assert shapes_of(outputs) == expected
        assert all(output.device.type == "cpu" for output in outputs)


ROW_OPS: dict[str, Any] = {
    "rms_norm": lambda x: functional.rms_norm(x, torch.ones(x.shape[-1], dtype=x.dtype)),
    "layer_norm": lambda x: functional.layer_norm(x, residual=x)[0],
    "softmax": functional.softmax,
    "gelu": functional.gelu,
    "gated_activation": lambda x: functional.gated_activation(x, x, "silu"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROW_OPS)
def test_rows_of_any_strides_have_a_kernel_on_a_cpu(name, dtype):
    """Columns that are not neighbours in memory, as behind a patch embedding, are not left to the slow reference."""
    ours, dense = ROW_OPS[name], torch.randn(2, 7, 48).to(dtype)
    layouts = (dense.mT.contiguous().mT, torch.stack([dense, dense], -1)[..., 0], dense[:, :, :1].expand(2, 7, 48))
    for x in layouts:
        leaves = [one.detach().requires_grad_() for one in (x, x.contiguous())]
        with kernel_pytorch.record() as decisions:
            outputs = [ours(one) for one in leaves]
            for output in outputs:
                output.sum().backward()  # its gradient is one number, expanded
        assert {one.kernel for one in decisions}.isdisjoint({"reference"}), decisions
        assert torch.equal(*outputs) and torch.equal(leaves[0].grad, leaves[1].grad)


@pytest.mark.parametrize("name", NAMES)
def test_fake_beside_real_tensors_and_other_devices_raises(name):
    op = getattr(ops, name)
    for args, path in cases(name):
        if len(list(tensor_paths(args))) == 1:
            continue
        mode = FakeTensorMode()
        with pytest.raises(Exception, match=f"kernel_pytorch.{name}"):
            op(*with_tensor(args, path, mode.from_tensor(tensor_at(args, path))))
        if name in WITHOUT_SHAPES:
            continue
        with mode:
            fake = map_tensors(args, mode.from_tensor)
            elsewhere = torch.empty_like(tensor_at(fake, path), device="meta")
            i, j = path
            if j is None:
                fake = (*fake[:i], elsewhere, *fake[i + 1 :])
            else:
                fake[i][j] = elsewhere
            with pytest.raises(RuntimeError, match=r"is on meta.*is on cpu|is on cpu.*is on meta"):
                op(*fake)


def test_a_layer_left_on_meta_raises():
    with torch.device("meta"):
        layers = [core.OptimizedRMSNorm(8), core.OptimizedLayerNorm(8), core.OptimizedLinear(8, 8)]
    for layer in layers:
        for x in (torch.randn(2, 8), torch.randn(2, 8, requires_grad=True)):
            with pytest.raises(RuntimeError, match="weight is on meta, x is on cpu; move all tensors to one device"):
                layer(x)
        assert layer(torch.randn(2, 8, device="meta")).shape == (2, 8)


def test_functions_with_a_meta_tensor_raise():
    x, weight = torch.randn(4, 8), torch.randn(8, 8, device="meta")
    table = torch.randn(4, 4)
    for call in (
        lambda: functional.linear(x, weight),
        lambda: functional.linear(x, torch.randn(8, 8), weight[0]),
        lambda: functional.mlp(x, torch.randn(8, 8), weight),
        lambda: functional.matmul(x, weight),
        lambda: functional.cross_entropy(x, torch.zeros(4, dtype=torch.long, device="meta")),
        lambda: functional.embedding(torch.zeros(2, dtype=torch.long, device="meta"), x),
        lambda: functional.rope_(x.view(1, 4, 1, 8), None, table, table, positions=torch.arange(4, device="meta")),
    ):
        with pytest.raises(RuntimeError, match="is on meta"):
            call()


@pytest.mark.parametrize("name", NAMES)
def test_freed_storage_raises(name):
    op = getattr(ops, name)
    for args, path in cases(name):
        tensor = tensor_at(args, path)
        if tensor.numel() == 0:
            continue
        behind = torch.cat([tensor.new_zeros(3), tensor.flatten()])[3:].view(tensor.shape)
        shrunk = clone(tensor)
        shrunk.untyped_storage().resize_(shrunk.untyped_storage().nbytes() - 1)
        for broken in (clone(tensor), behind):
            broken.untyped_storage().resize_(0)
        for broken in (shrunk, behind, with_storage_freed(tensor)):
            with pytest.raises(RuntimeError, match="its storage has") as raised:
                op(*with_tensor(args, path, broken))
            assert f": {argument_name(name, path)} is " in str(raised.value)


def with_storage_freed(tensor):
    tensor = clone(tensor)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("name", WRITING)
def test_written_memory_has_one_owner(name):
    op = getattr(ops, name)
    for args in samples()[name]:
        paths = list(tensor_paths(args))
        for path in (path for path in paths if is_written(name, path) and tensor_at(args, path).numel() > 0):
            tensor = clone(tensor_at(args, path))
            if tensor.numel() > 1:
                expanded = tensor.flatten()[:1].reshape([1] * tensor.dim()).expand(tensor.shape)
                with pytest.raises(RuntimeError, match="one place in memory"):
                    op(*with_tensor(args, path, expanded))
            for other in paths:
                if other == path or tensor_at(args, other).numel() == 0:
                    continue
                shared = with_tensor(args, other, on_memory_of(tensor, tensor_at(args, other)))
                shared = put(shared, path, tensor)
                before = tensor.clone()
                with pytest.raises(RuntimeError, match="shares memory with") as raised:
                    op(*shared)
                assert argument_name(name, path) in str(raised.value) and argument_name(name, other) in str(
                    raised.value
                )
                torch.testing.assert_close(tensor.float(), before.float(), rtol=0, atol=0, equal_nan=True)


def on_memory_of(tensor, like):
    """A tensor with the shape and type of `like` whose first byte is the tensor's."""
    nbytes = like.untyped_storage().nbytes()
    if tensor.untyped_storage().nbytes() < nbytes:
        tensor.untyped_storage().resize_(nbytes)
    whole = torch.empty(0, dtype=like.dtype).set_(tensor.untyped_storage(), 0, like.shape, like.stride())
    return whole


def put(args, path, tensor):
    i, j = path
    if j is None:
        return (*args[:i], tensor, *args[i + 1 :])
    args[i][j] = tensor
    return args


def test_slices_of_one_tensor_are_no_overlap():
    packed = torch.randn(2, 5, 3, 4, 8)
    cos, sin = functional.rope_tables(5, 8)
    turned = functional.rope(packed[:, :, 0], packed[:, :, 1], cos, sin)
    functional.rope_(packed[:, :, 0], packed[:, :, 1], cos, sin)
    torch.testing.assert_close(packed[:, :, 0], turned[0])
    torch.testing.assert_close(packed[:, :, 1], turned[1])
    with pytest.raises(RuntimeError, match="rope_in_place: query shares memory with key"):
        functional.rope_(packed[:, :, 0], packed[:, :, 0], cos, sin)
    with pytest.raises(RuntimeError, match=r"rope_in_place: query is .* one place in memory"):
        functional.rope_(torch.randn(1, 1, 1, 8).expand(1, 5, 1, 8), None, cos, sin)


@pytest.mark.parametrize("name", NAMES)
def test_negative_views_are_resolved_or_refused_by_name(name):
    op = getattr(ops, name)
    for args, path in cases(name):
        tensor = tensor_at(args, path)
        if tensor.dtype not in (torch.float32, torch.float64, torch.bfloat16):
            continue
        if is_written(name, path):
            with pytest.raises(RuntimeError, match=r"is a negative view.*call resolve_neg\(\)") as raised:
                op(*with_tensor(args, path, torch._neg_view(clone(tensor))))
            assert argument_name(name, path) in str(raised.value)
            continue
        lazy, plain = (with_tensor(args, path, make(-tensor)) for make in (torch._neg_view, torch.neg))
        for one, other in zip(results(op(*lazy)), results(op(*plain)), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        for other in (other for other in tensor_paths(args) if is_written(name, other)):
            torch.testing.assert_close(
                tensor_at(lazy, other).float(), tensor_at(plain, other).float(), rtol=0, atol=0, equal_nan=True
            )


GROUPS = 5


@pytest.mark.parametrize("group", range(GROUPS))
def test_wrong_ranks_sizes_and_types_raise_and_never_crash(group):
    here = pathlib.Path(__file__).parent
    path = os.pathsep.join([str(here), *sys.path])
    command = [sys.executable, str(here / "op_mutations.py"), *NAMES[group::GROUPS]]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, timeout=600, check=False
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[-1] == "done", (
        f"exit {done.returncode} at: {lines[-1:]}\n{done.stderr[-2000:]}"
    )
    wrong = [line for line in lines if "WRONG" in line]
    assert not wrong, "\n".join(wrong[:20])
    assert sum(": refused" in line for line in lines) > 500 and sum(line.endswith(": taken") for line in lines) > 50
