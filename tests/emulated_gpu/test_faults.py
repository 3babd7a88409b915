"""The emulated GPU finds the faults that tests/emulated_gpu/README.md promises: each kernel here has one of them."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest
from emulated_driver import Driver, Kernel

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers switch by x86-64 assembly")

THREADS = 128
LAUNCHES = 12  # each runs its threads in another order
ASYNC_COPY = ("kernel_pytorch/cuda/ptx/async_copy.cuh", "kernel_pytorch/cuda/ptx/memory.cuh")
MBARRIER = ("kernel_pytorch/cuda/ptx/mbarrier.cuh", "kernel_pytorch/cuda/ptx/memory.cuh")
BARRIER = ("kernel_pytorch/cuda/ptx/named_barrier.cuh",)


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver()


@pytest.fixture
def words(driver: Driver) -> Iterator[int]:
    address = driver.allocate(THREADS)
    yield address
    driver.free(address)


def compiled(driver: Driver, body: str, headers: tuple[str, ...] = ()) -> Kernel:
    includes = "".join(f'#include "{name}"\n' for name in ("kernel_pytorch/base/fixed_width.h", *headers))
    text = f"{includes}\nusing namespace kernel_pytorch;\n__global__ void test(int* words) {{\n{body}\n}}\n"
    return Kernel(driver, text if headers else text.replace("using namespace kernel_pytorch;\n", ""), "test", headers)


def outcomes(driver: Driver, kernel: Kernel, words: int, expected: list[int]) -> list[bool]:
    results = []
    for _ in range(LAUNCHES):
        assert kernel.launch(words, threads=THREADS) == 0, driver.last_error()
        results.append(driver.read(words, THREADS) == expected)
    return results


REVERSE = """
  __shared__ int shared[128];
  const int thread = threadIdx.x;
  shared[thread] = 3 * thread;
  {barrier}
  words[thread] = shared[127 - thread];
"""
REVERSED = [3 * (THREADS - 1 - i) for i in range(THREADS)]


def test_a_barrier_orders_threads(driver: Driver, words: int) -> None:
    kernel = compiled(driver, REVERSE.format(barrier="__syncthreads();"))
    assert all(outcomes(driver, kernel, words, REVERSED))


@pytest.mark.parametrize("barrier", ["", "__syncwarp();"])
def test_a_missing_barrier_shows_as_wrong_values(driver: Driver, words: int, barrier: str) -> None:
    kernel = compiled(driver, REVERSE.format(barrier=barrier))
    assert not any(outcomes(driver, kernel, words, REVERSED))


def test_a_barrier_missing_before_the_next_round_shows(driver: Driver, words: int) -> None:
    body = """
  __shared__ int shared[128];
  const int thread = threadIdx.x;
  int value = thread;
  for (int round = 0; round < 4; ++round) {{
    shared[thread] = value;
    __syncthreads();
    value = shared[(thread + 33) % 128];
    {barrier}
  }}
  words[thread] = value;
"""
    expected = [(i + 4 * 33) % THREADS for i in range(THREADS)]
    assert all(outcomes(driver, compiled(driver, body.format(barrier="__syncthreads();")), words, expected))
    assert not all(outcomes(driver, compiled(driver, body.format(barrier="")), words, expected))


def test_a_copy_that_is_not_awaited_shows(driver: Driver, words: int) -> None:
    body = """
  __shared__ alignas(16) int shared[128];
  const int thread = threadIdx.x;
  words[thread] = thread + 5;
  ptx::cp_async_ca_shared_global_4(ptx::shared_address(shared + thread), words + thread);
  ptx::cp_async_commit_group();
  {wait}
  words[thread] = shared[thread];
"""
    expected = [i + 5 for i in range(THREADS)]
    awaited = compiled(driver, body.format(wait="ptx::cp_async_wait_group<0>();"), ASYNC_COPY)
    assert all(outcomes(driver, awaited, words, expected))
    late = compiled(driver, body.format(wait="ptx::cp_async_wait_group<1>();"), ASYNC_COPY)
    assert not any(outcomes(driver, late, words, expected))


@pytest.mark.parametrize(
    ("body", "headers", "message"),
    [
        ("words[threadIdx.x + 1] = 0;", (), "0 bytes past the end of an allocation of 512 bytes"),
        ("words[threadIdx.x + (1ll << 42)] = 0;", (), "illegal memory access"),
        ("if (threadIdx.x == 0) words[-1] = 0;", (), "4 bytes before an allocation of 512 bytes"),
        (
            "__shared__ int shared[8]; shared[threadIdx.x] = 1; words[0] = shared[7];",
            (),
            "past the end of shared memory",
        ),
        ("if (threadIdx.x < 32) ptx::barrier_sync(1, 64);", BARRIER, "deadlock"),
        ("__shared__ uint64_t barrier; ptx::mbarrier_arrive(ptx::shared_address(&barrier));", MBARRIER, "initialised"),
        (
            "__shared__ uint64_t barrier; const uint32_t at = ptx::shared_address(&barrier);\n"
            "if (threadIdx.x == 0) ptx::mbarrier_init(at, 64);\n__syncthreads();\n"
            "if (threadIdx.x < 63) ptx::mbarrier_arrive(at);\nwhile (!ptx::mbarrier_try_wait_parity(at, 0)) {\n}",
            MBARRIER,
            "1 of 64 arrivals",
        ),
        ("words[0] = 7 / (words[1] - words[1]);", (), "division by zero"),
        ("const volatile int* word = words;\nwhile (*word != 12345) {\n}", (), "deadlock"),
    ],
)
def test_a_fault_ends_the_launch_with_its_name(
    driver: Driver, words: int, body: str, headers: tuple[str, ...], message: str
) -> None:
    kernel = compiled(driver, body, headers)
    assert kernel.launch(words, threads=THREADS) != 0
    assert message in driver.last_error()
    # The device goes on.
    assert all(outcomes(driver, compiled(driver, "words[threadIdx.x] = 1;"), words, [1] * THREADS))


def test_fresh_memory_is_poisoned(driver: Driver, words: int) -> None:
    assert driver.read(words, THREADS) == [-1] * THREADS
    kernel = compiled(driver, "__shared__ int shared[128];\nwords[threadIdx.x] = shared[threadIdx.x] + 1;")
    assert all(outcomes(driver, kernel, words, [0] * THREADS))


def test_more_shared_memory_than_granted_is_refused(driver: Driver, words: int) -> None:
    kernel = compiled(driver, "extern __shared__ int shared[];\nshared[threadIdx.x] = 1;\nwords[0] = shared[0];")
    assert kernel.launch(words, threads=THREADS, shared_bytes=48 << 10) == 0
    assert kernel.launch(words, threads=THREADS, shared_bytes=49 << 10) == 1
    assert kernel.launch(words, threads=2048) == 1
