"""Errors, odd arguments, seeds, and what importing does."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_pytorch._library import KernelPyTorchError
from kernel_pytorch._shape_rules import declared

import kernel_pytorch.jax as kp
from kernel_pytorch.jax import _registration, _workspace


def test_import_loads_no_torch() -> None:
    code = "import sys, kernel_pytorch.jax; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: kp.rms_norm(jnp.ones((2, 8)), jnp.ones(7)), "weight"),
        (lambda: kp.rms_norm(jnp.ones((2, 8), jnp.int32)), "int32"),
        (lambda: kp.rms_norm(jnp.ones((2, 8), jnp.int16)), "int16"),
        (lambda: kp.silu(jnp.ones((2, 8), jnp.complex64)), "complex64"),
        (lambda: kp.activation(jnp.ones((2, 8)), "swish"), "swish"),
        (lambda: kp.cross_entropy(jnp.ones((2, 8)), jnp.ones(3, jnp.int32)), "target"),
        (lambda: kp.cross_entropy(jnp.ones((2, 8)), jnp.ones(2)), "integers"),
        (lambda: kp.cross_entropy(jnp.ones((2, 8)), jnp.ones(2, jnp.int32), reduction="max"), "max"),
        (lambda: kp.attention(*[jnp.ones((1, 2, 3, 8))] * 3, layout="sbhd"), "sbhd"),
        (lambda: kp.attention(*[jnp.ones((1, 2, 3, 8))] * 3, mask=jnp.ones((2, 2))), "bool"),
        (lambda: kp.attention(*[jnp.ones((1, 2, 3, 8))] * 2, jnp.ones((1, 3, 3, 8))), "value"),
        (lambda: kp.dropout(jnp.ones(3)), "seed"),
        (lambda: kp.linear(jnp.ones((2, 8)), jnp.ones((4, 7))), "weight"),
        (lambda: jax.jit(lambda x, p: kp.dropout(x, p, seed=jax.random.key(0)))(jnp.ones(3), 0.5), "traced"),
    ],
)
def test_bad_arguments_name_what_is_wrong_while_tracing(call, words: str) -> None:
    with pytest.raises(Exception, match=words):
        jax.eval_shape(call)


def test_a_rehearsal_sees_the_shapes_types_and_options_of_a_call() -> None:
    tensors = ("x", "bf16", (3, 40)), ("weight", "bf16", (40,)), ("output", "bf16", (3, 40))
    assert _workspace.bytes_for("rms_norm", tensors, (("eps", np.float64(0.5)),)) == 0 or jax.default_backend() == "gpu"
    for wrong, words in [
        (("weight", "bf16", (41,)), "41"),
        (("weight", "int32", (40,)), "int32"),
        (("wait", "bf16", (40,)), "wait"),
        (("x", "bf16", (3, 40)), "x"),
    ]:
        with pytest.raises(KernelPyTorchError, match=words):
            _workspace.bytes_for("rms_norm", (tensors[0], wrong, tensors[2]), ())
    with pytest.raises(KernelPyTorchError, match="eps"):
        _workspace.bytes_for("rms_norm", tensors, (("eps", "small"),))
    assert not any(output["name"] == _workspace.NAME for op in declared().values() for output in op["outputs"])


def test_handlers_that_xla_did_not_take_are_named_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_disabled in (False, True):
        with jax.disable_jit(is_disabled):
            _registration.check.__wrapped__("cpu")
    monkeypatch.setattr(_registration, "NOTHING", "kernel_pytorch.not_registered")
    with pytest.raises(ImportError, match=r"jaxlib \d.* did not take its handlers for cpu, of XLA's FFI 0\.\d"):
        _registration.check.__wrapped__("cpu")


def test_empty_arrays() -> None:
    assert kp.rms_norm(jnp.ones((0, 8)), jnp.ones(8)).shape == (0, 8)
    assert kp.softmax(jnp.ones((3, 0))).shape == (3, 0)
    gradient = jax.grad(lambda x: kp.silu(x).sum())(jnp.ones((0, 8)))
    assert gradient.shape == (0, 8)


def test_a_scalar_is_an_array() -> None:
    np.testing.assert_allclose(kp.silu(jnp.float32(2.0)), jax.nn.silu(2.0), rtol=1e-6)


def test_dropout_follows_its_key_and_drops_the_same_in_its_gradient() -> None:
    x = jnp.ones((64, 64))
    once, again, other = (kp.dropout(x, 0.25, seed=jax.random.key(seed)) for seed in (1, 1, 2))
    assert (once == again).all() and (once != other).any()
    assert abs(float((once == 0).mean()) - 0.25) < 0.03
    gradient = jax.grad(lambda x: kp.dropout(x, 0.25, seed=jax.random.key(1)).sum())(x)
    assert ((gradient == 0) == (once == 0)).all()
    by_samples = jax.vmap(lambda x: kp.dropout(x, 0.25, seed=jax.random.key(1)))(jnp.ones((2, 64, 64)))
    assert (by_samples[0] == once).all() and (by_samples[1] == once).all()


def test_packed_sequences_are_those_by_themselves() -> None:
    query, key, value = (jax.random.normal(jax.random.key(i), (7, 2, 8)) for i in range(3))
    ends = jnp.array([0, 3, 7])
    packed = kp.attention(query, key, value, causal=True, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=4)
    parts = [
        kp.attention(*(one[None, a:b] for one in (query, key, value)), causal=True)[0] for a, b in ((0, 3), (3, 7))
    ]
    np.testing.assert_allclose(packed, jnp.concatenate(parts), atol=1e-5)


def test_lse_has_a_gradient() -> None:
    query, key, value = (jax.random.normal(jax.random.key(i), (1, 5, 2, 8)) for i in range(3))

    def ours(query):
        return kp.attention(query, key, value, return_lse=True)[1].sum()

    def reference(query):
        return jax.nn.logsumexp(jnp.einsum("bqhd,bkhd->bhqk", query, key) / 8**0.5, -1).sum()

    np.testing.assert_allclose(jax.grad(ours)(query), jax.grad(reference)(query), atol=1e-5)


def test_what_has_no_gradient_says_so() -> None:
    x = jnp.ones((1, 4, 1, 8))
    with pytest.raises(NotImplementedError, match="cos has no gradient"):
        jax.grad(lambda cos: kp.rope(x, None, cos, cos)[0].sum())(jnp.ones((4, 4)))


def test_both_layouts() -> None:
    query, key, value = (jax.random.normal(jax.random.key(i), (2, 5, 4, 8)) for i in range(3))
    first = kp.attention(*(jnp.swapaxes(one, 1, 2) for one in (query, key, value)), layout="bhsd", causal=True)
    np.testing.assert_allclose(jnp.swapaxes(first, 1, 2), kp.attention(query, key, value, causal=True), atol=1e-6)


def test_x64() -> None:
    """Doubles, which are the CPU's, and 64-bit targets, in a process of their own: an op of each kind and gradients."""
    code = """
import jax; jax.config.update("jax_enable_x64", True); jax.config.update("jax_default_device", jax.devices("cpu")[0])
import jax.numpy as jnp, kernel_pytorch.jax as kp
from cases import CASES
from checks import close, results_and_gradients_of
from test_transforms import KINDS
kinds = [case for case in CASES if case.name in KINDS]
assert len(kinds) == len(KINDS)
for case in kinds:
    arrays = case.arrays(jnp.float64)
    step = lambda function: jax.jit(results_and_gradients_of(function, len(arrays)))(*arrays, *case.constants)
    ours, reference = step(case.ours), step(case.reference)
    assert all(one.dtype == jnp.float64 for one in jax.tree.leaves(ours)), case.name
    close(ours, reference, 1e-12)
kp.dropout(jnp.ones((4, 8)), 0.5, seed=jax.random.key(0)).block_until_ready()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=120).returncode == 0
