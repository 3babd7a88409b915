"""The models and steps that benchmarks/compile_backend.py measures."""

from __future__ import annotations

import copy
import statistics
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

Step = Callable[[], object]
SIZES = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 4, "num_attention_heads": 16}
MORE = {"num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096, "pad_token_id": 0}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY_MORE = {"num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 256, "pad_token_id": 0}
DECODING_LAYERS = 8
DECODERS = ("qwen3", "olmo2", "phi3", "gemma3")
CONFIGS = {
    "qwen3": "Qwen3Config",
    "olmo2": "Olmo2Config",
    "phi3": "Phi3Config",
    "gemma3": "Gemma3TextConfig",
    "gpt2": "GPT2Config",
    "modernbert": "ModernBertConfig",
}


class Row(NamedTuple):
    """One row of the table: a model, and what is done with it."""

    model: str
    kind: str
    batch: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.model} {self.kind} B{self.batch}" + (f" S{self.length}" if self.length > 1 else "")


def rows(is_small: bool) -> Iterator[Row]:
    long, trained = (32, 32) if is_small else (1024, 2048)
    for model in DECODERS:
        yield Row(model, "prefill", 2, long)
        yield Row(model, "cached prefill", 2, long)
        yield Row(model, "decode", 1, 1)
        yield Row(model, "decode", 8, 1)
    for model in CONFIGS:
        yield Row(model, "train", 4, trained)


def model_of(row: Row, device: torch.device) -> nn.Module:
    """The model in bf16, with the dropout of its configuration's defaults."""
    is_small = device.type == "cpu"
    sizes: dict[str, Any] = {**TINY, **TINY_MORE} if is_small else {**SIZES, **MORE}
    if row.kind == "decode" and not is_small:
        sizes["num_hidden_layers"] = DECODING_LAYERS
    if row.model in ("qwen3", "gemma3"):
        sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    if row.model == "gemma3":
        sizes["layer_types"] = ["sliding_attention", "full_attention"] * (sizes["num_hidden_layers"] // 2)
        sizes["sliding_window"] = 16 if is_small else 512
    if row.model == "gpt2":
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        sizes = {name: value for name, value in sizes.items() if name != "num_key_value_heads"} | ends
        sizes["n_inner"] = sizes.pop("intermediate_size")
    torch.manual_seed(0)
    config = getattr(transformers, CONFIGS[row.model])(**sizes)
    head = transformers.AutoModelForMaskedLM if row.model == "modernbert" else transformers.AutoModelForCausalLM
    return head.from_config(config).to(device, torch.bfloat16)  # type: ignore[no-any-return]


class StaticState:
    """A static cache, and its counters as they were: they count each step, and a measurement has many."""

    def __init__(self, model: nn.Module, ids: torch.Tensor, length: int, filled: int) -> None:
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=length)
        with torch.no_grad():
            model(input_ids=ids[:, :1].expand(-1, filled), past_key_values=self.cache)
        self.counters = [
            (layer, name, value.clone() if isinstance(value, torch.Tensor) else value)
            for layer in self.cache.layers
            for name, value in vars(layer).items()
            if (isinstance(value, torch.Tensor) and value.numel() == 1) or type(value) is int
        ]

    def rewind(self) -> None:
        for layer, name, value in self.counters:
            if isinstance(value, torch.Tensor):
                getattr(layer, name).copy_(value)
            else:
                setattr(layer, name, value)


class Case:
    """One row's model, what a step does with it, and the ways to run that."""

    def __init__(self, row: Row, device: torch.device, log: Callable[[str], None]) -> None:
        self.row, self.device, self.log = row, device, log
        self.model = model_of(row, device).train(row.kind == "train")
        self.ids = torch.randint(1, self.model.config.vocab_size, (row.batch, row.length), device=device)
        self.steps: dict[str, tuple[Step, Step]] = {}
        self.seconds_to_compile: dict[str, float] = {}
        self.notes: dict[str, str] = {}
        self.reports: dict[str, str] = {}

    def add(self, name: str, compiler: Callable[[Any], Any]) -> None:
        """A way by what it makes of the function that is measured; one that fails is noted and left out."""
        begin = time.perf_counter()
        try:
            step, before = self.step(compiler)
            for _ in range(3):
                before()
                step()
            synchronize(self.device)
        except Exception as error:
            self.notes[name] = f"{type(error).__name__}: {error}"[:300]
            self.log(f"{self.row.name}: {name} failed: {self.notes[name]}")
            return
        self.steps[name] = (step, before)
        self.seconds_to_compile[name] = time.perf_counter() - begin
        self.log(f"{self.row.name}: {name} runs after {self.seconds_to_compile[name]:.1f} s")

    def step(self, compiler: Callable[[Any], Any]) -> tuple[Step, Step]:
        model, kind = copy.deepcopy(self.model), self.row.kind
        if kind == "decode":
            length, filled = (1024, 512) if self.device.type == "cuda" else (128, 16)
            state = StaticState(model, self.ids, length, filled)

            def forward(ids: torch.Tensor, cache: Any) -> Any:
                return model(input_ids=ids, past_key_values=cache).logits

            call = compiler(own_code(forward))
            return without_gradients(lambda: call(self.ids, state.cache)), without_gradients(state.rewind)
        if kind == "train":
            options = {} if self.row.model == "modernbert" else {"use_cache": False}

            def loss(ids: torch.Tensor) -> Any:
                return model(input_ids=ids, labels=ids, **options).loss

            call = compiler(own_code(loss))

            def train() -> None:
                call(self.ids).backward()
                model.zero_grad(set_to_none=True)

            return train, nothing
        with_cache = kind == "cached prefill"

        def prefill(ids: torch.Tensor) -> Any:
            return model(input_ids=ids, use_cache=with_cache)

        call = compiler(own_code(prefill))
        return without_gradients(lambda: call(self.ids)), nothing

    def times(self, rounds: int, seconds: float) -> dict[str, dict[str, float]]:
        taken: dict[str, list[float]] = {name: [] for name in self.steps}
        for _ in range(rounds):
            for name, (step, before) in self.steps.items():
                taken[name].append(self.round(step, before, seconds))
        return {
            name: {"median_us": statistics.median(all_), "low_us": min(all_), "high_us": max(all_)}
            for name, all_ in taken.items()
        }

    def round(self, step: Step, before: Step, seconds: float) -> float:
        before()
        synchronize(self.device)
        begin = time.perf_counter()
        step()
        synchronize(self.device)
        repeats = max(2, min(100, int(seconds / (time.perf_counter() - begin))))
        before()
        synchronize(self.device)
        begin = time.perf_counter()
        for _ in range(repeats):
            step()
        synchronize(self.device)
        return (time.perf_counter() - begin) / repeats * 1e6

    def kernels(self, name: str) -> list[tuple[str, int, float]]:
        step, before = self.steps[name]
        before()
        return kernels_of(step, self.device)

    def busy(self, name: str) -> dict[str, float]:
        step, before = self.steps[name]
        before()
        return busy_of(step, self.device)


def kernels_of(step: Step, device: torch.device) -> list[tuple[str, int, float]]:
    """The kernels of one step with their launches and microseconds, longest first; nothing on a CPU."""
    if device.type != "cuda":
        return []
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name[:120]].append(float(event.device_time_total))
    listed = [(kernel, len(all_), sum(all_)) for kernel, all_ in found.items()]
    return sorted(listed, key=lambda one: -one[2])


def busy_of(step: Step, device: torch.device, steps: int = 5) -> dict[str, float]:
    """Of steps back to back: microseconds of a step, and those in which some kernel runs; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    of_device = [one for one in profile.events() if one.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((one.time_range.start, one.time_range.end) for one in of_device)
    busy, reached = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return {"step_us": (reached - spans[0][0]) / steps, "busy_us": busy / steps}


def nothing() -> None:
    pass


def without_gradients(step: Step) -> Step:
    def run() -> object:
        with torch.no_grad():
            torch.compiler.cudagraph_mark_step_begin()
            return step()

    return run


def own_code(function: types.FunctionType) -> Any:
    """Dynamo keeps its decisions per code object: each way has one."""
    function.__code__ = function.__code__.replace()
    return function


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
