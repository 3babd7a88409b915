"""attention_fp8 from JAX: the same bits as torch's front end, under jit too."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import kernel_pytorch.jax as kp

torch = pytest.importorskip("torch", reason="it compares with torch's front end")
from kernel_pytorch import functional  # noqa: E402


@pytest.mark.parametrize("options", [{}, {"causal": True, "rotate": True}, {"layout": "bshd", "window": (9, 3)}])
def test_it_gives_what_torch_gets(options) -> None:
    generator = np.random.default_rng(0)
    shape = (2, 20, 2, 16) if options.get("layout") == "bshd" else (2, 2, 20, 16)
    arrays = [generator.standard_normal(shape, dtype=np.float32) for _ in range(3)]
    expected = functional.attention_fp8(*map(torch.from_numpy, arrays), return_lse=True, **options)
    for call in (
        kp.attention_fp8,
        jax.jit(lambda *a, **k: kp.attention_fp8(*a, **options, **k), static_argnames="return_lse"),
    ):
        found = call(*arrays, return_lse=True, **({} if call is not kp.attention_fp8 else options))
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(np.asarray(ours), theirs.numpy(), atol=1e-6)
    with pytest.raises(ValueError, match="sbhd"):
        kp.attention_fp8(*arrays, layout="sbhd")
