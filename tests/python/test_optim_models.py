"""Optimizers as models use them: tied weights, frozen and empty parameters, gradients that are missing or accumulated,
groups, a GradScaler, a schedule, and a checkpoint in the middle, for every optimizer, state and offload."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_pytorch.optim import SGD, Adafactor, AdamW, Lion, Muon, Offload
from kernel_pytorch.optim.offload.pipeline import OffloadedStates
from torch import Tensor, nn

_OFFLOADS = {
    None: None,
    "host": Offload("host", 700),
    "stream": Offload("stream", 700),
    "interleave": Offload("interleave", 700, device_share=0.5),
}
_ADAMW = [
    pytest.param(
        AdamW, dtype, {"state": state, "offload": offload, **more}, id=f"AdamW-{state}-{name}-{dtype}{sorted(more)}"
    )
    for name, offload in _OFFLOADS.items()
    for dtype, state, more in [
        (torch.float32, "fp32", {}),
        (torch.bfloat16, "fp32", {"master_weights": True}),
        (torch.bfloat16, "compact", {}),
        (torch.float32, "8bit", {}),
    ]
]
_OTHERS = [
    pytest.param(kind, dtype, {"state": state, **more}, id=f"{kind.__name__}-{state}-{dtype}")
    for kind, more in ((Lion, {}), (SGD, {"momentum": 0.9, "nesterov": True}), (Adafactor, {}))
    for dtype, state in ((torch.float32, "fp32"), (torch.bfloat16, "compact"), (torch.float32, "8bit"))
    if (kind, state) != (Adafactor, "8bit")
]
_MUON = [pytest.param(Muon, dtype, {}, id=f"Muon-{dtype}") for dtype in (torch.float32, torch.bfloat16)]


class Model(nn.Module):
    """A language model whose head is its embedding, with a layer that is frozen and parameters that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(96, 48)
        self.frozen, self.layer = nn.Linear(48, 48), nn.Linear(48, 48)
        self.sometimes = nn.Linear(48, 48, bias=False)  # in every second step
        self.norm, self.head = nn.LayerNorm(48), nn.Linear(48, 96, bias=False)
        self.head.weight = self.tokens.weight
        self.frozen.requires_grad_(False)
        self.never, self.empty = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(0, 3))
        self.scalar = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        x = self.tokens(tokens)
        x = x + F.gelu(self.layer(self.frozen(x))) * self.scalar
        if step % 2:
            x = x + self.sometimes(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


@pytest.fixture(autouse=True)
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloaded states pass through all copies, with a CPU in the device's place."""
    made = OffloadedStates.__init__

    def stage(self: OffloadedStates, *arguments: Any) -> None:
        made(self, *arguments)
        self._is_direct = False

    monkeypatch.setattr(OffloadedStates, "__init__", stage)


def make(kind: Any, dtype: torch.dtype, options: dict[str, Any]) -> tuple[Model, Any]:
    torch.manual_seed(0)
    model = Model().to(dtype)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    if kind is Muon:
        return model, Muon([p for p in matrices if p.numel() > 0], 1e-2, **options)
    rest = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 3e-3}]
    return model, kind(groups, 1e-2, max_grad_norm=1.0, **options)


def train(model: Model, optimizer: Any, steps: range, scaler: Any = None) -> None:
    for step in steps:
        for part in range(2):
            tokens = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(10 * step + part))
            loss = model(tokens, step) / 2
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize(("kind", "dtype", "options"), [*_ADAMW, *_OTHERS, *_MUON])
def test_training_and_what_a_checkpoint_continues(kind: Any, dtype: torch.dtype, options: dict[str, Any]) -> None:
    model, optimizer = make(kind, dtype, options)
    begin = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(model, optimizer, range(3))
    schedule.step()
    file = io.BytesIO()
    torch.save([one.state_dict() for one in (model, optimizer, schedule)], file)
    train(model, optimizer, range(3, 6))
    untouched = {"never", "frozen.weight", "frozen.bias"}
    trained = {"tokens.weight", "layer.weight", "sometimes.weight"}
    for name, parameter in model.named_parameters():
        assert bool(torch.isfinite(parameter).all()), name
        if name in untouched or name in trained:
            assert torch.equal(parameter, begin[name]) == (name in untouched), name

    file.seek(0)
    resumed, other = make(kind, dtype, options)
    its_schedule = torch.optim.lr_scheduler.StepLR(other, 1, 0.5)
    for one, saved in zip((resumed, other, its_schedule), torch.load(file), strict=True):
        one.load_state_dict(saved)
    train(resumed, other, range(3, 6))
    for name, parameter in resumed.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name]), name


@pytest.mark.parametrize(("kind", "dtype", "options"), [*_ADAMW, *_OTHERS[::3], *_MUON[:1]])
def test_a_scaler_of_a_power_of_two_changes_no_bit(kind: Any, dtype: torch.dtype, options: dict[str, Any]) -> None:
    (plain, its), (scaled, other) = make(kind, dtype, options), make(kind, dtype, options)
    train(plain, its, range(2))
    train(scaled, other, range(2), torch.amp.GradScaler("cpu", init_scale=256.0))
    for (name, one), two in zip(plain.named_parameters(), scaled.parameters(), strict=True):
        assert torch.equal(one, two), name


@pytest.mark.parametrize("state", ["fp32", "compact", "8bit"])
def test_a_compiled_model_trains_the_same(state: str) -> None:
    (plain, its), (compiled, other) = (make(AdamW, torch.bfloat16, {"state": state}) for _ in range(2))
    train(plain, its, range(2))
    train(torch.compile(compiled, backend="aot_eager"), other, range(2))  # type: ignore[arg-type]
    for (name, one), two in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=2e-2, atol=2e-2, msg=name)
