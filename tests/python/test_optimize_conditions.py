"""`optimize` on models built in unusual ways: each is optimised with everything kept that verifies, and then copied,
pickled, saved, loaded, moved, changed and called in other ways as the original would be."""

from __future__ import annotations

import copy
import io
import pickle
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from forced_clock import everything_is_kept
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import kernel_pytorch

DIM = 32
Pair = namedtuple("Pair", "hidden total")


@pytest.fixture(autouse=True)
def everything_pays() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with everything_is_kept():
        yield
    torch.set_num_threads(threads)


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(DIM, 48), nn.Linear(DIM, 48), nn.Linear(48, DIM)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(functional.silu(self.gate(x)) * self.up(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = (layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(DIM), Attention(), nn.LayerNorm(DIM), Mlp(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(64, DIM), Block(), nn.Linear(DIM, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.embed(ids)))


class Twice(nn.Module):
    """One module in two places, and with two shapes in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.again = self.first
        self.norm = nn.RMSNorm(DIM, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.first(x))
        return self.norm(x) + self.norm(x[:, :1])


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.other = Block(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) if bool(x.mean() > 0) else self.other(x)


class Returning(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block, self.kind = Block(), kind

    def forward(self, *, x: Tensor, scale: float = 1.0, unused: Any = None) -> Any:
        hidden = self.block(x) * scale
        if self.kind == "dict":
            return {"hidden": hidden, "nothing": unused, "count": 3}
        if self.kind == "named tuple":
            return Pair(hidden, hidden.sum())
        return [hidden, None, (hidden.mean(), "text")]


class LowRank(nn.Module):
    """A frozen layer with two small ones beside it, as adapters of peft stand in a model."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A, self.lora_B = (
            nn.Linear(base.in_features, 4, bias=False),
            nn.Linear(4, base.out_features, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * 0.5


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        for name in ("q", "v"):
            setattr(self.block.attn, name, LowRank(getattr(self.block.attn, name)))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


def normed(kind: Any) -> nn.Module:
    block = Block()
    kind(block.mlp.gate)
    kind(block.attn.q)
    return block


def x_of(batch: int = 2, length: int = 8) -> Tensor:
    return torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(batch))


def ids_of(batch: int = 2, length: int = 8) -> Tensor:
    return torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(batch))


def named(batch: int = 2, length: int = 8) -> dict[str, Any]:
    return {"x": x_of(batch, length), "scale": 2.0}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "tied": (Tied, ids_of),
    "twice": (Twice, x_of),
    "branching": (Branching, lambda *sizes: x_of(*sizes) + 1),
    "dict": (lambda: Returning("dict"), named),
    "named tuple": (lambda: Returning("named tuple"), named),
    "list": (lambda: Returning("list"), named),
    "weight norm": (lambda: normed(parametrizations.weight_norm), x_of),
    "spectral norm": (lambda: normed(parametrizations.spectral_norm), x_of),
    "adapters": (Adapted, x_of),
    "checkpointed": (Checkpointed, x_of),
}


def call(model: nn.Module, inputs: Any) -> list[Any]:
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return torch.utils._pytree.tree_leaves(output)


def same(found: list[Any], expected: list[Any], tolerance: float = 1e-4) -> None:
    assert [type(one) for one in found] == [type(one) for one in expected]
    for one, other in zip(found, expected):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        else:
            assert one == other


@pytest.mark.parametrize("goal", ["inference", "train"])
@pytest.mark.parametrize("name", MODELS)
def test_behaves_like_the_original(name: str, goal: str) -> None:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model = make().train(goal == "train")
    plain = copy.deepcopy(model)
    if name == "spectral norm":  # each call in training moves its estimate
        model, plain = model.eval(), plain.eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    result = kernel_pytorch.optimize(model, inputs(), goal, budget_seconds=20.0, tune="off")
    assert result.report.data["replacements"], str(result.report)
    assert {key: value.tolist() for key, value in model.state_dict().items()} == {
        key: value.tolist() for key, value in before.items()
    }
    assert [key for key, _ in model.named_parameters()] == [key for key, _ in plain.named_parameters()]

    def agrees(one: nn.Module, other: nn.Module, tolerance: float = 1e-4) -> None:
        with torch.set_grad_enabled(goal == "train"):
            for sizes in ((2, 8), (3, 5), (1, 1)):
                same(call(one, inputs(*sizes)), call(other, inputs(*sizes)), tolerance)

    agrees(model, plain)
    if name == "branching":  # the way that the sample did not go
        same([model(-x_of() - 1)], [plain(-x_of() - 1)])
    if goal == "train":
        for one in (model, plain):
            one.zero_grad()
            sum(leaf.float().square().sum() for leaf in call(one, inputs()) if isinstance(leaf, Tensor)).backward()
        for (key, one), other in zip(model.named_parameters(), plain.parameters()):
            assert (one.grad is None) == (other.grad is None), key
            if one.grad is not None:
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3, msg=key)
            one.grad = other.grad = None
    if name != "weight norm":  # torch refuses to copy or pickle a parametrized module's weight with history
        agrees(copy.deepcopy(model), plain)
        if "norm" not in name:
            agrees(pickle.loads(pickle.dumps(model)), plain)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = make().train(model.training)
    fresh.load_state_dict(torch.load(file))
    agrees(model, fresh)
    with torch.no_grad():  # an optimizer's step, and weights that are loaded
        for one, other in zip(model.parameters(), plain.parameters()):
            one.mul_(1.25)
            other.mul_(1.25)
    agrees(model, plain)
    other = {key: value + 0.01 * value.std() if value.is_floating_point() and value.numel() > 1 else value
             for key, value in before.items()}  # fmt: skip
    model.load_state_dict(other)
    plain.load_state_dict(other)
    agrees(model, plain)
    if name != "tied":  # ids have no type to change

        def cast(inputs_: Any, dtype: torch.dtype) -> Any:
            return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to(dtype), inputs_)

        model.to(torch.bfloat16), plain.to(torch.bfloat16)
        with torch.no_grad():
            same(call(model, cast(inputs(), torch.bfloat16)), call(plain, cast(inputs(), torch.bfloat16)), 0.15)
        model.double(), plain.double()
        with torch.no_grad():
            same(call(model, cast(inputs(), torch.float64)), call(plain, cast(inputs(), torch.float64)), 1e-6)
        model.float(), plain.float()
        agrees(model, plain)
    kernel_pytorch.restore(model)
    with torch.no_grad():
        for one, other in zip(call(model, inputs()), call(plain, inputs())):
            assert not isinstance(one, Tensor) or torch.equal(one, other)


class Stand(nn.Module):
    """What an adapter's library puts in a layer's place: it has its weight too."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.scale = base, nn.Parameter(torch.tensor(0.5))

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.base(x)


ENCODER = nn.TransformerEncoderLayer(DIM, 4, 64, batch_first=True)


@pytest.mark.parametrize(
    "make, names",
    [(Block, ("mlp.up", "mlp.down", "norm2", "attn.k")), (lambda: copy.deepcopy(ENCODER), ("linear1",))],
)
def test_layers_that_others_take_the_place_of(make: Callable[[], nn.Module], names: tuple[str, ...]) -> None:
    x = torch.randn(2, 5, DIM)
    for name in names:
        model = make().eval()
        kernel_pytorch.optimize(model, (x,), budget_seconds=30, tune="off")
        parent, _, last = name.rpartition(".")
        holder = model.get_submodule(parent)
        setattr(holder, last, Stand(getattr(holder, last)))
        found = model(x)
        kernel_pytorch.restore(model)
        torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5)


def test_optimised_in_inference_mode_and_trained() -> None:
    model, x = Block(), torch.randn(2, 5, DIM)
    with torch.inference_mode():
        kernel_pytorch.optimize(model, (x,), budget_seconds=30, tune="off")
        model(x)
    model(x).sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    kernel_pytorch.restore(model)
    model.zero_grad()
    model(x).sum().backward()
    for one, parameter in zip(found, model.parameters()):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-4, atol=1e-5)


def test_dropout_in_training() -> None:
    """Where it drops is torch's: the same numbers from the same seed, in as many calls."""
    torch.manual_seed(0)
    model = Block(0.5).train()
    plain, x = copy.deepcopy(model), x_of()
    result = kernel_pytorch.optimize(model, x, "train", budget_seconds=20.0, tune="off")
    assert result.report.data["replacements"]
    outputs = []
    for one in (model, plain):
        torch.manual_seed(7)
        outputs.append(one(x))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    assert not torch.equal(model(x), model(x))


@pytest.mark.parametrize("wrapped_first", [False, True])
def test_distributed_data_parallel(wrapped_first: bool, tmp_path: Any) -> None:
    if not torch.distributed.is_available():
        pytest.skip("torch without torch.distributed")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model, x = Block().train(), x_of()
        plain = copy.deepcopy(model)
        parallel = nn.parallel.DistributedDataParallel
        wrapped = parallel(model) if wrapped_first else model
        result = kernel_pytorch.optimize(wrapped, x, "train", budget_seconds=20.0, tune="off")
        assert result.report.data["replacements"], str(result.report)
        wrapped = wrapped if wrapped_first else parallel(model)
        for one in (wrapped, plain):
            one(x).square().sum().backward()
        for one, other in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3)
    finally:
        torch.distributed.destroy_process_group()
