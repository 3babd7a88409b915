"""AdamW (Loshchilov and Hutter, 2019)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from .._interrupts import catching_interrupt
from . import formats
from .offload.owner import Offloaded
from .offload.pipeline import Offload, OffloadedStates, Update
from .offload.slabs import Field
from .shards import local
from .steps import (
    ListOptimizer,
    check_range,
    converted_states,
    converted_step,
    has_correction,
    has_master,
    laid_out_like,
    make_states,
)

_AVERAGES = ("exp_avg", "exp_avg_sq")


class AdamW(ListOptimizer):
    """AdamW with torch.optim.AdamW's arguments and state_dict (each loads the other's), for dense gradients.

    A step is one kernel launch for up to 330 parameters of a group that share device and type. It can be captured in a
    CUDA graph as it is, with no `capturable`: step counts live on the parameters' device (a learning rate that changes
    between replays must be a tensor, as in torch). With torch.amp.GradScaler, gradients are unscaled and steps with
    infinities skipped inside the kernel.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as torch.optim.AdamW.
        foreach, fused, capturable: accepted for torch's sake; there is one implementation.
        differentiable: must be False.
        state_dtype: type of both averages: torch.float32 (usual), torch.bfloat16, or None for the parameter's own, as
            torch does. Averages of fp64 parameters are fp64.
        master_weights: keeps an fp32 copy of bf16 and fp16 parameters, in the state as "master", and updates that.
        stochastic_rounding: rounds bf16 parameters and bf16 averages up or down at random, so that the expectation is
            exact and updates smaller than half a unit are not lost; instead of master weights, at no memory.
        state: the format of the averages. "fp32": as state_dtype says. "compact": 7 bytes per bf16 parameter with its
            gradient: one byte for each average, with a scale for 64 elements, and one that extends the bf16 weight to
            a master of 24 bits. "8bit": averages as bitsandbytes' AdamW8bit has them, one byte each, with a scale for
            256 elements; parameters of fewer than 4096 elements keep fp32 averages. A step gives the same bits on CPUs
            and GPUs with the latter two.
        offload: keeps states in the host's memory, with the same numbers. "host": the CPU updates everything; gradients
            are sent to it and weights back. "stream": the GPU updates everything; states pass through it, while earlier
            and later ones are on their way. "interleave": both at once, in shares that a plan chooses by the rates of
            this machine, measured in the first step (`explain()` tells them); or an `Offload`, which says more. Of
            parameters on the CPU states are there anyway. State tensors in `state` and `state_dict` are the host's.
        max_grad_norm: clips the L2 norm of all gradients to this, inside the step: gradients themselves are not
            changed. `grad_norm` holds the norm before clipping, unscaled, after each step.
        seed: of the stochastic rounding; None draws one from torch's generator. The bits depend on the seed and the
            step count alone, so that a run continued from a state_dict repeats them.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | None = torch.float32,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        max_grad_norm: float | None = None,
        seed: int | None = None,
        state: str = "fp32",
        offload: str | Offload | None = None,
    ) -> None:
        check_range("AdamW", "betas[0]", betas[0], 0.0, 1.0)
        check_range("AdamW", "betas[1]", betas[1], 0.0, 1.0)
        check_range("AdamW", "eps", eps, 0.0, float("inf"))
        if state_dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"AdamW: state_dtype is {state_dtype}; it must be torch.float32, torch.bfloat16 or None")
        if state != "fp32":
            given = dict(amsgrad=amsgrad, master_weights=master_weights, stochastic_rounding=stochastic_rounding)
            refused = [name for name, is_set in given.items() if is_set]
            if refused or state_dtype is not torch.float32:
                name = refused[0] if refused else "state_dtype"
                raise ValueError(f'AdamW: {name} is for state="fp32"; state is "{state}"')
        how = Offload(offload) if isinstance(offload, str) else offload
        if how is not None and stochastic_rounding:
            raise ValueError(
                "AdamW: stochastic_rounding draws by a parameter's place in a launch; it goes without offload"
            )
        self._offload, self._offloaded = how, Offloaded()
        if seed is None:
            seed = int(torch.randint(0, 2**62, ())) if stochastic_rounding else 0
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=True if fused is None and not foreach else fused,  # steps are where torch's fused=True expects them
            decoupled_weight_decay=True,
            state_dtype=state_dtype,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
            max_grad_norm=max_grad_norm,
            state=state,
            offload=how.mode if how is not None else None,
        )
        super().__init__(params, defaults)

    _joins_late = False  # overlap_forward's: layers wait for their own parameters

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "_offload"):  # a copy or an unpickled one; loading a state_dict also comes here
            mode = self.defaults.get("offload")
            self._offload, self._offloaded = Offload(mode) if mode is not None else None, Offloaded()

    def state_dict(self) -> dict[str, Any]:
        """As torch's. Offloaded states are the host's own tensors, which the next step changes."""
        self._offloaded.finish()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes this class' state in any format, torch.optim.AdamW's, or that of bitsandbytes' AdamW8bit.

        States are converted to each group's format and state_dtype, and copied bit for bit where they have it.
        """
        self._offloaded.finish()
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True

    def explain(self) -> str:
        """What an offloaded step is made of: the machine's rates, the plan's shares, prediction and bound."""
        if self._offload is None:
            return "offload=None: states are where the parameters are"
        groups = {id(p): group for group in self.param_groups for p in group["params"]}

        def bare(states: OffloadedStates) -> Update:
            first = states.slabs.parameters[0]
            return self._update_of(groups[id(first)], first, (None, None, None))

        return self._offloaded.explain(self._offload, bare)

    def torch_state_dict(self) -> dict[str, Any]:
        """The state as torch.optim.AdamW has it, in fp32 whatever the format here is; it loads there and here."""
        state_dict = self.state_dict()
        for group in state_dict["param_groups"]:
            for index in group["params"]:
                entry = state_dict["state"].get(index)
                if entry is None:
                    continue
                entry = {name: value.clone() if isinstance(value, Tensor) else value for name, value in entry.items()}
                state_dict["state"][index] = entry
                for name in _AVERAGES:
                    scale = entry.pop(f"{name}_scale", None)
                    if scale is not None:
                        entry[name] = formats.decode(entry[name], scale, group["state"], name.endswith("_sq"))
                entry.pop("correction", None)
            group["state"] = "fp32"
        return state_dict

    def master(self, parameter: Tensor) -> Tensor:
        """The parameter in fp32 with all bits that its state keeps of it, a new tensor."""
        self._offloaded.finish()
        state = self.state[parameter]
        if "correction" in state:
            return formats.master_of(parameter, state["correction"].to(parameter.device))
        kept = state.get("master", parameter)
        return kept.detach().to(torch.float32, copy=True)  # type: ignore[no-any-return]

    def _step_batch(
        self, group: dict[str, Any], batch: list[Tensor], number: int, signals: tuple[Tensor | None, ...]
    ) -> None:
        if self._offload is not None:
            return self._step_offloaded(group, batch, signals)
        states = [self._state_of(parameter, group) for parameter in batch]
        seed = self._seed(group, number, states[0]["step"]) if _draws(group, batch[0].dtype) else None
        options: dict[str, Any] = dict(betas=group["betas"], eps=group["eps"], seed=seed)
        self._call("adamw", group, batch, states, _AVERAGES, signals, **options)
        return None

    def _step_offloaded(self, group: dict[str, Any], batch: list[Tensor], signals: tuple[Tensor | None, ...]) -> None:
        gradients: dict[OffloadedStates, dict[Tensor, Tensor]] = {}
        for parameter in batch:
            states = self._offloaded.get(parameter) or self._offloaded_states(parameter, group)
            if "step" not in self.state[parameter]:
                self._begin(parameter, group, states)
            gradients.setdefault(states, {})[parameter] = laid_out_like(parameter, cast(Tensor, parameter.grad))
        for states, some in gradients.items():
            first = states.slabs.parameters[0]
            updates = self._update_of(group, first, signals), self._update_of(group, first, (None, None, None))
            with catching_interrupt():  # subgroups are stepped one by one: all of them or none
                states.step(some, *updates)

    def _update_of(self, group: dict[str, Any], like: Tensor, signals: tuple[Tensor | None, ...]) -> Update:
        """A step over parts of parameters of the kind of `like`, on the device that they are on."""
        form = formats.format_of(like, group["state"])
        on_host: list[tuple[Tensor | None, ...]] = []

        def update(parts: list[Tensor], gradients: list[Tensor], states: dict[str, list[Tensor]]) -> bool:
            given = signals
            if parts[0].device.type == "cpu":
                if not on_host:  # read once; gradients have come before
                    on_host.append(tuple(None if signal is None else signal.cpu() for signal in signals))
                given = on_host[0]
                if given[1] is not None and bool(given[1] != 0):
                    return False
            options: dict[str, Any] = dict(betas=group["betas"], eps=group["eps"], gradients=gradients, form=form)
            self._call("adamw", group, parts, states, _AVERAGES, given, **options)
            return True

        return update

    def _offloaded_states(self, parameter: Tensor, group: dict[str, Any]) -> OffloadedStates:
        def kind(one: Tensor) -> tuple[Any, ...]:
            return one.device, one.dtype, formats.format_of(one, group["state"])

        def fields() -> list[Field]:
            form, small = formats.format_of(parameter, group["state"]), _state_dtype(parameter, group)
            averages = [*_AVERAGES, *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
            if form == "fp32":
                made = [Field(name, small) for name in averages]
            else:
                made = [Field(name, torch.int8) for name in averages]
                made += [Field(f"{name}_scale", torch.float32, formats.GROUP[form]) for name in averages]
            if has_correction(parameter, group):
                made.append(Field("correction", torch.int8))
            return [*made, Field("master", torch.float32)] if has_master(parameter, group) else made

        def alike() -> list[Tensor]:
            return [one for one in group["params"] if one.requires_grad and kind(one) == kind(parameter)]

        assert self._offload is not None
        return self._offloaded.states_of(parameter, alike, fields, self._offload, self.state)

    def _begin(self, parameter: Tensor, group: dict[str, Any], states: OffloadedStates) -> None:
        form = formats.format_of(parameter, group["state"])
        states.finish()  # a parameter between others travels with them
        state = {name: torch.zeros_like(local(view)) for name, view in states.slabs.views(parameter).items()}
        for name in _AVERAGES:
            state[name].fill_(formats.zero_code(name, form))
        if "master" in state:
            state["master"].copy_(local(parameter))
        self.state[parameter] = states.slabs.store(parameter, state)

    def _join(self) -> None:
        if not self._joins_late:
            self._offloaded.join()

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[parameter]
        if group["state"] != "fp32":
            if "step" not in state:
                make_states(state, parameter, group, "AdamW", _AVERAGES)
            return state  # type: ignore[no-any-return]
        if "step" not in state:
            if not parameter.is_floating_point():
                raise RuntimeError(f"AdamW: a parameter is {parameter.dtype}; take its real view (torch.view_as_real)")
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=_state_dtype(parameter, group))
        elif not (isinstance(state["step"], Tensor) and state["step"].device == parameter.device):
            state["step"] = converted_step(state["step"], parameter)  # put there by someone else
        if group["amsgrad"] and "max_exp_avg_sq" not in state:
            state["max_exp_avg_sq"] = torch.zeros_like(parameter, dtype=_state_dtype(parameter, group))
        if has_master(parameter, group) and "master" not in state:
            state["master"] = parameter.to(torch.float32, memory_format=torch.preserve_format)
        return state  # type: ignore[no-any-return]

    def _loaded(
        self, entry: dict[str, Any], parameter: Tensor, group: dict[str, Any], saved_state: str
    ) -> dict[str, Any]:
        state = self._loaded_here(entry, parameter, group, saved_state)
        if self._offload is None:
            return state
        if has_master(parameter, group) and "master" not in state:
            state["master"] = parameter
        return self._offloaded_states(parameter, group).slabs.store(parameter, state)

    def _loaded_here(
        self, entry: dict[str, Any], parameter: Tensor, group: dict[str, Any], saved_state: str
    ) -> dict[str, Any]:
        state = converted_states(entry, parameter, group, saved_state, _AVERAGES)
        if group["state"] != "fp32":
            return state
        if "correction" in entry and group["master_weights"]:
            correction = entry["correction"].detach().to(parameter.device)
            state["master"] = formats.master_of(
                parameter, torch.empty_like(parameter, dtype=torch.int8).copy_(correction)
            )
        exact = {name: value for name, value in entry.items() if f"{name}_scale" not in entry}  # fp64 stays fp64
        for name, value in {**state, **exact}.items():
            if name == "step":
                state[name] = converted_step(value, parameter)
            elif name in ("master", "max_exp_avg_sq", *_AVERAGES):
                dtype = torch.float32 if name == "master" else _state_dtype(parameter, group)
                state[name] = torch.empty_like(parameter, dtype=dtype).copy_(value.detach())
        return state

    def _seed(self, group: dict[str, Any], number: int, step: Tensor) -> Tensor:
        """(seed, offset) on the device: the offset is the step count, so that a replayed graph draws new bits."""
        key = (number, step.device, group["seed"])
        seed = self._scalars.get(key)
        if seed is None:
            seed = self._scalars[key] = torch.tensor([group["seed"] + number, 0], device=step.device)
        seed[1:].copy_(step.view(1))
        return seed


def _state_dtype(parameter: Tensor, group: dict[str, Any]) -> torch.dtype:
    dtype: torch.dtype | None = group["state_dtype"]
    return parameter.dtype if dtype is None or parameter.dtype is torch.float64 else dtype


def _draws(group: dict[str, Any], dtype: torch.dtype) -> bool:
    is_bf16 = dtype is torch.bfloat16 or (group["state_dtype"] is torch.bfloat16 and dtype is torch.float32)
    return bool(group["stochastic_rounding"]) and is_bf16
