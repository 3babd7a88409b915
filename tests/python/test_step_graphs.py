"""Training steps as CUDA graphs: gradients and outputs equal the ordinary ones, whatever order calls come in.

Without a GPU the logic is driven by a small graph of our own (test_pygraph.py): the ops of a call are noted and run
again into the same memory, as a CUDA graph does. Tests marked `gpu` use the real ones.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as torch_functional
from kernel_pytorch._optimize.changes import Changes
from kernel_pytorch._optimize.patterns import graphs as pattern
from kernel_pytorch.optimization_patterns import capturing, model_state, step_capture, step_graphs
from kernel_pytorch.optimization_patterns.step_graphs import StepGraphs
from test_pygraph import NotedCuda
from torch import Tensor, nn

import kernel_pytorch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device, with noted graphs on the CPU."""
    if request.param == "cpu":
        monkeypatch.setattr(step_graphs, "place_of", lambda tensors, state: (torch.device("cpu"), ""))
        monkeypatch.setattr(capturing, "uncached_autocast", contextlib.nullcontext)
        for name in (
            "CUDAGraph",
            "Stream",
            "Event",
            "graph",
            "current_stream",
            "memory_reserved",
            "device",
            "stream",
            "synchronize",
            "empty_cache",
            "set_stream",
            "graph_pool_handle",
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(NotedCuda, name))
    yield request.param


class Model(nn.Module):
    """A loss and what it was computed from, as Hugging Face's models return them."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16))
        self.norm = nn.BatchNorm1d(16) if norm else nn.LayerNorm(16)
        self.unused = nn.Parameter(torch.zeros(3))
        self.calls = 0

    def forward(self, ids: Tensor, labels: Tensor | None = None, scale: float = 1.0) -> dict[str, Any]:
        self.calls += 1
        x = self.embed(ids)
        x = x + self.inner(x)
        x = self.norm(x.flatten(0, 1)).view(x.shape)
        logits = x @ self.embed.weight.T * scale
        loss = None if labels is None else torch_functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits, "tag": None}


class Pair:
    """A model by graphs and its twin as it is."""

    def __init__(self, device: str, model: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.plain = (model or Model()).to(device).train()
        self.model = copy.deepcopy(self.plain)
        self.graphs = StepGraphs(self.model, type(self.model).forward)
        self.device = device

    def ids(self, *shape: int) -> Tensor:
        return torch.randint(50, shape or (4, 8), device=self.device)

    def both(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self.graphs(*args, **kwargs), self.plain(*args, **kwargs)

    def step(self, ids: Tensor | None = None, factor: float = 1.0) -> None:
        """One step of both, compared; gradients stay."""
        ids = self.ids() if ids is None else ids
        ours, theirs = self.both(ids, labels=ids)
        torch.testing.assert_close(ours["logits"], theirs["logits"])
        torch.testing.assert_close(ours["loss"], theirs["loss"])
        for output in (ours, theirs):
            (factor * output["loss"]).backward()
        self.compare()

    def compare(self) -> None:
        for (name, ours), theirs in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)

    def clear(self) -> None:
        for model in (self.model, self.plain):
            model.zero_grad(set_to_none=True)

    def captured(self) -> Pair:
        """After the two steps that lead to a graph."""
        for _ in range(2):
            self.step()
            self.clear()
        assert self.counts("graphs") == 1 and self.counts("replays") >= 1
        return self

    def counts(self, name: str) -> int:
        return int(self.graphs.statistics()[name])


def test_a_training_run_equals_the_ordinary_one(device: str) -> None:
    pair = Pair(device)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (pair.model, pair.plain)]
    calls = 0
    for index in range(8):
        pair.step(factor=1.0 + index)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        calls = pair.model.calls if index == 1 else calls
    statistics = pair.graphs.statistics()
    assert statistics["captures"] == 1 and statistics["replays"] == 7 and statistics["recomputed_backwards"] == 0
    assert pair.model.calls == calls  # nothing ran but the graphs
    assert statistics["graph_bytes"] > 0 and statistics["refusals"] == []


def test_gradients_add_up_and_are_nobody_elses_memory(device: str) -> None:
    pair = Pair(device).captured()
    held = []
    for _ in range(3):  # without clearing them
        pair.step()
        held.append((pair.model.embed.weight.grad, pair.model.embed.weight.grad.clone()))
    pair.clear()
    pair.step()
    first = held[0][0]  # accumulated in place by autograd, and untouched by the later replays
    torch.testing.assert_close(first, held[-1][1])
    outputs = [pair.graphs(ids, labels=ids) for ids in (pair.ids(), pair.ids())]
    kept = [output["logits"].clone() for output in outputs]
    pair.step()
    for output, logits in zip(outputs, kept, strict=True):
        assert torch.equal(output["logits"], logits)


def test_two_forwards_before_a_backward(device: str) -> None:
    pair = Pair(device).captured()
    ids = [pair.ids() for _ in range(3)]
    losses = [[model(one, labels=one)["loss"] for one in ids] for model in (pair.graphs, pair.plain)]
    assert pair.counts("replays") == 2  # the second and third run as they are
    for ours, theirs in zip(*losses, strict=True):
        ours.backward()
        theirs.backward()
    pair.compare()
    replays = pair.counts("replays")
    pair.step()
    assert pair.counts("replays") == replays + 1
    # A forward that nobody will go back from is forgotten with its output.
    dropped = pair.graphs(ids[0], labels=ids[0])
    assert pair.counts("replays") == replays + 2
    del dropped
    gc.collect()
    pair.step()
    assert pair.counts("replays") == replays + 3


def test_a_graph_kept_by_autograd_and_other_outputs(device: str) -> None:
    pair = Pair(device).captured()
    ids = pair.ids()
    ours, theirs = pair.both(ids, labels=ids)
    for output in (ours, theirs):
        output["loss"].backward(retain_graph=True)
        output["loss"].backward(retain_graph=True)
        output["logits"].square().mean().backward()
    pair.compare()
    assert pair.counts("recomputed_backwards") == 2
    pair.clear()
    pair.captured()
    ours, theirs = pair.both(ids, labels=ids)
    for output, model in ((ours, pair.model), (theirs, pair.plain)):  # a second derivative
        (gradient,) = torch.autograd.grad(output["loss"], [model.embed.weight], create_graph=True)
        (output["loss"] + gradient.square().sum()).backward()
    pair.compare()


def test_outputs_that_take_turns_are_left_alone(device: str) -> None:
    pair = Pair(device)
    ids = pair.ids()
    for index in range(14):
        for model in (pair.graphs, pair.plain):
            output = model(ids, labels=ids)
            (output["loss"] if index % 3 else output["logits"].square().mean()).backward()
        pair.compare()
        pair.clear()
    assert any("other outputs" in reason for reason in pair.graphs.statistics()["refusals"])


def test_kinds_of_calls_have_graphs_of_their_own(device: str) -> None:
    pair = Pair(device)
    for shape in ((4, 8), (2, 8), (4, 8), (2, 8), (4, 8), (2, 8)):
        pair.step(pair.ids(*shape))
    assert pair.counts("graphs") == 2 and pair.counts("replays") == 4
    ids = pair.ids()
    for scale in (2.0, 2.0, 3.0):
        ours, theirs = pair.both(ids, labels=ids, scale=scale)
        torch.testing.assert_close(ours["loss"], theirs["loss"])
        for output in (ours, theirs):
            output["loss"].backward()
    pair.compare()
    for model in (pair.model, pair.plain):
        model.inner[0].weight.requires_grad_(False)
    pair.clear()
    for _ in range(3):
        pair.step()
    assert pair.model.inner[0].weight.grad is None
    for model in (pair.model, pair.plain):
        model.eval()
    replays = pair.counts("replays")
    pair.step()  # another mode: seen for the first time
    assert pair.counts("replays") == replays
    with torch.no_grad():
        assert pair.graphs(ids)["logits"].grad_fn is None and pair.counts("replays") == replays


def test_the_graph_used_longest_ago_goes_first(device: str) -> None:
    pair = Pair(device)
    pair.graphs.max_graphs = 2
    for length in (1, 2, 3):
        for _ in range(2):
            pair.step(pair.ids(2, length))
    assert pair.counts("graphs") == 2 and pair.counts("evictions") == 1
    pair.step(pair.ids(2, 1))
    assert pair.counts("captures") == 4
    pair.graphs.clear()
    assert pair.counts("graphs") == 0 and pair.counts("graph_bytes") == 0


def test_weights_are_read_where_they_lie(device: str) -> None:
    pair = Pair(device).captured()
    with torch.no_grad():
        for model in (pair.model, pair.plain):
            model.embed.weight.mul_(2)  # seen by the next replay
    pair.step()
    assert pair.counts("recaptures") == 0
    moved = torch.randn(50, 16, device=device)
    for model in (pair.model, pair.plain):
        model.embed.weight.data = moved.clone()
    pair.clear()
    pair.step()
    assert pair.counts("recaptures") == 1 and pair.counts("captures") == 2
    ids = pair.ids()
    loss = pair.graphs(ids, labels=ids)["loss"]
    with torch.no_grad():
        pair.model.embed.weight.mul_(2)
    with pytest.raises(RuntimeError, match="written to between this forward and its backward"):
        loss.backward()


def test_buffers_are_written_once_a_step(device: str) -> None:
    pair = Pair(device, Model(norm=True))
    for _ in range(4):
        pair.step()
        torch.testing.assert_close(pair.model.norm.running_mean, pair.plain.norm.running_mean)
    assert pair.counts("replays") == 3
    ids = pair.ids()
    ours, theirs = pair.both(ids, labels=ids)
    for output in (ours, theirs):
        output["loss"].backward(retain_graph=True)
        output["loss"].backward()
    pair.compare()
    torch.testing.assert_close(pair.model.norm.running_var, pair.plain.norm.running_var)


def test_dropout_draws_anew_and_backward_again_draws_the_same(device: str) -> None:
    pair = Pair(device, Model(dropout=0.5))
    ids = pair.ids()
    losses = []
    for _ in range(5):
        output = pair.graphs(ids, labels=ids)
        output["loss"].backward()
        losses.append(output["loss"].item())
    assert pair.counts("replays") == 4 and len(set(losses)) == 5
    pair.clear()
    output = pair.graphs(ids, labels=ids)
    output["loss"].backward(retain_graph=True)
    once = pair.model.embed.weight.grad.clone()
    output["loss"].backward()  # computed again, with the numbers of that forward
    torch.testing.assert_close(pair.model.embed.weight.grad, 2 * once)

    def run() -> list[float]:
        torch.manual_seed(5)
        found = []
        for _ in range(3):
            output = pair.graphs(ids, labels=ids)
            output["loss"].backward()
            found.append(output["loss"].item())
        return found

    assert run() == run()  # the same seed, the same numbers


def test_the_generator_is_as_if_nothing_had_been_captured(device: str) -> None:
    """The call that captures draws what it would have drawn as it is: warming up takes nobody's numbers."""
    pair = Pair(device, Model(dropout=0.5))
    ids = pair.ids()
    found = []
    for model in (pair.graphs, pair.plain):
        torch.manual_seed(3)
        for _ in range(2):
            output = model(ids, labels=ids)
            output["loss"].backward()
        found.append((output["loss"].item(), float(torch.rand(1, device=device))))
    assert pair.counts("replays") == 1
    assert found[0] == pytest.approx(found[1], rel=1e-5)


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


def test_threads_do_not_mix_their_steps(device: str) -> None:
    pair = Pair(device).captured()
    ids = [pair.ids() for _ in range(6)]
    found: dict[int, Tensor] = {}

    def work(index: int) -> None:
        for _ in range(3):
            loss = pair.graphs(ids[index], labels=ids[index])["loss"]
            (found[index],) = torch.autograd.grad(loss, [pair.model.embed.weight])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, gradient in found.items():
        loss = pair.plain(ids[index], labels=ids[index])["loss"]
        (expected,) = torch.autograd.grad(loss, [pair.plain.embed.weight])
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


def test_an_input_that_wants_a_gradient(device: str) -> None:
    layer = nn.Linear(8, 8, bias=False).to(device)
    graphs = StepGraphs(layer, type(layer).forward)
    for index in range(4):
        x = torch.randn(3, 8, device=device, requires_grad=True)
        other = x.detach().clone().requires_grad_()
        gradient = torch.randn(3, 8, device=device)
        (2 * graphs(2 * x)).backward(gradient)
        ours, layer.weight.grad = layer.weight.grad, None
        (2 * layer(2 * other)).backward(gradient)
        torch.testing.assert_close(x.grad, other.grad)
        torch.testing.assert_close(ours, layer.weight.grad)
        layer.weight.grad = None
        assert graphs.statistics()["replays"] == index


def test_copies_keep_padded_rows() -> None:
    base = torch.randn(6, 24)
    for tensor in (base[:, :21], base, base[:, :3], base.T, base[2, 3], base[:0, :5], base[:, ::2]):
        made = step_capture.duplicate(tensor)
        assert torch.equal(made, tensor) and made.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
    assert step_capture.duplicate(base[:, :21]).stride() == (24, 1)
    assert step_capture.duplicate(base[:, :3]).stride() == (3, 1)


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
