"""Which training steps are captured as CUDA graphs; those that cannot be are left as they were, with the reason.

Without a GPU the logic is driven by noted_cuda.py. Tests marked `gpu` use real graphs.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from kernel_pytorch._optimize.changes import Changes
from kernel_pytorch._optimize.patterns import graphs as pattern
from kernel_pytorch.optimization_patterns import model_state, step_capture
from step_graph_pairs import Model, Pair, step_device  # noqa: F401
from torch import Tensor, nn

import kernel_pytorch


def test_what_stands_in_the_way_is_named(device: str) -> None:
    pair = Pair(device).captured()
    replays = pair.counts("replays")

    def plainly(words: str) -> None:
        pair.step()
        assert pair.counts("replays") == replays and words in pair.graphs.statistics()["last_reason"]

    seen: list[Any] = []
    handle = pair.model.inner.register_forward_hook(lambda *_: seen.append(1))
    plainly("has hooks")
    assert seen
    handle.remove()
    handle = pair.model.embed.weight.register_hook(lambda gradient: gradient)
    plainly("a parameter has hooks")
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    plainly("hooks on all modules")
    handle.remove()
    with torch.autograd.graph.save_on_cpu():
        plainly("saved for backward")
    with torch.autograd.set_detect_anomaly(True):
        plainly("anomaly")
    pair.step()
    assert pair.counts("replays") == replays + 1


class Waits(Model):
    def forward(self, ids: Tensor, labels: Tensor | None = None, scale: float = 1.0) -> dict[str, Any]:
        output = super().forward(ids, labels, scale)
        return output if output["logits"].sum().item() < 1e9 else {**output, "loss": output["loss"] * 2}


class Throws(Model):
    def forward(self, ids: Tensor, labels: Tensor | None = None, scale: float = 1.0) -> dict[str, Any]:
        if self.calls >= 4:
            raise RuntimeError("not while capturing")
        return super().forward(ids, labels, scale)


class Stranger(Model):
    def __init__(self) -> None:
        super().__init__()
        self.held = [torch.ones(16, requires_grad=True)]

    def forward(self, ids: Tensor, labels: Tensor | None = None, scale: float = 1.0) -> dict[str, Any]:
        output = super().forward(ids, labels, scale)
        if self.held[0].device != ids.device:
            self.held[0] = torch.ones(16, device=ids.device, requires_grad=True)
        return {**output, "loss": output["loss"] * self.held[0].sum()}


class Object(Model):
    def forward(self, ids: Tensor, labels: Tensor | None = None, scale: float = 1.0) -> dict[str, Any]:
        return {**super().forward(ids, labels, scale), "tag": object()}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Waits, "waits for the device in aten::_local_scalar_dense"),
        (Throws, "cannot be captured: not while capturing"),
        (Stranger, "no parameter of it wants a gradient"),
        (Object, "returns a object"),
    ],
)
def test_what_cannot_be_captured_runs_as_it_is(device: str, kind: type[Model], words: str) -> None:
    pair = Pair(device, kind())
    pair.plain.calls = -100
    pair.step()
    pair.step() if kind is not Throws else None
    if kind is Throws:
        pair.model.calls = 2  # two runs to try it out, then the capture
        ids = pair.ids()
        with pytest.raises(RuntimeError, match="not while capturing"):  # it shows again in the ordinary call
            pair.graphs(ids, labels=ids)
        pair.model.calls = -100
    pair.step()
    statistics = pair.graphs.statistics()
    assert statistics["graphs"] == 0 and any(words in reason for reason in statistics["refusals"])
    if device == "cuda":  # captures, random numbers and memory still work
        assert float(torch.rand(1000, device=device).mean()) == pytest.approx(0.5, abs=0.1)
        Pair(device).captured()


class Counts(Model):
    """Asks the device for something that no input has to do with, as transformers does for its masks."""

    def forward(self, ids: Tensor, labels: Tensor | None = None, scale: float = 1.0) -> dict[str, Any]:
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        in_order = (positions.diff() == 1).all()
        mixed = torch.zeros(3, device=ids.device)
        if in_order and not bool((mixed + 1 < 0).any()):
            scale = 2 * scale
        return super().forward(ids, labels, scale)


class Mixes(Counts):
    """Constants that an input was written into."""

    def forward(self, ids: Tensor, labels: Tensor | None = None, scale: float = 1.0) -> dict[str, Any]:
        mixed = torch.zeros(3, device=ids.device)
        mixed[0] = ids[0, 0]
        return super().forward(ids, labels, scale if bool((mixed < 25).all()) else 3 * scale)


def test_a_number_made_of_constants_is_asked_for_once(device: str) -> None:
    pair = Pair(device, Counts())
    for _ in range(4):
        pair.step()
        pair.clear()
    assert pair.counts("replays") == 3, pair.graphs.statistics()
    pair = Pair(device, Mixes())
    for _ in range(4):
        pair.step()
        pair.clear()
    assert pair.counts("replays") == 0 and "waits for the device" in pair.graphs.statistics()["last_reason"]


def test_a_step_that_is_not_captured_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its inputs' memory is given back: the stream of the trial may still read it."""
    waits: list[object] = []

    class Stream:
        def wait_stream(self, other: object) -> None:
            waits.append(other)

    mine, other = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: mine)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    model = Waits()
    step = step_capture.StepRunner(lambda inputs: model(*inputs), [torch.zeros(2, 3, dtype=torch.int64)], [])
    monkeypatch.setattr(step, "whole", lambda wanted: step.forward())
    with pytest.raises(step_capture.CannotCapture, match="waits for the device"):
        step_capture._try_out(step, (), torch.device("cpu"), other)
    assert waits == [mine, other]


def test_hugging_face_masks_are_those_of_the_ordinary_call(device: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50, n_positions=16, use_cache=False)
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    pair = Pair(device, transformers.GPT2LMHeadModel(config))
    for _ in range(4):
        pair.step()
        pair.clear()
    assert pair.counts("replays") == 3, pair.graphs.statistics()
    ids = pair.ids()
    output = pair.graphs(input_ids=ids, labels=ids)
    assert type(output).__name__ == "CausalLMOutputWithCrossAttentions" and output.loss is output["loss"]


def test_an_interrupt_while_capturing_leaves_all_as_it_was(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(device, Model(norm=True))
    pair.step()
    before, state = copy.deepcopy(pair.model.state_dict()), torch.get_rng_state()

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    ids = pair.ids()
    with monkeypatch.context() as patch:
        patch.setattr(step_capture, "_check_leaves", interrupted)
        torch.set_rng_state(state)
        with pytest.raises(KeyboardInterrupt):
            pair.graphs(ids, labels=ids)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in pair.model.state_dict().items():
        torch.testing.assert_close(value, before[name])
    pair.step()
    assert pair.counts("replays") == 1


def test_the_pattern_on_a_model(device: str) -> None:
    """As optimize applies it: a copy has graphs of its own, torch.compile leaves it alone, undoing frees memory."""
    pair = Pair(device)
    changes = Changes()
    change = pattern._training_change(pair.model)
    changes.apply(change)
    ids = pair.ids()
    for _ in range(3):
        ours, theirs = pair.model(ids, labels=ids), pair.plain(ids, labels=ids)
        torch.testing.assert_close(ours["loss"], theirs["loss"])
        ours["loss"].backward()
        theirs["loss"].backward()
    pair.compare()
    runner = pair.model.__dict__[pattern._KEY].runner
    assert runner.statistics()["replays"] == 2
    assert pattern.graph_bytes(pair.model) == runner.statistics()["graph_bytes"] > 0
    twin = copy.deepcopy(pair.model)
    assert twin.__dict__[pattern._KEY].runner is None
    twin.zero_grad()
    twin(ids, labels=ids)["loss"].backward()
    assert twin.__dict__[pattern._KEY].runner is not runner
    compiled = torch.compile(pair.model, backend="eager")
    pair.clear()
    output = compiled(ids, labels=ids)
    output["loss"].backward()
    assert runner.statistics()["replays"] == 3  # the compiled model replays, too
    del output
    changes.release()
    assert pattern.graph_bytes(pair.model) == 0
    changes.undo_all()
    assert "forward" not in pair.model.__dict__ and pattern._KEY not in pair.model.__dict__


def test_finding_says_why_not(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel_pytorch._optimize.sites import Call, Proposal, Refusal

    ids = torch.randint(50, (2, 5), device=device)
    call = Call((ids,), {"labels": ids})
    assert isinstance(pattern._find_for_training(torch.device(device), "", Model().to(device), call), Proposal)
    found = pattern._find_for_training(torch.device(device), "", Waits().to(device), call)
    assert isinstance(found, Refusal) and "waits for the device" in found.reason
    monkeypatch.setattr(pattern, "_host_share", lambda step, device: 0.2)
    found = pattern._find_for_training(torch.device(device), "", Model().to(device), call)
    assert isinstance(found, Refusal) and "in 20% of its time" in found.reason
    monkeypatch.setattr(pattern, "_host_share", lambda step, device: 1.0)
    hooked = Model().to(device)
    hooked.inner.register_forward_hook(lambda *_: None)
    found = pattern._find_for_training(torch.device(device), "", hooked, call)
    assert isinstance(found, Refusal) and "has hooks" in found.reason
    assert "forward" not in hooked.__dict__ and pattern._KEY not in hooked.__dict__


def test_subclasses_of_parameters_are_refused() -> None:
    class Other(nn.Parameter):
        pass

    layer = nn.Linear(3, 3)
    layer.weight = Other(torch.ones(3, 3))
    assert "a parameter is a Other" in model_state.state_of(layer).obstacle


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimize_for_training_replays_graphs(dtype: torch.dtype) -> None:
    """Many small launches: the graph pays, and a run by it equals one by a copy of the model."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(24)]).cuda().train()
    plain = copy.deepcopy(model)
    x = torch.randn(32, 64, device="cuda")

    def context() -> Any:
        return torch.autocast("cuda", dtype=dtype, enabled=dtype is not torch.float32)

    with context():
        result = kernel_pytorch.optimize(model, x, "train", budget_seconds=10)
    replaced = [entry["pattern"] for entry in result.report.data["replacements"]]
    assert "cuda graph" in replaced, result.report.data["refusals"]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, plain)]
    for _ in range(6):
        x = torch.randn(32, 64, device="cuda")
        losses = []
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            with context():
                loss = m(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    assert pattern.graph_bytes(model) > 0
    held = torch.cuda.memory_reserved()
    result.restore()
    assert pattern._KEY not in model.__dict__ and "forward" not in model.__dict__
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < held
