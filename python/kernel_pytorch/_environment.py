"""What `kpt doctor` asks the Python next to it: torch, the adapter, jax, their versions and whether they fit together.

python -m kernel_pytorch._environment KPT_VERSION HAS_CUDA prints a line per finding: health, section, text and the
command that cures it, with tabs between them. Nothing here changes anything.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

from . import __version__
from ._paths import program_path


def collect_env() -> str:
    """What a report of a problem needs: operating system, Python, packages, devices, NVRTC and settings, as `kpt
    doctor` says it. Raises ImportError where the program is missing."""
    program = str(program_path("kpt"))
    environment = {**os.environ, "KERNEL_PYTORCH_PYTHON": sys.executable, "NO_COLOR": "1"}
    # Exit code 1 means that the doctor found a problem, which is what the text is for.
    said = subprocess.run([program, "doctor"], env=environment, capture_output=True, text=True, check=False)
    return f"{platform.platform()}\n{said.stdout}{said.stderr}"


class Finding(NamedTuple):
    health: str  # good, note, problem
    section: str
    text: str
    cure: str = ""  # a command; only of a problem


def version_of(package: str) -> str:
    """Installed version, without importing the package; "" where it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def look_at_package(program_version: str) -> Iterator[Finding]:
    text = f"{platform.python_version()}, {sys.executable}; package kernel_pytorch {__version__}"
    if program_version == __version__:
        yield Finding("good", "Python", text)
    else:
        yield Finding("problem", "Python", f"{text}, but this kpt is {program_version}", "pip install .")


def look_at_torch(has_cuda: bool) -> Iterator[Finding]:
    version = version_of("torch")
    try:
        from . import _torch  # raises where torch is missing or old, which is what this reports
    except ImportError as error:
        if version:
            yield Finding("problem", "torch", str(error), getattr(error, "cure", "pip install --force-reinstall torch"))
        else:  # most of kpt needs none
            yield Finding("note", "torch", str(error))
        return
    except OSError as error:  # what the dynamic linker says of the adapter
        yield Finding("problem", "adapter", f"does not load with torch {version}: {error}", "pip install .")
        return
    import torch  # optional: `kpt` works without it

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    count = torch.cuda.device_count() if torch.version.cuda else 0
    text = f"{torch.__version__}, {cuda}, {count} GPUs" if torch.version.cuda else f"{torch.__version__}, {cuda}"
    if has_cuda and not count:
        yield Finding("note", "torch", f"{text}, although the driver has a GPU: `kpt` can use it, this torch cannot")
    else:
        yield Finding("good", "torch", text)
    yield from look_at_threads(torch.get_num_threads())
    yield from look_at_adapter(_torch.ADAPTER)


def look_at_threads(torch_threads: int) -> Iterator[Finding]:
    """Inside torch our kernels run on torch's threads, whose number does not know of the container's quota."""
    from . import _devices  # loads the library, which says of itself why it cannot be

    cpu = _devices.devices()[0].cpu
    assert cpu is not None
    if not cpu.quota_cpus > 0 or torch_threads <= cpu.cores:
        return
    text = f"{torch_threads} threads, but the container's quota is {cpu.quota_cpus:g} CPUs: threads wait for each other"
    yield Finding("problem", "torch", text, f"export OMP_NUM_THREADS={cpu.cores}")


def look_at_adapter(path: str) -> Iterator[Finding]:
    """The adapter is loaded by now: does it belong to this package, and do its ops compute?"""
    import torch  # optional: `kpt` works without it

    library = ctypes.CDLL(path)
    facts = {}
    for name in ("kp_torch_adapter_version", "kp_torch_adapter_built_with"):
        function = getattr(library, name)
        function.restype = ctypes.c_char_p
        facts[name] = function().decode()
    own, built_with = facts["kp_torch_adapter_version"], facts["kp_torch_adapter_built_with"]
    text = f"{own}, built with torch {built_with}, loaded with torch {torch.__version__}"
    if own != __version__:
        yield Finding("problem", "adapter", f"{text}, but the package is {__version__}", "pip install .")
        return
    x = torch.arange(1.0, 65.0).reshape(2, 32)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    difference = float((torch.ops.kernel_pytorch.rms_norm(x, None, 1e-6, 0.0) - expected).abs().max())
    if difference < 1e-5:
        yield Finding("good", "adapter", f"{text}: rms_norm agrees with torch")
    else:
        yield Finding("problem", "adapter", f"{text}: rms_norm differs from torch by {difference}", "pip install .")


def look_at_jax() -> Iterator[Finding]:
    version, jaxlib = version_of("jax"), version_of("jaxlib")
    if not version:
        yield Finding("note", "jax", "not installed; kernel_pytorch.jax needs it, nothing else does")
        return
    text = f"{version}, jaxlib {jaxlib or 'missing'}"
    if version.split(".")[:2] != jaxlib.split(".")[:2]:
        yield Finding("problem", "jax", f"{text}: they do not belong together", f"pip install jaxlib=={version}")
        return
    os.environ["JAX_PLATFORMS"] = "cpu"  # a look at the adapter is no reason to take a GPU's memory
    try:
        from . import jax as adapter  # raises where it cannot serve this jax, which is what this reports
    except (ImportError, OSError) as error:
        yield Finding("note", "jax", f"{text}: {error}")
        return
    import jax.numpy as jnp  # optional: `kpt` works without it

    x = jnp.arange(1.0, 65.0).reshape(2, 32)
    expected = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    difference = float(abs(adapter.rms_norm(x) - expected).max())
    if difference < 1e-5:
        yield Finding("good", "jax", f"{text}: rms_norm agrees with jax.numpy")
    else:
        yield Finding("problem", "jax", f"{text}: rms_norm differs from jax.numpy by {difference}", "pip install .")


def main(words: list[str]) -> int:
    program_version, has_cuda = words[0], words[1] == "1"
    for finding in (*look_at_package(program_version), *look_at_torch(has_cuda), *look_at_jax()):
        print("\t".join(" ".join(part.split()) for part in finding), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
