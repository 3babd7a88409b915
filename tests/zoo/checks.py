"""What must hold of an optimised model, each check by its name: "" where it holds, or in words what does not."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from kernel_pytorch._optimize.state import tensors_in
from kernel_pytorch._optimize.verify import row_error
from torch import Tensor, nn

from .case import Case, call, seeded

_TOLERANCE = 2e-3  # of a row, through a whole model in fp32
_NEW_TOKENS = 5


def outputs_of(model: nn.Module, inputs: Any) -> list[Tensor]:
    """Every tensor of the output, caches included, on copies of the inputs."""
    with torch.no_grad(), seeded(), buffers_kept(model):
        return [tensor.clone() for tensor in tensors_in(call(model, copy.deepcopy(inputs)))]


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """A run inside leaves counters and statistics as they were."""
    kept = [(one, one.clone()) for one in model.buffers()]
    try:
        yield
    finally:
        for one, value in kept:
            if one.shape == value.shape:
                one.copy_(value)


def gradients_of(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """The loss and the gradients of all parameters."""
    with torch.enable_grad(), seeded():
        loss = model(**copy.deepcopy(inputs)).loss
        parameters = [p for p in model.parameters() if p.requires_grad]
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [loss.detach(), *(torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found))]


def differs(mine: list[Tensor], theirs: list[Tensor], exactly: bool = False) -> str:
    """In words, where two lists of tensors are not the same numbers."""
    if len(mine) != len(theirs):
        return f"{len(mine)} tensors, not {len(theirs)}"
    floating = [x for x in theirs if x.is_floating_point() and x.numel()]
    floor = 0.05 * max(
        (x.nan_to_num(0.0, 0.0, 0.0).float().square().mean().sqrt().item() for x in floating), default=0.0
    )
    for index, (a, b) in enumerate(zip(mine, theirs)):
        if a.shape != b.shape or a.dtype is not b.dtype:
            return f"tensor {index} is {tuple(a.shape)} {a.dtype}, not {tuple(b.shape)} {b.dtype}"
        if exactly or not b.is_floating_point():
            if not torch.equal(a.nan_to_num() if exactly else a, b.nan_to_num() if exactly else b):
                return f"tensor {index} is not the same bits"
        elif (error := row_error(a, b, floor)[1]) > _TOLERANCE:
            return f"tensor {index} differs by {error:.1e} of a row"
    return ""


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def same_state(model: nn.Module, before: dict[str, Tensor]) -> str:
    now = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    if now.keys() != before.keys():
        return f"keys differ: {', '.join(sorted(now.keys() ^ before.keys())[:3])}"
    changed = [name for name in now if not torch.equal(now[name].nan_to_num(), before[name].nan_to_num())]
    return f"{', '.join(changed[:3])} changed" if changed else ""


def called_modules(model: nn.Module, inputs: Any, listens: Callable[[int], bool]) -> list[str]:
    """The modules whose hooks fire, of those that are listened to."""
    seen: set[str] = set()
    handles = [
        module.register_forward_hook(lambda *_, name=name: seen.add(name))
        for index, (name, module) in enumerate(model.named_modules())
        if listens(index) and not isinstance(module, torch.jit.ScriptModule)
    ]
    try:
        outputs_of(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return sorted(seen)


class Before:
    """What the model did before anybody touched it."""

    def __init__(self, case: Case) -> None:
        self.case, model = case, case.model
        self.outputs = outputs_of(model, case.inputs)
        again = outputs_of(model, case.inputs)
        if text := differs(again, self.outputs):
            raise ValueError(f"two plain runs differ: {text}")
        self.is_exact = not differs(again, self.outputs, exactly=True)
        self.other = self._try(lambda: outputs_of(model, case.other_inputs)) if case.other_inputs is not None else None
        self.called = [called_modules(model, case.inputs, one) for one in _LISTENERS]
        self.copies = self._try(lambda: differs(outputs_of(copy.deepcopy(model), case.inputs), self.outputs) == "")
        self.pickles = self._try(lambda: bool(pickle.dumps(model)))
        self.generated = self._try(lambda: generated(model, case.inputs)) if case.is_causal_lm else None
        self.state = state_of(model)
        self.saves = self._try(lambda: _save(model, self.state)) == ""
        self.strides = [p.stride() for p in model.parameters()]

    @staticmethod
    def _try(run: Callable[[], Any]) -> Any:
        """None where the original cannot do it either."""
        try:
            return run()
        except Exception:  # whatever a model refuses, the optimised one may refuse too
            return None


_LISTENERS: tuple[Callable[[int], bool], ...] = (lambda i: i > 0 and i % 2 == 0, lambda i: i % 2 == 1)


def generated(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with seeded():
        prompt = inputs["input_ids"][:, :6]
        tokens: Tensor = model.generate(
            prompt, max_new_tokens=_NEW_TOKENS, min_new_tokens=_NEW_TOKENS, do_sample=False, pad_token_id=0,
            attention_mask=torch.ones_like(prompt),
        )  # fmt: skip
        return tokens


def check(before: Before) -> dict[str, str]:
    """Of the optimised model: every check that its original passes, the cheap ones first."""
    model, inputs = before.case.model, before.case.inputs
    found: dict[str, Callable[[], str]] = {
        "state_dict": lambda: same_state(model, before.state),
        "values": lambda: differs(outputs_of(model, inputs), before.outputs),
    }
    if before.other is not None:
        found["another shape"] = lambda: differs(outputs_of(model, before.case.other_inputs), before.other)
    for number, listens in enumerate(_LISTENERS):
        found[f"hooks {number + 1}"] = lambda n=number, f=listens: _same_names(  # type: ignore[misc]
            called_modules(model, inputs, f), before.called[n]
        )
    if before.copies:
        found["deepcopy"] = lambda: differs(outputs_of(copy.deepcopy(model), inputs), before.outputs)
    if before.pickles:
        found["pickle"] = lambda: differs(outputs_of(pickle.loads(pickle.dumps(model)), inputs), before.outputs)
    if before.saves:
        found["save"] = lambda: _save(model, before.state)
    if before.generated is not None:
        found["generate"] = lambda: (
            "" if torch.equal(generated(model, inputs), before.generated) else "other tokens than the original's"
        )
    return {name: _said(one) for name, one in found.items()}


def check_restored(before: Before) -> dict[str, str]:
    model = before.case.model
    moved = [p.stride() for p in model.parameters()] != before.strides
    return {
        "restore": _said(lambda: differs(outputs_of(model, before.case.inputs), before.outputs, before.is_exact)),
        "restored state": _said(lambda: "a stride changed" if moved else same_state(model, before.state)),
    }


def _same_names(now: list[str], before: list[str]) -> str:
    missing = sorted(set(before) - set(now))
    return f"hooks of {', '.join(missing[:3])} ({len(missing)} in all) did not fire" if missing else ""


def _save(model: Any, state: dict[str, Tensor]) -> str:
    """Through torch.save, through safetensors, and through save_pretrained where there is one."""
    from safetensors.torch import load_file, save_model

    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    wrong = [name for name in state if not torch.equal(loaded[name].nan_to_num(), state[name].nan_to_num())]
    if wrong:
        return f"torch.save changed {', '.join(wrong[:3])}"
    with tempfile.TemporaryDirectory(prefix="kernel_pytorch_zoo_") as directory:
        save_model(model, f"{directory}/model.safetensors")
        wrong = [k for k, v in load_file(f"{directory}/model.safetensors").items() if not _equal(v, state.get(k))]
        if wrong:
            return f"safetensors changed {', '.join(wrong[:3])}"
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(directory)
            written = {k: v for path in Path(directory).glob("*.safetensors") for k, v in load_file(path).items()}
            if not written:
                return "save_pretrained wrote nothing"
    return ""


def _equal(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and torch.equal(a.nan_to_num(), b.nan_to_num())


def _said(check: Callable[[], str]) -> str:
    try:
        return check()
    except Exception as error:  # a model that raises is a failed check
        lines = str(error).strip().splitlines()
        return f"raised {type(error).__name__}: {lines[0][:300] if lines else ''}"
