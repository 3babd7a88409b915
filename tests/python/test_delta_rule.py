"""delta_rule against a step scan in fp64: values, every gradient, states, segments, packed sequences, pools."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch.functional import delta_rule, delta_rule_step_  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def scan(query, key, value, beta, gate=None, initial_state=None, scale=None, normalize_qk=False):
    """The recurrence, token by token; returns (output, final state)."""
    batch, tokens, heads, values = value.shape
    columns = query.shape[-1]
    query, key = (x.repeat_interleave(heads // x.shape[2], 2) for x in (query, key))
    if normalize_qk:
        query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    state = value.new_zeros(batch, heads, columns, values) if initial_state is None else initial_state
    outputs = []
    for t in range(tokens):
        if gate is not None:
            state = state * (gate[:, t] if gate.dim() == 4 else gate[:, t, :, None]).exp()[..., None]
        error = value[:, t] - torch.einsum("bhi,bhij->bhj", key[:, t], state)
        state = state + key[:, t, :, :, None] * (beta[:, t, :, None] * error)[:, :, None]
        outputs.append(torch.einsum("bhi,bhij->bhj", query[:, t], state) * (scale or columns**-0.5))
    return (torch.stack(outputs, 1) if outputs else value), state


def error(ours, theirs):
    theirs = theirs.detach()
    return float((ours.detach().cpu().double() - theirs).norm() / theirs.norm().clamp_min(1e-30))


def inputs(shape, values, *, kind="gate", strength=0.2, dtype=torch.float32, query_heads=None, unit=True, seed=0):
    batch, tokens, heads, columns = shape
    make = torch.Generator().manual_seed(seed)
    normal = lambda *sizes: torch.randn(*sizes, generator=make)  # noqa: E731
    key = normal(batch, tokens, heads, columns)
    tensors = {
        "query": normal(batch, tokens, query_heads or heads, columns),
        "key": key / key.norm(dim=-1, keepdim=True) if unit else key,
        "value": normal(batch, tokens, heads, values),
        "beta": normal(batch, tokens, heads).sigmoid(),
        "initial_state": normal(batch, heads, columns, values),
    }
    if kind == "gate":
        tensors["gate"] = -normal(batch, tokens, heads).abs() * strength
    if kind == "channels":
        tensors["gate"] = -normal(batch, tokens, heads, columns).abs() * strength
    return {
        name: x.to(torch.float64 if dtype is torch.float64 else torch.float32 if name == "initial_state" else dtype)
        for name, x in tensors.items()
    }


def compare(tensors, device="cpu", tolerance=None, **options):
    """Values and gradients of everything, from those of output and state."""
    dtype = tensors["query"].dtype
    tolerance = tolerance or TOLERANCES[dtype]
    leaves = {name: x.to(device).detach().requires_grad_() for name, x in tensors.items()}
    exact = {name: x.double().detach().requires_grad_() for name, x in tensors.items()}
    output, state = delta_rule(**leaves, return_state=True, **options)
    options.pop("mode", None)
    expected, last = scan(**exact, **options)
    assert error(output, expected) < tolerance and error(state, last) < tolerance
    make = torch.Generator().manual_seed(1)
    upstream = [torch.randn(x.shape, generator=make).to(x.dtype) for x in (output, state)]
    found = torch.autograd.grad([output, state], list(leaves.values()), [x.to(device) for x in upstream])
    wanted = torch.autograd.grad([expected, last], list(exact.values()), [x.double() for x in upstream])
    for name, ours, theirs in zip(leaves, found, wanted, strict=True):
        assert ours.dtype == tensors[name].dtype
        assert error(ours, theirs) < tolerance, name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["none", "gate", "channels"])
def test_against_the_scan(device, dtype, kind):
    compare(inputs((2, 70, 2, 64), 48, kind=kind, dtype=dtype), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "values", "options"),
    [
        ((1, 100, 4, 32), 20, {"query_heads": 2, "unit": False}),
        ((1, 53, 2, 17), 5, {"kind": "channels"}),
        ((1, 49, 1, 128), 128, {}),
        ((3, 1, 2, 8), 8, {}),
        ((1, 60, 2, 16), 16, {"kind": "channels", "strength": 8.0}),
        ((1, 60, 2, 16), 16, {"strength": 90.0}),  # it leaves nothing of a gradient but differences of rounded sums
    ],
)
def test_sizes_heads_and_strong_gates(device, shape, values, options):
    normalize = not options.get("unit", True)
    tolerance = 1e-4 if options.get("strength", 0) > 50 else 1e-5
    compare(inputs(shape, values, **options), device, tolerance, normalize_qk=normalize, scale=0.7)


def test_double_and_steps():
    compare(inputs((1, 9, 2, 5), 3, kind="channels", dtype=torch.float64, unit=False), normalize_qk=True)
    tensors = inputs((2, 40, 2, 24), 36)
    whole, last = delta_rule(**tensors, return_state=True, mode="chunk")
    again, state = delta_rule(**tensors, return_state=True, mode="recurrent")
    torch.testing.assert_close(again, whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)


def test_a_long_sequence_is_its_segments():
    tensors = inputs((1, 900, 1, 8), 8)
    compare(tensors)
    whole, last = delta_rule(**tensors, return_state=True)
    state, outputs = tensors.pop("initial_state"), []
    for cut in (slice(0, 401), slice(401, 402), slice(402, 900)):
        part = {name: x[:, cut] for name, x in tensors.items()}
        output, state = delta_rule(**part, initial_state=state, return_state=True)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences(dtype):
    ends = [0, 50, 50, 51, 120]
    tensors = inputs((1, 125, 2, 16), 8)
    tensors["initial_state"] = torch.randn(4, 2, 16, 8)
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    output, states = delta_rule(**leaves, cu_seqlens=torch.tensor(ends, dtype=dtype), return_state=True)
    found = torch.autograd.grad(output.square().sum() + states.square().sum(), list(leaves.values()))
    exact = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    total = torch.zeros((), dtype=torch.float64)
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        part = {name: x[:, begin:end] for name, x in exact.items()}
        part["initial_state"] = exact["initial_state"][i : i + 1]
        expected, state = scan(**part)
        assert error(output[:, begin:end], expected) < 1e-5
        assert error(states[i : i + 1], state) < 1e-5
        total = total + expected.square().sum() + state.square().sum()
    assert output[:, 120:].eq(0).all()
    for name, ours, theirs in zip(leaves, found, torch.autograd.grad(total, list(exact.values()))):
        assert error(ours, theirs) < 1e-5, name


def test_gates_of_minus_infinity_forget():
    for kind in ("gate", "channels"):
        tensors = inputs((1, 70, 2, 8), 4, kind=kind)
        tensors["gate"][:, [0, 20, 21, 69]] = float("-inf")
        leaves = {name: x.requires_grad_() for name, x in tensors.items()}
        for mode in ("chunk", "recurrent"):
            output, state = delta_rule(**leaves, return_state=True, mode=mode)
            expected, last = scan(**{name: x.detach().double() for name, x in tensors.items()})
            assert error(output, expected) < 1e-5 and error(state, last) < 1e-5
        gradients = torch.autograd.grad(output.square().sum() + state.sum(), list(leaves.values()))
        assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("device", DEVICES)
def test_steps_in_a_pool(device):
    tensors = {name: x.to(device) for name, x in inputs((3, 4, 2, 16), 32).items()}
    start = tensors.pop("initial_state")
    expected, last = delta_rule(**tensors, initial_state=start, return_state=True)
    state = start.clone()
    torch.testing.assert_close(delta_rule_step_(state=state, **tensors), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)
    for dtype in (torch.int32, torch.int64):
        pool = torch.randn(7, 2, 16, 32, device=device)
        before = pool.clone()
        index = torch.tensor([5, 0, 2], dtype=dtype, device=device)
        pool[index.long()] = start
        outputs = []
        for cut in (slice(0, 3), slice(3, 4)):  # three draft tokens, one more
            part = {name: x[:, cut] for name, x in tensors.items()}
            outputs.append(delta_rule_step_(state=pool, state_index=index, **part))
        torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(pool[index.long()], last, rtol=1e-4, atol=1e-5)
        others = [1, 3, 4, 6]
        assert pool[others].equal(before[others])
        index[1] = -1
        fresh = delta_rule(**{name: x[1:2] for name, x in tensors.items()})
        kept = pool[0].clone()
        output = delta_rule_step_(state=pool, state_index=index, **tensors)
        torch.testing.assert_close(output[1:2], fresh, rtol=1e-4, atol=1e-5)
        assert pool[0].equal(kept)


def test_no_tokens():
    tensors = inputs((2, 0, 2, 8), 4)
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    output, state = delta_rule(**leaves, return_state=True)
    assert output.shape == (2, 0, 2, 4) and state.equal(tensors["initial_state"])
    gradients = torch.autograd.grad(state.sum() + output.sum(), list(leaves.values()))
    assert gradients[4].eq(1).all() and gradients[0].shape == (2, 0, 2, 8)


def test_bad_input():
    tensors = inputs((1, 8, 4, 8), 8)
    with pytest.raises(RuntimeError, match="beta has shape"):
        delta_rule(**tensors | {"beta": torch.randn(1, 8, 2)})
    with pytest.raises(RuntimeError, match="gate has shape"):
        delta_rule(**tensors | {"gate": torch.randn(8, 4)})
    with pytest.raises(RuntimeError, match="initial_state is bf16"):
        delta_rule(**tensors | {"initial_state": tensors["initial_state"].bfloat16()})
    state = tensors.pop("initial_state")
    with pytest.raises(RuntimeError, match=r"state_index\[0\] is 3, the pool has 1"):
        delta_rule_step_(state=state, state_index=torch.tensor([3]), **tensors)
    with pytest.raises(RuntimeError, match="state_index has shape"):
        delta_rule_step_(state=state, state_index=torch.tensor([0, 0]), **tensors)
