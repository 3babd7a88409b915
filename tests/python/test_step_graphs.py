"""Training steps as CUDA graphs: gradients and outputs equal the ordinary ones, whatever order calls come in.

Without a GPU the logic is driven by noted_cuda.py. Tests marked `gpu` use real graphs.
"""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from kernel_pytorch.optimization_patterns import step_capture
from kernel_pytorch.optimization_patterns.step_graphs import StepGraphs
from step_graph_pairs import Model, Pair, step_device  # noqa: F401
from torch import Tensor, nn


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
