"""The twelve steps: where they are, which road they are on, what runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .build import LEARN


@dataclass(frozen=True)
class Step:
    number: int
    folder: str
    title: str
    road: str  # "bytes" or "FLOPs"
    source: str
    before: tuple[int, ...] = ()  # earlier steps of the same problem, measured again for the table
    entries: tuple[str, ...] = ()  # kernels of a CUDA source
    runs_on_cpu: bool = False  # a CUDA source that support/on_cpu can run

    @property
    def path(self) -> Path:
        return LEARN / self.folder

    @property
    def needs_gpu(self) -> bool:
        return self.source.endswith(".cu")

    @property
    def exercises(self) -> Path:
        return next(self.path.glob("exercises.*"))

    @property
    def answers(self) -> Path:
        return LEARN / "answers" / f"{self.folder}{self.exercises.suffix}"


STEPS = (
    Step(1, "01_torch_ops", "A Python loop over torch ops", "bytes", "rms_norm.py"),
    Step(2, "02_plain_loop", "A plain C++ loop", "bytes", "rms_norm.cpp", (1,)),
    Step(3, "03_simd", "SIMD", "bytes", "rms_norm.cpp", (1, 2)),
    Step(4, "04_threads", "Threads, and only the bytes that must move", "bytes", "rms_norm.cpp", (1, 2, 3)),
    Step(5, "05_gemm", "GEMM: registers, caches, threads", "FLOPs", "gemm.cpp"),
    Step(6, "06_attention", "Attention with online softmax", "FLOPs", "attention.cpp"),
    Step(7, "07_first_kernel", "The first CUDA kernel", "bytes", "rms_norm.cu", (), ("rms_norm",), True),
    Step(8, "08_wide_loads", "Wide loads and shuffles", "bytes", "rms_norm.cu", (7,), ("rms_norm",), True),
    Step(
        9, "09_tensor_cores", "Shared memory tiles and tensor cores", "FLOPs", "gemm.cu", (),
        ("gemm_in_turn", "gemm_ahead"), True,
    ),
    Step(10, "10_tma_wgmma", "TMA and wgmma, one warpgroup per role", "FLOPs", "gemm.cu", (9,), ("gemm",)),
    Step(
        11, "11_overlap", "Softmax overlapped with GEMM: attention", "FLOPs", "attention.cu", (),
        ("attention_in_turn", "attention_overlapped"),
    ),
    Step(12, "12_block", "Backward and fusion in a whole block", "both", "block.py"),
)  # fmt: skip


def step(number: int) -> Step:
    if not 1 <= number <= len(STEPS):
        raise ValueError(f"learn: there are steps 1 to {len(STEPS)}, not {number}")
    return STEPS[number - 1]
