"""Registers the FFI handlers of libkernel_pytorch_jax.so with XLA, once."""

from __future__ import annotations

import ctypes
import functools

from .. import __version__, _library
from .._paths import library_path
from .._shape_rules import declared

try:
    import jax
    import jaxlib.version
    import numpy as np
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise  # jax is there and lacks something of its own
    raise ImportError(
        f"kernel_pytorch {__version__}: kernel_pytorch.jax needs jax, which is not installed; run `pip install jax`"
    ) from error

MINIMUM_JAX = (0, 9, 1)
PREFIX = "kernel_pytorch."
NOTHING = PREFIX + "nothing"  # a target that returns at once: what XLA spends on a call by itself
_HANDLERS = {"cpu": "kp_jax_cpu", "CUDA": "kp_jax_cuda"}
_ADAPTER = "kernel_pytorch_jax"


@functools.cache
def register() -> None:
    """The handlers under the name of every declared op: a compiled program shows which op a call is."""
    version = tuple(int(part) for part in jax.__version__.split(".")[:3])
    if version < MINIMUM_JAX:
        wanted = ".".join(map(str, MINIMUM_JAX))
        raise ImportError(
            f"kernel_pytorch {__version__}: it needs jax {wanted} or later, this is jax {jax.__version__}; "
            "run `pip install --upgrade jax`"
        )
    _library.load()
    try:
        path = library_path(_ADAPTER)
    except ImportError as error:
        raise ImportError(
            f"kernel_pytorch {__version__}: jax {jax.__version__} is here, but this installation was built without its "
            "headers and has no adapter for it; run `pip install .` in the checkout again, which builds it"
        ) from error
    library = ctypes.CDLL(str(path))
    for platform, symbol in _HANDLERS.items():
        handler = jax.ffi.pycapsule(getattr(library, symbol))
        for op in declared():
            jax.ffi.register_ffi_target(PREFIX + op, handler, platform=platform)
        nothing = jax.ffi.pycapsule(library.kp_jax_nothing)
        jax.ffi.register_ffi_target(NOTHING, nothing, platform=platform)


@functools.cache
def check(platform: str) -> None:
    """A call that does nothing, before the first that does: XLA drops handlers of an interface newer than its own
    without a word, and would say at the first call of an op that there are none."""
    nothing = jax.ffi.ffi_call(NOTHING, jax.ShapeDtypeStruct((1,), np.float32))
    device = jax.local_devices(backend=platform)[0]
    try:
        with jax.default_device(device), jax.disable_jit(False):
            jax.jit(nothing).lower(jax.ShapeDtypeStruct((1,), np.float32)).compile()(np.zeros(1, np.float32))
    except Exception as error:
        if "handler" not in str(error) and "custom call" not in str(error):
            return  # nothing to translate: what else is wrong shows in the op's own call
        library = ctypes.CDLL(str(library_path(_ADAPTER)))
        version = jaxlib.version.__version__
        built = f"{library.kp_jax_ffi_major()}.{library.kp_jax_ffi_minor()}"
        raise ImportError(
            f"kernel_pytorch {__version__}: jaxlib {version} did not take its handlers for {platform}, of "
            f"XLA's FFI {built}; run `pip install --upgrade jax jaxlib`, or build kernel_pytorch with its headers"
        ) from error
