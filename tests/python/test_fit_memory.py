"""fit_memory: gradients of the plain model, bit for bit; predicted and measured peaks; and what must stay as it was."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_pytorch.advanced_memory import MemoryFit, fit_memory
from kernel_pytorch.advanced_memory._step import find_blocks, parse_bytes
from memory_models import Block, Convolutions, Model, OwnBlock, gradients, tokens_for
from torch import Tensor, nn

import kernel_pytorch

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "torch": (lambda: Model([Block() for _ in range(4)]), tokens_for),
    "dropout": (lambda: Model([Block(dropout=0.1) for _ in range(3)]), tokens_for),
    "in place": (lambda: Model([Block(in_place=True) for _ in range(3)]), tokens_for),
    "own ops": (lambda: Model([OwnBlock() for _ in range(3)]), tokens_for),
    "two kinds": (lambda: Model([Block(), OwnBlock(), Block(), OwnBlock()]), tokens_for),
    "convolutions": (lambda: nn.Sequential(*(Convolutions() for _ in range(3))), lambda: torch.ones(2, 8, 12, 12)),
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]
    return model(), inputs()


@functools.cache
def peaks(name: str) -> tuple[int, int]:
    """The smallest peak of a plan, and that of everything kept."""
    model, inputs = made(name)
    with fit_memory(model, inputs, "1TiB") as fit:
        assert fit.predicted_peak == fit.everything_peak
        assert set(fit.plan["blocks"][0]["treatments"]) <= {"keep", "none"}
        return int(fit.plan["least_bytes"]), fit.everything_peak


def between(name: str, share: float) -> int:
    least, most = peaks(name)
    return int(least + share * (most - least)) + 1024


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_plain_model_and_peaks_are_as_predicted(name: str) -> None:
    model, inputs = made(name)
    exact = gradients(model, inputs)
    for budget in (between(name, 0.25), between(name, 0.6)):
        with fit_memory(model, inputs, budget) as fit:
            assert fit.predicted_peak <= budget
            assert fit.measured_peak == pytest.approx(fit.predicted_peak, rel=0.02)
            for _ in range(2):
                for mine, plain in zip(gradients(model, inputs), exact, strict=True):
                    assert torch.equal(mine, plain)
            assert not fit.other_paths


@pytest.mark.parametrize(("move", "recompute"), [(True, False), (False, True)])
def test_each_treatment_alone(move: bool, recompute: bool) -> None:
    model, inputs = made("torch")
    exact = gradients(model, inputs)
    budget = between("torch", 0.5)
    with fit_memory(model, inputs, budget, move=move, recompute=recompute) as fit:
        used = {key: sum(block[key] for block in fit.treatments.values()) for key in ("move", "recompute")}
        assert (used["move"] > 0) == move and (used["recompute"] > 0) == recompute
        assert (fit.slab_bytes > 0) == move
        assert fit.measured_peak == pytest.approx(fit.predicted_peak, rel=0.02)
        for mine, plain in zip(gradients(model, inputs), exact, strict=True):
            assert torch.equal(mine, plain)


def small_fit(name: str = "torch", share: float = 0.25) -> tuple[nn.Module, Tensor, MemoryFit]:
    model, inputs = made(name)
    return model, inputs, fit_memory(model, inputs, between(name, share))


def test_the_model_is_as_it_was_but_for_its_memory() -> None:
    model, inputs = made("dropout")
    seen: list[str] = []
    model.blocks[1].register_forward_hook(lambda *_: seen.append("hook"))
    before, state = dict(model.blocks[1].__dict__), torch.get_rng_state()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    fit = fit_memory(model, inputs, between("dropout", 0.25))
    assert torch.equal(torch.get_rng_state(), state), "measuring draws no random numbers of the caller"
    assert model.state_dict().keys() == values.keys()
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items()), "nor counts calls"
    assert all(parameter.grad is None for parameter in model.parameters())
    seen.clear()
    gradients(model, inputs)
    assert seen == ["hook"], "hooks run once a step: what is made again is ops, not modules"
    assert float(model.blocks[1].calls) == 1
    copied = copy.deepcopy(model)
    assert not isinstance(copied.blocks[1].forward, type(model.blocks[1].forward))
    assert copied.blocks[1].forward.__self__ is copied.blocks[1]
    loaded = pickle.loads(pickle.dumps(model.blocks[0]))
    assert loaded.forward.__self__ is loaded
    with torch.no_grad():
        model(inputs)
    fit.remove()
    assert model.blocks[1].__dict__.keys() == before.keys()
    fit.install()
    fit.remove()
    fit.remove()


def test_graphs_may_be_kept_dropped_and_accumulated() -> None:
    model, inputs, fit = small_fit()
    fit.remove()
    first = model(inputs).square().mean()
    plain = torch.autograd.grad(first, list(model.parameters()))
    fit.install()
    loss = model(inputs).square().mean()
    for retain in (True, False):
        for mine, theirs in zip(
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=retain), plain, strict=True
        ):
            assert torch.equal(mine, theirs)
    del loss
    model(inputs)  # its graph is dropped without a backward: the places on the host are free again
    gc.collect()
    losses = [model(inputs).square().mean() for _ in range(2)]  # the second finds the places taken and keeps
    sum(losses).backward()
    for parameter, theirs in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * theirs)
    fit.remove()


def test_nothing_keeps_a_model_alive() -> None:
    model, inputs, fit = small_fit()
    model(inputs).sum().backward()
    parameter = weakref.ref(model.blocks[0].gate.weight)
    del model, fit
    gc.collect()
    assert parameter() is None


def test_other_lengths_and_other_paths_are_right() -> None:
    model, inputs, fit = small_fit()
    shorter = inputs[:1, :40]
    fit.remove()
    exact = gradients(model, shorter)
    fit.install()
    for mine, plain in zip(gradients(model, shorter), exact, strict=True):
        assert torch.equal(mine, plain)
    assert not fit.other_paths
    model.blocks[2].in_place = True  # another op where the plan expects one
    mine = gradients(model, inputs)
    fit.remove()
    for one, plain in zip(mine, gradients(model, inputs), strict=True):
        assert torch.equal(one, plain)


def test_autocast_and_double_backward() -> None:
    model, inputs = made("torch")

    def step() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(inputs).float().square().mean()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    exact = step()
    wrapped: Any = lambda output: output.float().square().mean()  # noqa: E731
    with fit_memory(model, inputs, between("torch", 0.3), loss=wrapped):
        for mine, plain in zip(step(), exact, strict=True):
            assert torch.equal(mine, plain)
    chain = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))
    x = torch.randn(64, 32, requires_grad=True)

    def penalty() -> Tensor:
        (inner,) = torch.autograd.grad(chain(x).sum(), x, create_graph=True)
        return torch.autograd.grad(inner.square().sum(), chain[0][0].weight)[0]

    plain = penalty()
    with fit_memory(chain, x, "1GiB") as fit:
        budget = (fit.plan["least_bytes"] + fit.everything_peak) // 2
    with fit_memory(chain, x, budget):
        torch.testing.assert_close(penalty(), plain)


def test_a_parameter_changed_before_backward_is_refused() -> None:
    model, inputs, fit = small_fit()
    with fit:
        loss = model(inputs).square().mean()
        with torch.no_grad():
            for block in model.blocks:
                for parameter in block.parameters():
                    parameter.mul_(1.5)
        with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace"):
            loss.backward()


def test_released_gradients_leave_more_room() -> None:
    model, inputs = made("torch")
    optimizer = kernel_pytorch.optim.SGD(model.parameters(), lr=0.0)
    stepped: list[Tensor] = []
    with kernel_pytorch.optim.release_gradients(optimizer):
        model.head.weight.register_post_accumulate_grad_hook(stepped.append)
        with (
            fit_memory(model, inputs, "1GiB") as kept,
            fit_memory(model, inputs, "1GiB", gradients="released") as freed,
        ):
            assert freed.predicted_peak < kept.predicted_peak
            assert freed.measured_peak == pytest.approx(freed.predicted_peak, rel=0.02)
        assert freed.plan["least_bytes"] < kept.plan["least_bytes"] - 0.5 * sum(p.nbytes for p in model.parameters())
        assert not stepped, "measuring steps no parameter"
        model(inputs).sum().backward()
        assert len(stepped) == 1, "and the hooks are there again"
    with pytest.raises(ValueError, match='"kept" or "released"'):
        fit_memory(model, inputs, "1GiB", gradients="lost")


def test_refusals_say_what_would_help() -> None:
    model, inputs = made("torch")
    with pytest.raises(MemoryError, match=r"smallest peak is .* MiB, the budget 1\.00 KiB"):
        fit_memory(model, inputs, "1KiB")
    assert "forward" not in model.blocks[0].__dict__
    for text, message in (("40 apples", "40GiB"), ("GiB", "40GiB"), (-1, "from 0 on")):
        with pytest.raises(ValueError, match=message):
            fit_memory(model, inputs, text)
    with pytest.raises(ValueError, match="give a budget"):
        fit_memory(model, inputs)
    with pytest.raises(ValueError, match="evaluation mode"):
        fit_memory(model.eval(), inputs, "1GiB")
    assert parse_bytes("1.5 KiB") == 1536 and parse_bytes("2GB") == 2 * 10**9


@pytest.mark.parametrize("kind", [nn.Tanh, nn.GELU, nn.Sigmoid, nn.ReLU])
def test_peaks_hold_where_a_block_needs_its_own_output(kind: Any) -> None:
    """A tanh's backward holds its result, which is the next block's input: that cannot leave."""
    torch.manual_seed(0)
    chain = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), kind()) for _ in range(5)))
    x = torch.randn(256, 64)
    with fit_memory(chain, x, "1GiB") as free:
        least, most = int(free.plan["least_bytes"]), free.everything_peak
    for share in (0.7, 0.3, 0.0):
        with fit_memory(chain, x, int(least + share * (most - least))) as fit:
            assert abs(fit.measured_peak / fit.predicted_peak - 1) < 0.05, fit


def test_a_block_that_is_called_twice_is_left_alone() -> None:
    block = Block()
    model = Model([block, Block(), block])
    exact = gradients(model, tokens_for())
    with fit_memory(model, tokens_for(), "1GiB") as fit:
        assert fit.blocks == ["blocks.1"]
        for mine, plain in zip(gradients(model, tokens_for()), exact, strict=True):
            assert torch.equal(mine, plain)


def test_blocks_are_found_or_named() -> None:
    assert list(find_blocks(Model([Block(), Block()]))) == ["blocks.0", "blocks.1"]
    assert list(find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))) == ["0", "1"]
    model, inputs = made("torch")
    with fit_memory(model, inputs, "1GiB", blocks=["blocks.2"], loss=lambda y: F.relu(y).sum()) as fit:
        assert fit.blocks == ["blocks.2"] and "1 blocks" in str(fit)
    assert kernel_pytorch.fit_memory is fit_memory


def test_float8_is_asked_for_and_tells_its_error() -> None:
    model, inputs = made("torch")
    exact = gradients(model, inputs)
    budget = between("torch", 0.5)
    with pytest.raises(MemoryError):
        fit_memory(model, inputs, budget, move=False, recompute=False)
    with fit_memory(model, inputs, budget, move=False, recompute=False, float8=True) as fit:
        assert fit.measured_peak == pytest.approx(fit.predicted_peak, rel=0.02)
        assert 0.005 < fit.float8_error < 0.05 and "FP8" in str(fit), "E4M3 has three bits behind the point"
        found = gradients(model, inputs)
    assert any(not torch.equal(mine, plain) for mine, plain in zip(found, exact, strict=True))
    for mine, plain in zip(found, exact, strict=True):
        assert float((mine - plain).norm()) <= 0.1 * float(plain.norm()) + 1e-7
    with fit_memory(model, inputs, budget, recompute=False, float8=True) as fit:
        assert fit.slab_bytes > 0
        for mine, plain in zip(gradients(model, inputs), exact, strict=True):
            assert float((mine - plain).norm()) <= 0.1 * float(plain.norm()) + 1e-7


def test_an_encoder_and_decoder_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16, "decoder_start_token_id": 0}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=50, **sizes)).train()
    sample = {"input_ids": tokens_for(length=48), "labels": tokens_for(length=32)}

    def step() -> list[Tensor]:
        torch.manual_seed(1)  # it drops out
        return list(torch.autograd.grad(model(**sample).loss, list(model.parameters()), allow_unused=True))

    exact = step()
    with fit_memory(model, sample, "1GiB") as fit:
        budget = (fit.plan["least_bytes"] + fit.everything_peak) // 2
    with fit_memory(model, sample, budget) as fit:
        assert fit.measured_peak <= 1.02 * fit.predicted_peak
        for mine, plain in zip(step(), exact, strict=True):
            assert (mine is None and plain is None) or torch.equal(mine, plain)
