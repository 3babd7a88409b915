"""Operations and bytes of ops, and which kernel on a GPU they belong to: what the report's roofline is drawn from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch._ops.float8 import quantize, scaled_matmul  # noqa: E402
from kernel_pytorch._optimize.attribution import costs_by_kernel  # noqa: E402
from kernel_pytorch._optimize.costs import counted  # noqa: E402
from kernel_pytorch._optimize.measure import kernels_of, own_us  # noqa: E402

from kernel_pytorch import functional as F  # noqa: E402


def flops(run) -> float:
    return sum(call[1] for calls in counted(run)[1].values() for call in calls)


def test_products_are_counted_by_their_sizes() -> None:
    x, w, v = torch.randn(2, 6, 8), torch.randn(16, 8), torch.randn(8, 16)
    assert flops(lambda: F.linear(x, w)) == 2 * 12 * 8 * 16 == flops(lambda: torch.nn.functional.linear(x, w))
    assert flops(lambda: F.matmul(x, v)) == 2 * 12 * 8 * 16
    assert flops(lambda: F.mlp(x, w, v)) == 2 * 2 * 12 * 8 * 16
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 10, 8)
    assert flops(lambda: F.attention(q, k, k)) == 4 * 2 * 4 * 6 * 10 * 8
    assert flops(lambda: F.attention(q, k, k, causal=True)) == 2 * 2 * 4 * 6 * 10 * 8
    turned = q.transpose(1, 2), k.transpose(1, 2)
    assert flops(lambda: F.attention(turned[0], turned[1], turned[1], layout="bshd")) == 4 * 2 * 4 * 6 * 10 * 8
    packed, starts = torch.randn(12, 4, 8), torch.tensor([0, 6, 12], dtype=torch.int32)
    run = lambda: F.attention(packed, packed, packed, cu_seqlens_q=starts, cu_seqlens_k=starts)  # noqa: E731
    assert flops(run) == 4 * 12 * 4 * 8 * 6


def test_backward_products_are_counted_too() -> None:
    x, w = torch.randn(6, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    once = 2 * 6 * 8 * 16

    def step() -> None:
        F.linear(x, w).sum().backward()

    found = counted(step)[1]
    assert sum(call[1] for name, calls in found.items() if "kernel_pytorch" in name for call in calls) == 3 * once


def test_other_ops_do_one_operation_an_element() -> None:
    x = torch.randn(4, 8)
    assert flops(lambda: F.rms_norm(x)) == 32
    assert flops(lambda: x.clone().add_(1)) == 64


def test_rows_of_a_cpu_profile_carry_costs() -> None:
    x, w = torch.randn(64, 32), torch.randn(48, 32)
    rows, launches = kernels_of(lambda: F.rms_norm(F.linear(x, w)), torch.device("cpu"))
    by_name = {row["name"]: row for row in rows if row["ours"]}
    product, norm = by_name["kernel_pytorch::linear"], by_name["kernel_pytorch::rms_norm"]
    assert product["flops"] == 2 * 64 * 32 * 48 and product["bytes"] == 4 * (64 * 32 + 32 * 48 + 64 * 48)
    assert norm["flops"] == 64 * 48 and norm["bytes"] == 2 * 4 * 64 * 48 and launches == 2


def test_an_op_gets_the_time_of_what_it_calls_and_no_wrapper_its_operations() -> None:
    layer, x = torch.nn.Conv2d(8, 16, 3), torch.randn(2, 8, 64, 64)
    with torch.no_grad():
        rows, _ = kernels_of(lambda: layer(x), torch.device("cpu"))
    counted_rows = [row for row in rows if row["flops"]]
    assert [row["name"] for row in counted_rows] == ["aten::convolution"]
    assert counted_rows[0]["total_us"] > 0.8 * sum(row["total_us"] for row in rows)


def test_a_roof_is_the_fastest_turn_and_one_of_a_busy_machine_is_measured_again(monkeypatch) -> None:
    from kernel_pytorch._optimize import roofs as module

    device, times = torch.device("cpu"), iter([])
    monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(module, "once_us", lambda *_: next(times))
    slow = [300.0, 100.0, 200.0] * 3
    times = iter([*slow, *slow])
    busy = module.roofs(device, torch.float32)
    assert busy["busy"] and busy["copy_bytes_per_second"] == 2 * (1 << 24) / 100.0 * 1e6
    times = iter([*[50.0] * 9, *[110.0] * 9])
    quiet = module.roofs(device, torch.float32)
    assert not quiet["busy"] and quiet["copy_bytes_per_second"] == 2 * busy["copy_bytes_per_second"]
    assert quiet["matmul_flops_per_second"] == busy["matmul_flops_per_second"]  # the higher of both
    assert module.roofs(device, torch.float32) is quiet  # and not again


def test_products_of_float8_are_counted_by_themselves() -> None:
    a, b = torch.randn(64, 128), torch.randn(32, 128)
    codes = [quantize(one) for one in (a, b)]
    run = lambda: scaled_matmul(codes[0].codes, codes[1].codes, codes[0].scales, codes[1].scales)  # noqa: E731
    assert flops(run) == 2 * 64 * 32 * 128
    cost, _ = counted(run, ridge=0.1)
    assert cost.float8_flops == 2 * 64 * 32 * 128 and cost.flops == cost.bytes == 0
    rounding, _ = counted(lambda: quantize(a, transposed=True))  # making room is no work
    assert rounding.launches == 1 and 4 * a.numel() + 2 * a.numel() <= rounding.bytes < 7 * a.numel()


def test_torchs_attention_counts_what_a_causal_mask_leaves() -> None:
    q, k = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8)
    attend = torch.nn.functional.scaled_dot_product_attention
    ours = flops(lambda: F.attention(q, k, k, causal=True))
    assert flops(lambda: attend(q, k, k, is_causal=True, enable_gqa=True)) == pytest.approx(ours, rel=0.2)


def test_a_kernel_launched_ahead_does_not_count_its_waiting() -> None:
    ended: dict = {}
    span = lambda start, end, stream=7: SimpleNamespace(  # noqa: E731
        time_range=SimpleNamespace(start=start, end=end), device_resource_id=stream
    )
    assert own_us(span(10.0, 110.0), ended) == 100.0
    assert own_us(span(15.0, 116.0), ended) == 6.0  # it began early, to be there in time
    assert own_us(span(20.0, 50.0), ended) == 0.0
    assert own_us(span(20.0, 50.0, stream=8), ended) == 30.0
    assert own_us(span(200.0, 201.0), ended) == 1.0


def host(name, start, kernels=(), parent=None):
    """An event of the profiler, with kernels as (name, microseconds)."""
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name="CPU"),
        time_range=SimpleNamespace(start=start),
        cpu_parent=parent,
        kernels=[SimpleNamespace(name=kernel, duration=us) for kernel, us in kernels],
    )


def test_kernels_get_the_cost_of_the_op_around_them() -> None:
    attention = host("aten::_sdpa", 20)
    inner = host("aten::_flash", 21, [("flash", 9.0), ("fill", 1.0)], attention)
    events = [
        attention,
        inner,
        host("aten::mm", 10, [("gemm_small", 2.0)]),
        host("aten::mm", 30, [("gemm_large", 8.0), ("split_sum", 1.0)]),
        SimpleNamespace(device_type=SimpleNamespace(name="CUDA")),
    ]
    by_op = {"aten::_sdpa": [(100.0, 1000.0)], "aten::mm": [(10.0, 20.0), (30.0, 60.0)]}
    assert costs_by_kernel(events, by_op) == {
        "flash": (1, 100.0, 1000.0),
        "gemm_small": (1, 10.0, 20.0),
        "gemm_large": (1, 30.0, 60.0),
    }


def test_a_kernel_that_the_profiler_shows_twice_is_one() -> None:
    product = host("aten::mm", 1, [("gemm", 3.0)])
    events = [product, host("Activity Buffer Request", 2, [("gemm", 3.0)], product)]
    assert costs_by_kernel(events, {"aten::mm": [(8.0, 64.0)]}) == {"gemm": (1, 8.0, 64.0)}


def test_kernels_without_an_owner_for_every_call_get_none() -> None:
    events = [host("aten::add", 1, [("add", 1.0)]), host("other", 2, [("add", 1.0)])]
    assert costs_by_kernel(events, {"aten::add": [(8.0, 1.0)]}) == {}
    assert costs_by_kernel(events[:1], {"aten::add": [(8.0, 1.0), (8.0, 1.0)]}) == {}  # another run was counted


@pytest.mark.gpu
def test_kernels_on_a_gpu_carry_costs() -> None:
    x, w = torch.randn(512, 256, device="cuda").bfloat16(), torch.randn(1024, 256, device="cuda").bfloat16()
    rows, _ = kernels_of(lambda: F.rms_norm(torch.nn.functional.linear(x, w)), torch.device("cuda"))
    known = {row["flops"]: row for row in rows if row["flops"]}
    assert known[2 * 512 * 256 * 1024]["bytes"] == 2 * (512 * 256 + 1024 * 256 + 512 * 1024)
    assert known[512 * 1024]["ours"] and known[512 * 1024]["bytes"] == 2 * 2 * 512 * 1024
