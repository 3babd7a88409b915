"""What the shared library carries: device sources of its kernels, not those of the tests."""

from __future__ import annotations

from kernel_pytorch._paths import library_path


def test_only_sources_of_kernels_are_inside() -> None:
    content = library_path("kernel_pytorch").read_bytes()
    assert b"kernel_pytorch/cuda/ptx/mbarrier.cuh" in content
    assert b"_probe.cuh" not in content
    assert b"_probe_cuda.h" not in content
