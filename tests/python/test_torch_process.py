"""Processes and threads: calls after fork, in DataLoader workers, from many threads; imports without torch and with an
old one; what an import costs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch import functional  # noqa: E402

X = torch.randn(256, 1024)
WEIGHT = torch.randn(1024)


def run_python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def wait_for_child(pid: int, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError(f"the child of fork() hung for {seconds} s")


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("threads", [1, 2])
def test_calls_after_fork(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected = functional.rms_norm(X, WEIGHT)  # torch's threads have worked in the parent
        pid = os.fork()
        if pid == 0:
            output = functional.rms_norm(X, WEIGHT)
            torch.set_num_threads(1)  # torch's own operations hang on its threads here, ours must not
            os._exit(0 if torch.equal(output, expected) else 1)
        assert wait_for_child(pid, 60) == 0
        assert torch.equal(functional.rms_norm(X, WEIGHT), expected)
    finally:
        torch.set_num_threads(before)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return functional.rms_norm(X[index * 32 : index * 32 + 32], WEIGHT)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_calls_in_data_loader_workers():
    expected = functional.rms_norm(X, WEIGHT)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=None, num_workers=2, timeout=60)
    assert torch.equal(torch.cat(list(loader)), expected)


def test_eight_threads_forward_and_backward():
    def gradients(seed):
        x = (X + seed).requires_grad_()
        weight = WEIGHT.clone().requires_grad_()
        output, total = functional.add_rms_norm(x, X, weight)
        (functional.layer_norm(output, weight).square().sum() + total.sum()).backward()
        return x.grad, weight.grad

    expected = [gradients(seed) for seed in range(4)]
    start = threading.Barrier(8)

    def work(index):
        start.wait()
        return [gradients((index + i) % 4) for i in range(4)]

    with ThreadPoolExecutor(8) as pool:
        for index, results in enumerate(pool.map(work, range(8))):
            for i, (x_grad, weight_grad) in enumerate(results):
                assert torch.equal(x_grad, expected[(index + i) % 4][0])
                torch.testing.assert_close(weight_grad, expected[(index + i) % 4][1])


def test_import_does_not_load_torch():
    code = "import sys, kernel_pytorch; assert 'torch' not in sys.modules; print(kernel_pytorch.__version__)"
    assert run_python(code).strip()


def test_without_torch_the_message_names_the_cure():
    code = """
import sys
sys.modules["torch"] = None
import kernel_pytorch
try:
    kernel_pytorch.functional
except ImportError as error:
    print(error)
"""
    message = run_python(code)
    assert "needs torch" in message and "pip install 'torch>=2.11'" in message


def test_an_old_torch_is_refused_before_loading():
    versions = ["2.10.0", "2.9.1+cu128", "1.13.0"]
    code = f"""
import torch
import kernel_pytorch
for torch.__version__ in {versions}:
    try:
        kernel_pytorch.functional
    except ImportError as error:
        print(error)
    assert not hasattr(torch.ops.kernel_pytorch, "rms_norm")
"""
    messages = run_python(code).splitlines()
    for version, message in zip(versions, messages, strict=True):
        assert f"this is torch {version}" in message and "needs torch 2.11" in message and "pip install" in message


def test_import_costs_little_beyond_torch(tmp_path):
    # A collection of garbage, 80 ms over torch's objects, falls into one import or another: it is not this one's cost.
    code = """
import gc, time
gc.disable()
begin = time.thread_time()
import torch
start = time.thread_time()
import kernel_pytorch.core, kernel_pytorch.functional
print(time.thread_time() - start, start - begin)
"""
    # Bytecode as an installation has it; the first import writes it.
    bytecode = dict(PYTHONDONTWRITEBYTECODE="", PYTHONPYCACHEPREFIX=str(tmp_path))
    runs = [tuple(map(float, run_python(code, **bytecode).split())) for _ in range(3)][1:]
    ours, torchs = min(runs)
    assert ours < max(0.130, 0.15 * torchs), f"the import costs {ours} seconds of the CPU, torch's {torchs}"


def test_the_names_of_the_package():
    import kernel_pytorch

    assert {"functional", "core", "__version__"} <= set(dir(kernel_pytorch))
    assert kernel_pytorch.functional is functional
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        kernel_pytorch.nonsense  # noqa: B018
