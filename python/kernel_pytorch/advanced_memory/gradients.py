"""Gradients in fewer bytes on their way between processes: communication hooks for DistributedDataParallel.

A hook sends codes instead of numbers, twice: each process sends every other one its share of a bucket, adds up what it
is sent, and sends the sum of its share to all. Both together are 2 (n - 1) / n codes per number and process, as many as
an all-reduce sends numbers. What a code leaves out is kept and added to the next gradient (error feedback), by
parameter, since DDP changes its buckets after the first step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ._codes import CODES, Code

__all__ = ["AdaptiveCompressionOptimizer", "GradientCompressor", "QuantizedGradientAccumulation"]

# Renamed in torch 2.13.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
METHODS = ("none", *CODES, "powersgd")


def _check_method(owner: str, method: str, methods: Sequence[str] = METHODS) -> None:
    if method not in methods:
        raise ValueError(f'{owner}: method is "{method}"; it must be one of {", ".join(methods)}')


class GradientCompressor:
    """Compresses the gradients of a DistributedDataParallel: `GradientCompressor(ddp, "int8")`, before the first step.

    Args:
        model: the DistributedDataParallel whose gradients are reduced.
        method: "int8", "int4", "onebit", "topk" (1 % of each share), "powersgd" (torch's own hook, of `rank`; it keeps
            its errors by bucket and in its own state), or "none": torch's all-reduce, timed.
        error_feedback: adds what a code left out to the next gradient.
        warmup_steps: that are reduced as they are: codes of the first, large gradients cost most accuracy.
        rank: of "powersgd".
        measured_steps: compressed steps whose buckets are timed, with a plain all-reduce beside each, so that
            `report()` can say whether the codes pay. They make the host wait; later steps do not.

    `state_dict()` holds the number of steps and the errors of this process by the parameters' names; every process
    saves its own.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        method: str = "int8",
        *,
        error_feedback: bool = True,
        warmup_steps: int = 1000,
        rank: int = 4,
        measured_steps: int = 3,
    ) -> None:
        _check_method("GradientCompressor", method)
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"GradientCompressor: model is {type(model).__name__}; give the DistributedDataParallel around it"
            )
        self.method, self.error_feedback, self.warmup_steps = method, error_feedback, warmup_steps
        self.measured_steps = measured_steps
        self.step = 0
        self.group = model.process_group
        self.members = distributed.get_world_size(self.group)
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self._errors: dict[str, Tensor] = {}  # parts of the tensors below, once their bucket was sent
        self._bucket_errors: dict[tuple[str, ...], Tensor] = {}
        self._codes: dict[str, Code] = {name: make() for name, make in CODES.items()}
        self._streams: dict[torch.device, Any] = {}
        self._seconds: dict[str, list[float]] = {}
        self._bytes: dict[str, int] = {}
        self._sums = [0.0, 0.0]  # squares of what codes left out, and of what they were to say
        if method == "powersgd":
            self._power = powerSGD_hook.PowerSGDState(
                self.group, matrix_approximation_rank=rank, start_powerSGD_iter=max(warmup_steps, 2)
            )
        model.register_comm_hook(self, GradientCompressor._hook)

    # Without annotations: torch compares them with classes, and here they are text.
    @staticmethod
    def _hook(state, bucket):  # type: ignore[no-untyped-def]
        if state.method == "powersgd":
            state.step += bucket.is_last()
            return powerSGD_hook.powerSGD_hook(state._power, bucket)
        method = "none" if state.step < state.warmup_steps else state._method_of_step()
        device = bucket.buffer().device
        future: torch.futures.Future[Tensor]
        if device.type == "cuda":  # beside backward, on a stream of its own
            stream = state._stream_of(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            future = torch.futures.Future(devices=[device])
            with torch.cuda.stream(stream):
                future.set_result(state._timed(method, bucket))
        else:
            future = torch.futures.Future()
            future.set_result(state._timed(method, bucket))
        if bucket.is_last():
            state.step += 1
        return future

    def _stream_of(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    _compares = True  # whether a plain all-reduce is timed beside each compressed one

    def _method_of_step(self) -> str:
        return self.method

    def _measures(self) -> bool:
        return 0 <= self.step - self.warmup_steps < self.measured_steps

    def _timed(self, method: str, bucket: Any) -> Tensor:
        flat: Tensor = bucket.buffer()
        if not self._measures():
            return self._reduced(method, bucket)
        if self._compares and method != "none":
            copy = flat.clone()
            start = self._clock(flat)
            distributed.all_reduce(copy, group=self.group)
            self._note("none", copy.nbytes, start, flat)
        start = self._clock(flat)
        reduced = self._reduced(method, bucket)
        self._note(method, self._sent_bytes(method, flat), start, flat)
        return reduced

    def _clock(self, flat: Tensor) -> float:
        if flat.device.type == "cuda":
            torch.cuda.current_stream(flat.device).synchronize()
        return time.perf_counter()

    def _note(self, method: str, size: int, start: float, flat: Tensor) -> None:
        self._seconds.setdefault(method, []).append((self._clock(flat) - start) / max(flat.numel(), 1))
        self._bytes[method] = max(self._bytes.get(method, 0), size)

    def _sent_bytes(self, method: str, flat: Tensor) -> int:
        if method == "none":
            return flat.nbytes
        columns = self._columns(method, flat.numel())
        return self.members * self._codes[method].row_bytes(columns)

    def _columns(self, method: str, count: int) -> int:
        return self._codes[method].padded(-(-count // self.members))

    def _reduced(self, method: str, bucket: Any) -> Tensor:
        flat: Tensor = bucket.buffer()
        if method == "none":
            flat.div_(self.members)
            distributed.all_reduce(flat, group=self.group)
            return flat
        code, columns = self._codes[method], self._columns(method, flat.numel())
        error = self._error_of(bucket) if self.error_feedback else None
        measures = error is not None and self._measures()
        if error is not None and measures:
            self._sums[1] += float((flat + error).square().sum())
        sent = code.encode(flat, self.members, columns, error)
        if error is not None and measures:
            self._sums[0] += float(error.square().sum())
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent, group=self.group)
        # This process' share of the bucket. What the second code leaves out of it the others have no error for.
        begin = min(distributed.get_rank(self.group) * columns, flat.numel())
        own = slice(begin, min(begin + columns, flat.numel()))
        mean = torch.empty(own.stop - own.start, device=flat.device)
        code.decode_(received, columns, mean, mean=True)
        own_error = error[own] if error is not None else None
        share = code.encode(mean, 1, columns, own_error, carries=False, gain=self.members)
        shares = torch.empty(self.members, share.shape[1], dtype=torch.uint8, device=flat.device)
        _all_gather(shares, share, group=self.group)
        return code.decode_(shares, columns, flat)

    def _error_of(self, bucket: Any) -> Tensor:
        """What was left out of this bucket's parameters, one after the other as in the bucket."""
        parameters = bucket.parameters()
        names = tuple(self._names[id(parameter)] for parameter in parameters)
        if names not in self._bucket_errors:
            kept = {key: value for key, value in self._bucket_errors.items() if not set(key) & set(names)}
            flat = torch.zeros_like(bucket.buffer(), dtype=torch.float32)
            for name, part, parameter in zip(names, self._parts(flat, parameters), parameters, strict=True):
                error = self._errors.get(name)
                if error is not None:
                    part.copy_(error.view(-1))
                self._errors[name] = part.view(parameter.shape)
            self._bucket_errors = {**kept, names: flat}
        return self._bucket_errors[names]

    @staticmethod
    def _parts(flat: Tensor, parameters: list[Tensor]) -> Sequence[Tensor]:
        return torch.split(flat, [parameter.numel() for parameter in parameters])

    def seconds_per_number(self) -> dict[str, float]:
        """By method, the median over buckets; of the slowest process."""
        found = {name: sorted(times)[len(times) // 2] for name, times in self._seconds.items() if times}
        names = sorted(found)
        slowest = torch.tensor([found[name] for name in names], dtype=torch.float64)
        if self.members > 1 and names:
            slowest = slowest.to(self._device())
            distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX, group=self.group)
        return dict(zip(names, slowest.tolist(), strict=True))

    def _device(self) -> torch.device:
        is_nccl = distributed.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")

    def report(self) -> dict[str, Any]:
        """What was measured and what it means. Every process has to call it: the slowest counts.

        `pays` is whether a step's gradients arrive sooner in codes; None where nothing was compressed yet.
        """
        seconds = self.seconds_per_number()
        plain, coded = seconds.get("none"), seconds.get(self.method)
        answer: dict[str, Any] = {"method": self.method, "step": self.step, "seconds_per_number": seconds, "pays": None}
        answer["left_out"] = (self._sums[0] / self._sums[1]) ** 0.5 if self._sums[1] else None
        if self.method == "powersgd":
            answer["reason"] = "powersgd is torch's own hook, which is not timed here"
        elif self.method == "none" or plain is None or coded is None:
            answer["reason"] = f"nothing was compressed and timed yet: step {self.step}, warm-up {self.warmup_steps}"
        if "reason" in answer or plain is None or coded is None:
            return answer
        answer["pays"] = coded < plain
        answer["bytes"] = {name: self._bytes[name] for name in ("none", self.method)}
        answer["reason"] = (
            f"a million gradients take {plain * 1e9:.2f} ms as they are and {coded * 1e9:.2f} ms in {self.method}, "
            f"encoding and decoding included: compression {'pays' if answer['pays'] else 'does not pay on this link'}"
        )
        return answer

    def state_dict(self) -> dict[str, Any]:
        errors = {name: error.clone() for name, error in self._errors.items()}  # without the rest of their buckets
        state: dict[str, Any] = {"method": self.method, "step": self.step, "errors": errors}
        if self.method == "powersgd":
            state["powersgd"] = self._power
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["method"] != self.method and "powersgd" in (state["method"], self.method):
            raise ValueError(
                f'GradientCompressor: the state is of method "{state["method"]}", this is "{self.method}"; errors of '
                "powersgd are torch's own"
            )
        unknown = set(state["errors"]) - set(self._names.values())
        if unknown:
            raise ValueError(
                f"GradientCompressor: the state has errors of {sorted(unknown)[0]}, which the model has not"
            )
        self.step = state["step"]
        self._errors = {name: error.clone() for name, error in state["errors"].items()}
        self._bucket_errors = {}
        if self.method == "powersgd":
            self._power.__setstate__(state["powersgd"].__getstate__())  # type: ignore[no-untyped-call]


class AdaptiveCompressionOptimizer(GradientCompressor):
    """Takes, of several methods, the one with which gradients arrive soonest on this link.

    After the warm-up each method reduces `trials` steps; then every process knows the slowest one's times, and all take
    the same method. "none" is among them, so that compression that does not pay is not used. `method` says what was
    taken, `report()` why.
    """

    _compares = False  # the plain all-reduce has steps of its own

    def __init__(
        self,
        model: DistributedDataParallel,
        methods: Sequence[str] = ("none", "int8", "int4"),
        *,
        trials: int = 3,
        error_feedback: bool = True,
        warmup_steps: int = 1000,
    ) -> None:
        for method in methods:
            _check_method("AdaptiveCompressionOptimizer", method, ("none", *CODES))
        if trials < 1:
            raise ValueError(f"AdaptiveCompressionOptimizer: trials is {trials}; use 1 or more")
        self.methods, self.trials = tuple(dict.fromkeys(("none", *methods))), trials
        self._is_chosen = False
        super().__init__(
            model,
            "none",
            error_feedback=error_feedback,
            warmup_steps=warmup_steps,
            measured_steps=trials * len(self.methods),
        )

    def _method_of_step(self) -> str:
        if not self._is_chosen:
            trial = (self.step - self.warmup_steps) // self.trials
            if trial < len(self.methods):
                return self.methods[trial]
            seconds = self.seconds_per_number()
            self.method = min(seconds, key=lambda name: seconds[name])
            self._is_chosen = True
        return self.method

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "is_chosen": self._is_chosen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.method = state["method"]
        super().load_state_dict(state)
        self._is_chosen = state["is_chosen"]


class QuantizedGradientAccumulation:
    """Gradients of several backward passes added up in int8, one byte a number instead of four.

        accumulation = QuantizedGradientAccumulation(model, steps=4)
        for batch in batches:
            with accumulation.micro_step():
                loss(model(batch)).backward()
            if accumulation.is_complete:
                optimizer.step(); optimizer.zero_grad()

    After each pass but the last of `steps`, gradients become codes (blocks of 256 with a scale) and `.grad` is given
    back; in the last, the sum is added to its gradients: in the communication hook of a DistributedDataParallel, before
    they are reduced, and else right after. A sum of n passes is rounded n - 1 times, each time to 1/254 of the largest
    magnitude of a block or better.
    """

    def __init__(self, model: nn.Module, steps: int = 4) -> None:
        if steps < 1:
            raise ValueError(f"QuantizedGradientAccumulation: steps is {steps}; use 1 or more")
        self.steps = steps
        self._model = model
        self._is_parallel = isinstance(model, DistributedDataParallel)
        self._code = CODES["int8"]()
        self._sums: dict[int, Tensor] = {}
        self._pass = 0
        if isinstance(model, DistributedDataParallel):
            self._group = model.process_group
            model.register_comm_hook(self, QuantizedGradientAccumulation._hook)

    @property
    def is_complete(self) -> bool:
        """Whether the last pass was the last of `steps`: gradients are whole."""
        return self._pass == 0

    def micro_step(self) -> _MicroStep:
        return _MicroStep(self)

    @staticmethod
    def _hook(state, bucket):  # type: ignore[no-untyped-def]  # as GradientCompressor's
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            state._add_sum(parameter, gradient)
        flat = bucket.buffer().div_(distributed.get_world_size(state._group))
        work = distributed.all_reduce(flat, group=state._group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def _add_sum(self, parameter: Tensor, gradient: Tensor) -> None:
        message = self._sums.pop(id(parameter), None)
        if message is None:
            return
        flat = gradient.contiguous().view(-1)
        self._code.decode_(message, self._code.padded(flat.numel()), flat, adds=True)
        if not gradient.is_contiguous():
            gradient.copy_(flat.view(gradient.shape))

    def _encode_all(self) -> None:
        for parameter in self._model.parameters():
            if parameter.grad is None:
                continue
            columns = self._code.padded(parameter.numel())
            flat = parameter.grad.float().contiguous().view(-1)
            message = self._sums.get(id(parameter))
            if message is not None:
                self._code.decode_(message, columns, flat, adds=True)
            self._sums[id(parameter)] = self._code.encode(flat, 1, columns)
            parameter.grad = None

    def _end_pass(self) -> None:
        self._pass = (self._pass + 1) % self.steps
        with torch.no_grad():
            if self._pass != 0:
                self._encode_all()
            elif not self._is_parallel:
                for parameter in self._model.parameters():
                    if parameter.grad is None and id(parameter) in self._sums:
                        parameter.grad = torch.zeros_like(parameter)  # had none in the last pass alone
                    if parameter.grad is not None:
                        self._add_sum(parameter, parameter.grad)


class _MicroStep:
    def __init__(self, accumulation: QuantizedGradientAccumulation) -> None:
        self._accumulation = accumulation
        self._no_sync: Any = None

    def __enter__(self) -> None:
        one = self._accumulation
        if one._is_parallel and one._pass + 1 < one.steps:
            self._no_sync = cast(DistributedDataParallel, one._model).no_sync()
            self._no_sync.__enter__()

    def __exit__(self, kind: Any, *_: object) -> None:
        if self._no_sync is not None:
            self._no_sync.__exit__(None, None, None)
        if kind is None:
            self._accumulation._end_pass()
