"""A module that runs inputs of any shape at the shapes of a few buckets, with the results of the plain call.

How the base module learns what is padding: by an argument of its forward, found by name (attention_mask: nonzero is
real; key_padding_mask and src_key_padding_mask: True is padding; key_lengths and lengths: real positions of each row)
or named with `mask_argument`. A module without one is padded only if that does not change its results: the first call
in each bucket is run plainly and with two different noises as padding. The padded two must agree closely, so that
nothing of the padding gets through, and with the plain one up to rounding; otherwise the module runs unpadded from
then on.
"""

from __future__ import annotations

import threading
import time
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import _torch as _torch  # first: it says what is missing where torch is missing or old
from .._modules import evaluating, hide_name
from .batching import run_many as run_in_batches
from .buckets import DynamicShapeBucketing
from .calls import BucketCall, index_of_argument
from .graphs import GraphDecision, PyGraph, graph_absence
from .padding import MaskArgument, PaddingStrategy, copy_padded, find_mask_argument, first_tensor, mask_argument_called
from .verification import OutputMap, compare_outputs, unpad_outputs

import torch  # isort: skip
from torch import Tensor, nn

__all__ = ["DynamicShapeModule"]


@dataclass
class _Plan:
    """What is known of one bucket and kind of call."""

    refusal: str = ""
    outputs: OutputMap | None = None  # None: not verified yet
    chosen: int | None = None  # of base module and alternatives
    functions: dict[int, Callable[..., Any]] = field(default_factory=dict)  # compiled for this bucket


class DynamicShapeModule(nn.Module):
    """Pads inputs to buckets, runs the base module, and returns the real part. Safe to call from several threads.

    Each bucket has its own plan: on CUDA, for inference, a graph where that pays (see PyGraph); with `compile` a
    compilation of its own. Plans and graphs used longest ago are dropped first. `refusals()` says what runs unpadded
    and why, `graph_decisions()` what runs as a graph.

    Args:
        base_module: what to run; its parameters are used in place.
        bucketing_system: see create_optimal_bucketing_system; None learns from the calls.
        enable_bucketing: False calls the base module.
        padding: "auto" pads where that can pay, which is where a bucket has a graph or a compilation; elsewhere padding
            only costs time, and the base module runs at the input's own shape. "always" pads.
        mask_argument: the argument by which the module learns what is padding; a name, a MaskArgument, "auto" (found
            by name) or None (it has none).
        sequence_dim: the dimension of the first tensor argument that the mask describes; 0 is the batch.
        padding_strategy: what stands behind the real positions.
        use_graphs: False never captures.
        compile: torch.compile for each bucket, with static shapes; a text names the backend.
        alternatives: modules that compute the same, such as the result of kernel_pytorch.optimize; each bucket takes
            the fastest, measured once, of those whose results agree.
        max_plans: how many buckets' plans and graphs are kept.
    """

    def __init__(
        self,
        base_module: nn.Module,
        bucketing_system: DynamicShapeBucketing | None = None,
        enable_bucketing: bool = True,
        *,
        padding: str = "auto",
        mask_argument: str | MaskArgument | None = "auto",
        sequence_dim: int = 1,
        padding_strategy: PaddingStrategy = PaddingStrategy.ZEROS,
        use_graphs: bool = True,
        compile: bool | str = False,
        alternatives: Sequence[nn.Module] = (),
        max_plans: int = 64,
    ) -> None:
        super().__init__()
        if padding not in ("auto", "always"):
            raise ValueError(f"DynamicShapeModule: padding is {padding!r}; it must be 'auto' or 'always'")
        self.padding = padding
        self.base_module = base_module
        self.training = base_module.training
        self.bucketing = bucketing_system if bucketing_system is not None else DynamicShapeBucketing()
        self.enable_bucketing = enable_bucketing
        self.mask = _mask_argument(base_module, mask_argument)
        self.sequence_dim = sequence_dim
        self.padding_strategy = PaddingStrategy(padding_strategy)
        self.use_graphs = use_graphs
        self.compile_buckets = compile
        self.alternatives = nn.ModuleList(alternatives)
        self.max_plans = max_plans
        self._mask_index = index_of_argument(base_module, self.mask.name) if self.mask is not None else None
        limit = self.bucketing.memory_limit_gb
        self._graphs = [
            PyGraph(module, max_graphs=max_plans, memory_limit_gb=limit, is_compiled=bool(compile))
            for module in (base_module, *alternatives)
        ]
        self._lock = threading.RLock()
        self._plans: OrderedDict[Hashable, _Plan] = OrderedDict()
        self._choices: dict[Hashable, int] = {}  # by graph key
        self.sequence_outputs: OutputMap | None = None  # learned by run_many
        self._has_warned = False
        self._real_elements = self._run_elements = 0  # of the first tensors of calls, and of what they ran at
        hide_name(self, "base_module")

    @property
    def bucketing_system(self) -> DynamicShapeBucketing:
        """`bucketing`, by the name of the argument."""
        return self.bucketing

    def __getstate__(self) -> dict[str, Any]:
        """Without plans, which hold code compiled for this object; a copy makes its own."""
        left = {"_lock", "_plans", "_choices"}
        return {name: value for name, value in self.__dict__.items() if name not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._lock = threading.RLock()
        self._plans, self._choices = OrderedDict(), {}

    def extra_repr(self) -> str:
        mask = self.mask.name if self.mask is not None else None
        return f"bucketing={self.bucketing!r}, padding={self.padding!r}, mask={mask!r}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        primary = first_tensor(args, kwargs)
        if not self._takes(primary):
            return self.base_module(*args, **kwargs)
        assert primary is not None
        if self.bucketing.dimensions is None:
            last = primary.dim() - (1 if primary.is_floating_point() and primary.dim() > 1 else 0)
            self.bucketing.dimensions = tuple(range(last))
        shape = self.bucketing.bucket_shape(self.bucketing.find_optimal_bucket(primary.shape))
        return self.run_at(shape, primary, args, kwargs)

    def run_at(self, shape: tuple[int, ...], primary: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call with `primary`, its first tensor, padded to `shape` where that can pay."""
        plan = None
        if self.pads([primary]):
            call = self.call_at(shape, primary, args, kwargs)
            plan = self._plan_of(call)
        if plan is None or plan.refusal or plan.outputs is None:
            self._count(primary.numel(), primary.numel())
            if plan is not None and not plan.refusal:
                return self._verified_call(plan, call, args, kwargs)
            return self.base_module(*args, **kwargs)
        wants_gradient = torch.is_grad_enabled() and (
            any(tensor.requires_grad for tensor in call.tensors) or _has_gradients(self.base_module)
        )
        if self.base_module.training or wants_gradient:
            self._count(call.real_elements, call.padded_elements)
            return unpad_outputs(self._run_plain(plan, call), plan.outputs, call.real)
        return self._run_fastest(plan, call)

    def pads(self, tensors: list[Tensor]) -> bool:
        """Whether calls with such tensors are padded."""
        if self.padding == "always" or self.compile_buckets:
            return True
        return self.use_graphs and not graph_absence(tensors, self.base_module)

    def call_at(
        self, shape: tuple[int, ...], primary: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BucketCall:
        bucketed = self.bucketing.dimensions_of(shape)
        return BucketCall(args, kwargs, primary, shape, bucketed, self.mask, self._mask_index, self.sequence_dim)

    def run_many(self, requests: Sequence[Tensor], max_tokens: int = 16384) -> list[Any]:
        """Results of single requests, each without a batch dimension ([length, ...]), run in batches within buckets.

        A batch holds requests of one bucket of lengths, a power of two of them, at most max_tokens positions. Needs a
        mask argument, since the lengths within a batch differ.
        """
        return run_in_batches(self, requests, max_tokens)

    def refusals(self) -> list[str]:
        """Why buckets run unpadded, where they do."""
        with self._lock:
            return [plan.refusal for plan in self._plans.values() if plan.refusal]

    def graph_decisions(self) -> list[GraphDecision]:
        """The decision about every shape that was tried as a graph."""
        return [decision for graph in self._graphs for decision in graph.decisions()]

    def statistics(self) -> dict[str, Any]:
        """Buckets so far, plans and graphs kept, and the padding that calls ran with (not that of buckets they did not
        use: see `padding`)."""
        graphs = [graph.statistics() for graph in self._graphs]
        with self._lock:
            return {
                **self.bucketing.get_performance_stats(),
                "padding_overhead": self._run_elements / self._real_elements - 1 if self._real_elements else 0.0,
                "plans": len(self._plans),
                "refused_plans": sum(1 for plan in self._plans.values() if plan.refusal),
                "graphs": sum(entry["graphs"] for entry in graphs),
                "graph_bytes": sum(entry["graph_bytes"] for entry in graphs),
                "replays": sum(entry["replays"] for entry in graphs),
            }

    def clear(self) -> None:
        """Forgets plans and graphs; the buckets stay."""
        with self._lock:
            self._plans.clear()
            self._choices.clear()
            for graph in self._graphs:
                graph.clear()

    # ---- how a call runs ----

    def _takes(self, primary: Tensor | None) -> bool:
        if not self.enable_bucketing or primary is None or primary.dim() == 0 or primary.numel() == 0:
            return False
        if torch.compiler.is_compiling():
            return False
        if self.base_module.training and any(
            isinstance(part, nn.modules.batchnorm._BatchNorm) for part in self.modules()
        ):
            self._warn("batch norm in training mode sums over the padding; it runs unpadded")
            return False
        return True

    def _plan_of(self, call: BucketCall) -> _Plan | None:
        key = call.key()
        if key is None:
            return None
        with self._lock:
            plan = self._plans.get(key)
            if plan is None:
                plan = self._plans[key] = _Plan(outputs=None)
                if len(self._plans) > self.max_plans * 2:
                    self._plans.popitem(last=False)
            self._plans.move_to_end(key)
            return plan

    def _verified_call(self, plan: _Plan, call: BucketCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the plain call, which is returned, and the padded one; decides what the bucket does from now on."""
        result = self.base_module(*args, **kwargs)
        is_random = any(part.training for part in self.modules())
        with self._lock, torch.no_grad(), evaluating(self):
            plain = self.base_module(*args, **kwargs) if is_random else result
            tried = self.try_padded(call, plain, self.base_module)
            if isinstance(tried, str):
                plan.refusal = tried
                self._warn(
                    f"{type(self.base_module).__name__} runs unpadded in bucket {call.shape}: {tried}. "
                    "Give its forward a mask (see mask_argument) or bucket other dimensions"
                )
                return result
            plan.outputs = tried
            agreeing = [0]
            for index, module in enumerate(self.alternatives, start=1):
                if not isinstance(self.try_padded(call, plain, module), str):
                    agreeing.append(index)
            plan.chosen = 0 if len(agreeing) == 1 else None
            plan.functions = {index: self._function(index) for index in agreeing}
        return result

    def try_padded(self, call: BucketCall, plain: Any, module: nn.Module) -> OutputMap | str:
        """Which outputs follow which dimensions, or why padding changes what the module gives."""
        try:
            padded, again = (module(*args, **kwargs) for args, kwargs in (call.arguments(call.noisy()) for _ in "12"))
        except Exception as error:  # of a module that cannot take these shapes: it keeps running as it did
            return f"the padded call raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        compared = compare_outputs(plain, padded, again, call.padded)
        return compared.refusal if compared.refusal else compared.outputs

    def _run_plain(self, plan: _Plan, call: BucketCall) -> Any:
        args, kwargs = call.arguments(call.padded_tensors(self.padding_strategy))
        return plan.functions.get(0, self.base_module)(*args, **kwargs)

    def _run_fastest(self, plan: _Plan, call: BucketCall) -> Any:
        assert plan.outputs is not None
        if plan.chosen is None:
            with self._lock:
                if plan.chosen is None:
                    plan.chosen = self._choose(plan, call)
        function = plan.functions.get(plan.chosen, self.base_module)
        if self.use_graphs and not graph_absence(call.tensors):
            output = self._replay(plan, call, plan.chosen, function)
            if output is not None:
                self._count(call.real_elements, call.padded_elements)
                return output[0]
        if self.padding == "auto" and not self.compile_buckets:
            self._count(call.real_elements, call.real_elements)
            return function(*call.args, **call.kwargs)  # its graph does not pay: neither does padding
        self._count(call.real_elements, call.padded_elements)
        args, kwargs = call.arguments(call.padded_tensors(self.padding_strategy))
        return unpad_outputs(function(*args, **kwargs), plan.outputs, call.real)

    def _count(self, real: int, run: int) -> None:
        with self._lock:
            self._real_elements += real
            self._run_elements += run

    def _replay(self, plan: _Plan, call: BucketCall, index: int, function: Callable[..., Any]) -> tuple[Any] | None:
        """The call's result by a graph, or None where it has none."""

        def run(inputs: list[Tensor]) -> Any:
            args, kwargs = call.arguments(inputs)
            return function(*args, **kwargs)

        examples = lambda: call.padded_tensors(self.padding_strategy)  # noqa: E731
        with self._graphs[index].locked(call.graph_key(), examples, run) as entry:
            if entry is None:
                return None
            for place, (static, source) in enumerate(zip(entry.inputs, call.tensors, strict=False)):
                entry.written[place] = copy_padded(
                    static, source, call.dims[place], entry.written[place], call.values[place]
                )
            if call.makes_mask and entry.written[-1] != call.length:
                assert self.mask is not None
                self.mask.write(entry.inputs[-1], call.length)
                entry.written[-1] = call.length
            assert plan.outputs is not None
            return (unpad_outputs(entry.replay(), plan.outputs, call.real, copy=True),)

    def _choose(self, plan: _Plan, call: BucketCall) -> int:
        known = self._choices.get(call.graph_key())  # of another plan at the same shapes
        if known in plan.functions:
            return known
        times = {}
        for index, function in plan.functions.items():
            if self.use_graphs and not graph_absence(call.tensors):
                self._replay(plan, call, index, function)
                decision = self._graphs[index].decision(call.graph_key())
                times[index] = decision.graph_us if decision.pays else decision.eager_us
            else:
                times[index] = _time_of(lambda function=function: self._timed(function, call))  # type: ignore[misc]
        fastest = min(times, key=lambda index: times[index])
        for index in plan.functions:
            if index != fastest:
                self._graphs[index].forget(call.graph_key())
        self._choices[call.graph_key()] = fastest
        if len(self._choices) > 4 * self.max_plans:
            self._choices.pop(next(iter(self._choices)))
        return fastest

    def _timed(self, function: Callable[..., Any], call: BucketCall) -> None:
        args, kwargs = call.arguments(call.padded_tensors(self.padding_strategy))
        function(*args, **kwargs)
        if call.tensors[0].is_cuda:
            torch.cuda.synchronize()

    def _function(self, index: int) -> Callable[..., Any]:
        module = self.base_module if index == 0 else self.alternatives[index - 1]
        if not self.compile_buckets:
            return module

        def run(*args: Any, **kwargs: Any) -> Any:
            return module(*args, **kwargs)

        # A code object of its own: torch.compile keeps a limited number of compilations for each.
        own = types.FunctionType(run.__code__.replace(), run.__globals__, "run", None, run.__closure__)
        backend = self.compile_buckets if isinstance(self.compile_buckets, str) else "inductor"
        compiled: Callable[..., Any] = torch.compile(own, dynamic=False, backend=backend)
        return compiled

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"DynamicShapeModule: {message}", stacklevel=3)


def _mask_argument(module: nn.Module, wanted: str | MaskArgument | None) -> MaskArgument | None:
    if wanted is None or isinstance(wanted, MaskArgument):
        return wanted
    return find_mask_argument(module) if wanted == "auto" else mask_argument_called(wanted)


def _has_gradients(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _time_of(call: Callable[[], None]) -> float:
    call()
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return sorted(times)[1]
