"""The emulated libcuda and NVRTC by ctypes, for kernels that a test writes: what the library itself never launches."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LIBRARIES = Path(os.environ.get("KP_BUILD_DIRECTORY", ROOT / "build")) / "emulated_gpu"


class LaunchConfiguration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


def embedded(path: str) -> bytes:
    return (ROOT / path).read_bytes()


class Kernel:
    """A compiled and loaded kernel. `headers` are device sources of this library, by what an #include says."""

    def __init__(self, driver: Driver, source: str, entry: str, headers: tuple[str, ...] = ()) -> None:
        self.driver = driver
        nvrtc = driver.nvrtc
        program = ctypes.c_void_p()
        names = ("kernel_pytorch/base/fixed_width.h", *headers)
        texts = (ctypes.c_char_p * len(names))(*(embedded(name) for name in names))
        paths = (ctypes.c_char_p * len(names))(*(name.encode() for name in names))
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"test.cu", len(names), texts, paths)
        nvrtc.nvrtcAddNameExpression(program, entry.encode())
        options = (ctypes.c_char_p * 1)(b"--gpu-architecture=sm_90a")
        result = nvrtc.nvrtcCompileProgram(program, 1, options)
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        assert result == 0, log.value.decode()
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        self.code = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, self.code)
        lowered = ctypes.c_char_p()
        nvrtc.nvrtcGetLoweredName(program, entry.encode(), ctypes.byref(lowered))
        library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        none = ctypes.c_void_p()
        assert driver.cuda.cuLibraryLoadData(ctypes.byref(library), self.code, none, none, 0, none, none, 0) == 0
        assert driver.cuda.cuLibraryGetKernel(ctypes.byref(kernel), library, lowered) == 0
        self.kernel = kernel
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))

    def launch(self, address: int, *, blocks: int = 1, threads: int = 128, shared_bytes: int = 0) -> int:
        """The result of a launch with one pointer."""
        shape = LaunchConfiguration((blocks, 1, 1), (threads, 1, 1), shared_bytes)
        argument = ctypes.c_void_p(address)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        return int(self.driver.cuda.cuLaunchKernelEx(ctypes.byref(shape), self.kernel, arguments, None))


class Driver:
    """Both libraries."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL(str(LIBRARIES / "libcuda.so.1"))
        self.nvrtc = ctypes.CDLL(str(LIBRARIES / "libnvrtc_emulated.so"))
        assert self.cuda.cuInit(0) == 0

    def allocate(self, count: int) -> int:
        address = ctypes.c_ulonglong()
        assert self.cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(4 * count)) == 0
        return address.value

    def free(self, address: int) -> None:
        assert self.cuda.cuMemFree_v2(ctypes.c_ulonglong(address)) == 0

    def read(self, address: int, count: int) -> list[int]:
        words = (ctypes.c_int * count)()
        size = ctypes.c_size_t(4 * count)
        assert self.cuda.cuMemcpyDtoHAsync_v2(words, ctypes.c_ulonglong(address), size, None) == 0
        return list(words)

    def last_error(self) -> str:
        text = ctypes.c_char_p()
        self.cuda.cuGetErrorString(719, ctypes.byref(text))
        return (text.value or b"").decode()
