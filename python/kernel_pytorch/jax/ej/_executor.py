"""ejKernel's executor on the library's own tiers: Override, Overlay, Memory, Persistent, Autotune, Heuristic, Error.

The core chooses (kp_explain_call shows what and by which tier), measures (its autotuner) and remembers (its store,
under a fingerprint of the device and of the kernels). What is here asks it while JAX traces and writes the choice into
the call, so that a compiled program keeps it. Unlike ejKernel's, only measurements are remembered: neither an override
nor a heuristic is ever written to a cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import cache as _cache
from ... import tuning as _tuning
from .. import _workspace
from .._call import call_name, hearing, using_kernels
from ..norms import rms_norm
from ._configs import KernelConfig, OperationConfig, answers

TIERS = ("override", "overlay", "memory", "persistent", "autotune", "heuristic", "error")


@dataclass(frozen=True)
class AutotunePolicy:
    """What happens where nothing was measured: cache_miss_fallback "heuristics" or "autotune"."""

    allow_autotune: bool = True
    allow_heuristics: bool = True
    cache_miss_fallback: str = "heuristics"
    validate_backward: bool = False  # the backward is measured too
    budget_seconds: float = 10.0  # of one call's measurements

    def __post_init__(self) -> None:
        if self.cache_miss_fallback not in ("heuristics", "autotune"):
            raise ValueError(
                f'AutotunePolicy: cache_miss_fallback is "{self.cache_miss_fallback}"; it is "heuristics" or "autotune"'
            )


@dataclass(frozen=True)
class Choice:
    """What one call of the library runs. `key` is what a measurement is kept under."""

    call: str
    key: _tuning.Key
    config: KernelConfig
    tier: str
    measured_us: float
    candidates: tuple[KernelConfig, ...]


class ConfigCache:
    """Measured configs by their keys: this process's and those of the store (tiers Memory and Persistent)."""

    def get(self, key: _tuning.Key) -> KernelConfig | None:
        return dict(self.items()).get(key)

    def items(self) -> list[tuple[_tuning.Key, KernelConfig]]:
        return [(one.key, KernelConfig(one.kernel, one.config)) for one in _cache.list()]

    def __len__(self) -> int:
        return len(_cache.list())

    def clear(self, op: str = "") -> int:
        """Forgets measurements, of one op or all, on disk too; returns how many."""
        return _cache.clear(op, cubins=False)[0]

    def export(self, path: Any = None) -> str:
        return _cache.export(path)

    def import_(self, source: Any) -> int:
        return _cache.import_(source)


def device_fingerprint() -> str:
    """What measurements of this process's first device are kept under: its name, capabilities, caches, driver."""
    return _choices(rms_norm, (jnp.zeros((1, 1)),), False, {})[0].key.device  # any op serves


class Executor:
    """Runs functions of kernel_pytorch.jax with the kernels that the tiers choose.

    Args:
        policy: what to do about calls that were never measured.
        on_event: (event, **data) for each choice: "override", "overlay_hit", "cache_hit" (level), "autotune_start",
            "autotune_finish", "autotune_skipped" (reason), "heuristics", "error".
    """

    def __init__(self, policy: AutotunePolicy | None = None, on_event: Callable[..., None] | None = None) -> None:
        self.policy = policy or AutotunePolicy()
        self.cache = ConfigCache()
        self.on_event = on_event

    def __call__(self, function: Callable[..., Any], *arrays: Any, cfg: OperationConfig | None = None) -> Any:
        """function(*arrays) with the kernels of `choose`; its backward too."""
        if cfg is None and self.policy == AutotunePolicy() and self.on_event is None:
            return function(*arrays)  # the core goes through the same tiers by itself
        choices = self.choose(function, *arrays, cfg=cfg, backward=cfg is not None)
        kept = {one.call: one.config.text for one in choices if one.tier != "heuristic"}
        with using_kernels(kept):
            return function(*arrays)

    def choose(
        self,
        function: Callable[..., Any],
        *arrays: Any,
        cfg: OperationConfig | None = None,
        backward: bool = False,
    ) -> tuple[Choice, ...]:
        """What each call of the library inside function(*arrays) runs, and which tier said so; computes nothing but
        what a policy that autotunes measures. With `backward` its gradients' calls too."""
        backward = backward or self.policy.validate_backward
        choices = _choices(function, arrays, backward, {})
        if cfg is not None:
            choices = _choices(function, arrays, backward, _overrides(cfg, choices))
        elif self.policy.cache_miss_fallback == "autotune" and self.policy.allow_autotune:
            choices = self._tuned(function, arrays, backward, choices)
        for choice in choices:
            self._tell(choice)
            if choice.tier == "heuristic" and not self.policy.allow_heuristics:
                self._event("error", choice=choice)
                raise RuntimeError(
                    f"{choice.call}: nothing was measured for {choice.key.problem} on {choice.key.device}, and the "
                    "policy allows no heuristic; tune it (kpt tune, cache_miss_fallback='autotune') or allow heuristics"
                )
        return choices

    def compile(self, function: Callable[..., Any], *arrays: Any, cfg: OperationConfig | None = None) -> Any:
        """jax.jit(function), compiled for these arrays, with every choice written into it."""
        kept = {one.call: one.config.text for one in self.choose(function, *arrays, cfg=cfg)}

        def frozen(*given: Any) -> Any:
            with using_kernels(kept):
                return function(*given)

        return jax.jit(frozen).lower(*arrays).compile()

    def _tuned(self, function: Any, arrays: Any, backward: bool, choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
        unmeasured = [one for one in choices if one.tier == "heuristic" and len(one.candidates) > 1]
        if not unmeasured:
            return choices
        traced = [i for i, one in enumerate(arrays) if isinstance(one, jax.core.Tracer) and not _is_floating(one)]
        if traced:
            reason = f"argument {traced[0]} holds integers that are not known while tracing; call it outside jit once"
            self._event("autotune_skipped", choices=unmeasured, reason=reason)
            return choices
        self._event("autotune_start", choices=unmeasured)
        with _tuning.autotune(self.policy.budget_seconds) as report, jax.ensure_compile_time_eval():
            made = _with_backward(function) if backward else function
            jax.block_until_ready(made(*(_concrete(i, one) for i, one in enumerate(arrays))))
        self._event("autotune_finish", report=report)
        tuned = {one.key for one in unmeasured}
        return tuple(
            dataclasses.replace(one, tier="autotune") if one.key in tuned and one.tier == "memory" else one
            for one in _choices(function, arrays, backward, {})
        )

    def _tell(self, choice: Choice) -> None:
        events = {"override": "override", "overlay": "overlay_hit", "heuristic": "heuristics"}
        if choice.tier in ("memory", "persistent"):
            self._event("cache_hit", level=choice.tier, choice=choice)
        elif choice.tier in events:
            self._event(events[choice.tier], choice=choice)

    def _event(self, event: str, **data: Any) -> None:
        if self.on_event is not None:
            self.on_event(event, **data)


@contextlib.contextmanager
def policy_override(executor: Executor, **updates: Any) -> Iterator[None]:
    """Inside, an executor has a policy with these fields changed."""
    before = executor.policy
    executor.policy = dataclasses.replace(before, **updates)
    try:
        yield
    finally:
        executor.policy = before


@contextlib.contextmanager
def overlay_cache(mapping: Mapping[Any, Any]) -> Iterator[None]:
    """Inside, ops run these configs (tier Overlay): {op or its Key: KernelConfig or "kernel config"}."""
    entries = []
    for key, config in mapping.items():
        chosen = config if isinstance(config, KernelConfig) else KernelConfig.parse(str(config))
        place = (
            {"op": key.op, "problem": key.problem, "device": key.device}
            if isinstance(key, _tuning.Key)
            else {"op": key}
        )
        entries.append({**place, "kernel": chosen.kernel, "config": chosen.config})
    with _tuning.overlay_of(entries):
        yield


def _choices(function: Any, arrays: tuple[Any, ...], backward: bool, kernels: Mapping[str, str]) -> tuple[Choice, ...]:
    function = inspect.unwrap(function)  # what was compiled already is traced anew

    def fresh(*given: Any) -> Any:
        return (_with_backward(function) if backward else function)(*given)

    with using_kernels(kernels), hearing() as calls:
        jax.eval_shape(fresh, *arrays)
    found: dict[tuple[str, Any], Choice] = {}
    for call in calls:
        for one in _workspace.explained(*call):
            candidates = tuple(
                KernelConfig(each["kernel"], config)
                for each in one["candidates"]
                if each["supported"] and not each["fallback"]
                for config in each["configs"]
            )
            config, key = KernelConfig(one["kernel"], one["config"]), _tuning.Key(**one["key"])
            choice = Choice(call_name(call.op), key, config, one["tier"], one["measured_us"], candidates)
            found[choice.call, key] = choice
    return tuple(found.values())


def _with_backward(function: Any) -> Any:
    def both(*arrays: Any) -> Any:
        places = [i for i, one in enumerate(arrays) if one is not None and _is_floating(one)]

        def of_floating(*floating: Any) -> Any:
            given = list(arrays)
            for place, one in zip(places, floating):
                given[place] = one
            return function(*given)

        output, gradients = jax.vjp(of_floating, *(arrays[place] for place in places))
        return output, gradients(jax.tree.map(jnp.ones_like, output))

    return both


def _overrides(cfg: OperationConfig, choices: tuple[Choice, ...]) -> dict[str, str]:
    """Kernels by call that a config asks for."""
    kernels = {}
    for choice in choices:
        is_backward = choice.call.endswith("_backward")
        named = cfg.backward_kernel if is_backward else cfg.kernel
        if named:
            kernels[choice.call] = named
            continue
        params = getattr(cfg, "bwd_params" if is_backward else "fwd_params", None)
        asked = params.asked() if params is not None else {}
        if not asked:
            continue
        fitting = [one for one in choice.candidates if answers(asked, one)]
        if not fitting:
            known = "; ".join(one.text for one in choice.candidates)
            raise ValueError(
                f"{choice.call}: no kernel here has {', '.join(f'{name}={value}' for name, value in asked.items())}; "
                f"there are: {known}"
            )
        kernels[choice.call] = fitting[0].text
    return kernels


def _is_floating(array: Any) -> bool:
    return bool(jnp.issubdtype(jnp.asarray(array).dtype if not hasattr(array, "dtype") else array.dtype, jnp.floating))


def _concrete(place: int, array: Any) -> Any:
    """The array, or random numbers like it where it is traced."""
    if array is None or not isinstance(array, jax.core.Tracer):
        return array
    return jnp.asarray(np.random.default_rng(place).standard_normal(array.shape), array.dtype)


executor = Executor()
