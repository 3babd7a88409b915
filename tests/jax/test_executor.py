"""What the seed says of ejKernel's selection, on this library's tiers: claims, each with what would show it false."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernel_pytorch.jax as kp
from kernel_pytorch.jax import ej

X, WEIGHT = jax.random.normal(jax.random.key(0), (24, 96)), jnp.linspace(0.5, 2, 96)
QUICK = ej.AutotunePolicy(cache_miss_fallback="autotune", budget_seconds=1.0)


@pytest.fixture
def executor() -> Any:
    """One that tells what it does, and a store without measurements of these problems."""
    events: list[Any] = []
    made = ej.Executor(on_event=lambda event, **data: events.append((event, data)))
    made.cache.clear("rms_norm_forward")
    made.events = events  # type: ignore[attr-defined]
    yield made
    made.cache.clear("rms_norm_forward")


def another(choice: Any) -> Any:
    """A config that would run this call and is not what it gets."""
    if jax.default_backend() == "cpu":
        return ej.KernelConfig("reference")
    return next(one for one in choice.candidates if one != choice.config)


def only(choices: Any) -> Any:
    assert len(choices) == 1
    return choices[0]


def test_seven_tiers_in_their_order(executor: Any) -> None:
    assert ej.TIERS == ("override", "overlay", "memory", "persistent", "autotune", "heuristic", "error")
    assert only(executor.choose(kp.rms_norm, X, WEIGHT)).tier == "heuristic"
    with (
        ej.policy_override(executor, allow_heuristics=False),
        pytest.raises(RuntimeError, match="nothing was measured"),
    ):
        executor.choose(kp.rms_norm, X, WEIGHT)
    with ej.policy_override(executor, cache_miss_fallback="autotune", budget_seconds=1.0):
        tuned = only(executor.choose(kp.rms_norm, X, WEIGHT))
    assert tuned.tier == "autotune" and tuned.measured_us > 0 and tuned.config in tuned.candidates
    measured = only(executor.choose(kp.rms_norm, X, WEIGHT))
    assert (measured.tier, measured.config) == ("memory", tuned.config)
    other = next(one for one in tuned.candidates if one != tuned.config)
    with ej.overlay_cache({tuned.key: other}):
        overlaid = only(executor.choose(kp.rms_norm, X, WEIGHT))
        assert (overlaid.tier, overlaid.config) == ("overlay", other)
        asked = another(overlaid)
        override = only(executor.choose(kp.rms_norm, X, WEIGHT, cfg=ej.OperationConfig(kernel=asked.text)))
        assert (override.tier, override.config) == ("override", asked)
    names = [event for event, _ in executor.events]
    for event in ("heuristics", "error", "autotune_start", "autotune_finish", "cache_hit", "overlay_hit", "override"):
        assert event in names


def test_what_was_measured_is_read_by_the_next_process(executor: Any) -> None:
    with ej.policy_override(executor, cache_miss_fallback="autotune", budget_seconds=1.0):
        tuned = only(executor.choose(kp.rms_norm, X, WEIGHT))
    text = executor.cache.export()
    assert tuned.key.device in text
    assert executor.cache.clear("rms_norm_forward") == 1 and executor.cache.get(tuned.key) is None
    assert executor.cache.import_(text.encode()) >= 1
    assert executor.cache.get(tuned.key) == tuned.config
    assert only(executor.choose(kp.rms_norm, X, WEIGHT)).tier in ("memory", "persistent")


def test_only_measurements_are_remembered(executor: Any) -> None:
    before = len(executor.cache)
    executor(kp.rms_norm, X, WEIGHT)
    asked = another(only(executor.choose(kp.rms_norm, X, WEIGHT)))
    executor(kp.rms_norm, X, WEIGHT, cfg=ej.OperationConfig(kernel=asked.text))
    assert len(executor.cache) == before


def test_a_choice_is_part_of_the_program(executor: Any) -> None:
    forward, backward = executor.choose(kp.rms_norm, X, WEIGHT, backward=True)
    asked = ej.OperationConfig(kernel=another(forward).text, backward_kernel=another(backward).text)

    def run(x: Any, weight: Any) -> Any:
        return executor(kp.rms_norm, x, weight, cfg=asked)

    text = jax.jit(jax.grad(lambda x, w: run(x, w).sum())).lower(X, WEIGHT).as_text()
    assert text.count(f'kernel = "{asked.kernel}"') == 1 + (asked.kernel == asked.backward_kernel)
    assert f'kernel = "{asked.backward_kernel}"' in text
    np.testing.assert_allclose(run(X, WEIGHT), kp.rms_norm(X, WEIGHT), atol=1e-6)
    compiled = executor.compile(kp.rms_norm, X, WEIGHT)
    np.testing.assert_allclose(compiled(X, WEIGHT), kp.rms_norm(X, WEIGHT), atol=1e-6)
    assert f'kernel = "{forward.config.text}"' in compiled.as_text().replace('\\"', '"')
    with pytest.raises(Exception, match="nonsense"):
        executor(kp.rms_norm, X, WEIGHT, cfg=ej.OperationConfig(kernel="nonsense"))


def test_tuning_inside_a_trace_measures_real_work(executor: Any) -> None:
    with ej.policy_override(executor, cache_miss_fallback="autotune", budget_seconds=1.0):
        found = jax.jit(lambda x, w: executor(kp.rms_norm, 2 * x, w))(X, WEIGHT)
        np.testing.assert_allclose(found, kp.rms_norm(2 * X, WEIGHT), atol=1e-6)
        report = next(data["report"] for event, data in executor.events if event == "autotune_finish")
        assert report.tuned and report.tuned[0].measured >= 2
        table = jnp.ones((9, 8))
        jax.jit(lambda i: executor(lambda i: kp.embedding(i, table), i))(jnp.arange(3))  # indices are not known
    with ej.policy_override(executor, validate_backward=True):
        calls = {choice.call for choice in executor.choose(kp.rms_norm, X, WEIGHT)}
    assert calls == {"rms_norm", "rms_norm_backward"}


def test_configs_are_frozen_and_convert() -> None:
    config = ej.FlashAttentionConfig(fwd_params={"q_blocksize": 128, "kv_blocksize": 64}, bwd_params={"num_stages": 2})
    assert config.fwd_params == ej.FwdParams(q_blocksize=128, kv_blocksize=64)
    assert config.bwd_params == ej.BwdParams(num_stages=2)
    assert hash(config) == hash(dataclasses.replace(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.platform = "cuda"
    with pytest.raises(TypeError):
        ej.FlashAttentionConfig(fwd_params={"tile": 3})
    parsed = ej.KernelConfig.parse("sm90_wgmma warpgroups=2 key_block=128 stages=2")
    assert parsed.text == "sm90_wgmma warpgroups=2 key_block=128 stages=2" and parsed.values["stages"] == "2"


def test_numbers_of_ejkernel_pick_configs_of_ours() -> None:
    from kernel_pytorch.jax.ej._configs import answers

    wgmma = ej.KernelConfig("sm90_wgmma", "head_size=128 value_size=128 warpgroups=2 key_block=128 stages=2")
    mma = ej.KernelConfig("cuda_mma", "size=64 warps=4 row_blocks=1 columns=64 stages=2")
    assert answers({"q_blocksize": 128, "kv_blocksize": 128, "num_stages": 2}, wgmma)
    assert answers({"q_blocksize": 64, "kv_blocksize": 64, "num_warps": 4}, mma)
    assert not answers({"q_blocksize": 64}, wgmma) and not answers({"num_key_splits": 2}, mma)
    query = jnp.ones((1, 8, 2, 8))
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError, match=r"q_blocksize=64; there are: .*cpu_tiles"):
            ej.flash_attention(query, query, query, cfg=ej.FlashAttentionConfig(fwd_params={"q_blocksize": 64}))
    with pytest.raises(TypeError, match="MeanPoolingConfig"):
        ej.flash_attention(query, query, query, cfg=ej.MeanPoolingConfig())


def test_a_config_reaches_the_kernel_and_its_backward() -> None:
    query = jax.random.normal(jax.random.key(1), (1, 8, 2, 8))

    def attend(cfg: Any) -> Any:
        return lambda q: (ej.flash_attention(q, q, q, causal=True, cfg=cfg) ** 2).sum()

    forward, backward = ej.Executor().choose(attend(None), query, backward=True)
    if jax.default_backend() == "cpu":
        config = ej.FlashAttentionConfig(kernel="reference", backward_kernel="reference")
    else:
        config = ej.FlashAttentionConfig(kernel=forward.config.text, backward_kernel=backward.config.text)
    text = jax.jit(jax.grad(attend(config))).lower(query).as_text()
    assert f'kernel = "{config.kernel}"' in text and f'kernel = "{config.backward_kernel}"' in text
    np.testing.assert_allclose(jax.grad(attend(config))(query), jax.grad(attend(None))(query), atol=1e-4)


def test_precision_is_a_request() -> None:
    query = jax.random.normal(jax.random.key(1), (1, 8, 2, 8))
    for precision in (None, jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST, "tensorfloat32"):
        text = jax.jit(lambda q, p=precision: ej.flash_attention(q, q, q, precision=p)).lower(query).as_text()
        assert f"allow_tf32 = {'true' if precision == 'tensorfloat32' else 'false'}" in text
    with pytest.raises(ValueError, match="int4"):
        ej.flash_attention(query, query, query, precision="int4")


def test_fingerprint_names_the_device() -> None:
    assert only(ej.Executor().choose(kp.rms_norm, X)).key.device == ej.device_fingerprint() != ""


def test_the_registry_prefers_priorities_and_validates() -> None:
    assert ej.kernel_registry.validate_signatures()
    registry = ej.KernelRegistry()
    registry.register("one", "xla", "any")(lambda x: x)
    registry.register("one", "cuda", "gpu", priority=3)(lambda x, y: x)
    assert not registry.validate_signatures("one")
    with pytest.raises(ValueError, match='platform is "vulkan"; it is one of triton, pallas, cuda, xla'):
        ej.kernel_registry.get("flash_attention", platform="vulkan")
