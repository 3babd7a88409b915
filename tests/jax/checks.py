"""What the tests of ops share: losses that depend on everything, and references that are compiled once per op."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from cases import Case


def close(ours: Any, reference: Any, tolerance: float = 2e-5) -> None:
    ours, reference = jax.tree.leaves(ours), jax.tree.leaves(reference)
    assert len(ours) == len(reference)
    for one, other in zip(ours, reference):
        assert one.shape == other.shape
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, atol=tolerance * max(1.0, np.abs(other).max(initial=0)), rtol=0)


def weighted_sum(results: Any) -> Any:
    """A number that depends on every element of every result, differently on each."""
    leaves = [one.astype(np.float32) for one in jax.tree.leaves(results)]
    return sum(
        (one * np.cos(np.arange(one.size) + i, dtype=np.float32).reshape(one.shape)).sum()
        for i, one in enumerate(leaves)
    )


def loss_of(function: Any) -> Any:
    return lambda *arrays: weighted_sum(function(*arrays))


def gradients_of(function: Any, count: int) -> Any:
    return jax.grad(loss_of(function), argnums=tuple(range(count)))


def results_and_gradients_of(function: Any, count: int) -> Any:
    """Results of a call, and the gradients of their weighted sum by the first `count` arrays."""

    def both(*arrays: Any) -> Any:
        def loss(*first: Any) -> Any:
            results = function(*first, *arrays[count:])
            return weighted_sum(results), results

        gradients, results = jax.grad(loss, argnums=tuple(range(count)), has_aux=True)(*arrays[:count])
        return results, gradients

    return both


@functools.cache
def _reference(place: int) -> Any:
    from cases import CASES

    case = CASES[place]
    return jax.jit(results_and_gradients_of(case.reference, len(case.shapes)))


def expected(case: Case, *arrays: Any) -> Any:
    """Results and gradients of the reference for these arrays, in fp32. The program is compiled once."""
    from cases import CASES

    wide = [np.asarray(array).astype(np.float32) for array in arrays]
    return jax.device_get(_reference(CASES.index(case))(*wide, *case.constants))


def expected_of_samples(case: Case, *arrays: Any) -> Any:
    """The same of several calls, one for each of the first indices, stacked."""
    samples = zip(*(np.asarray(array) for array in arrays))
    return jax.tree.map(lambda *ones: np.stack(ones), *(expected(case, *sample) for sample in samples))
