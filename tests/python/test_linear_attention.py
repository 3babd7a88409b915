"""linear_attention against a step scan in fp64: values, every gradient, states, segments, packed sequences, layers."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch.attention import GatedDeltaNet, GatedLinearAttention, LightningAttention  # noqa: E402
from kernel_pytorch.functional import delta_rule, linear_attention, linear_attention_step_, ssd  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def scan(query, key, value, gate=None, decay=None, initial_state=None, scale=None):
    """The recurrence, token by token; returns (output, final state)."""
    batch, tokens, heads, values = value.shape
    columns = query.shape[-1]
    query, key = (x.repeat_interleave(heads // x.shape[2], 2) for x in (query, key))
    state = value.new_zeros(batch, heads, columns, values) if initial_state is None else initial_state
    outputs = []
    for t in range(tokens):
        log = value.new_zeros(batch, heads, 1)
        if gate is not None:
            log = log + (gate[:, t] if gate.dim() == 4 else gate[:, t, :, None])
        if decay is not None:
            log = log + decay[:, None]
        state = state * log.exp()[..., None] + key[:, t, :, :, None] * value[:, t, :, None, :]
        outputs.append(torch.einsum("bhi,bhij->bhj", query[:, t], state) * (scale or columns**-0.5))
    return (torch.stack(outputs, 1) if outputs else value), state


def error(ours, theirs):
    theirs = theirs.detach()
    return float((ours.detach().cpu().double() - theirs).norm() / theirs.norm().clamp_min(1e-30))


def inputs(shape, values, *, kind="gate", strength=0.2, dtype=torch.float32, query_heads=None, seed=0):
    batch, tokens, heads, columns = shape
    make = torch.Generator().manual_seed(seed)
    normal = lambda *sizes: torch.randn(*sizes, generator=make)  # noqa: E731
    tensors = {
        "query": normal(batch, tokens, query_heads or heads, columns),
        "key": normal(batch, tokens, heads, columns),
        "value": normal(batch, tokens, heads, values),
        "initial_state": normal(batch, heads, columns, values),
    }
    if kind in ("gate", "both"):
        tensors["gate"] = -normal(batch, tokens, heads).abs() * strength
    if kind == "channels":
        tensors["gate"] = -normal(batch, tokens, heads, columns).abs() * strength
    if kind in ("decay", "both"):
        tensors["decay"] = -normal(heads).abs() * strength
    wide = ("initial_state", "decay")
    return {
        name: x.to(torch.float64 if dtype is torch.float64 else torch.float32 if name in wide else dtype)
        for name, x in tensors.items()
    }


def compare(tensors, device="cpu", mode="auto", tolerance=None):
    """Values and gradients of everything, from those of output and state."""
    exact = {name: x.double().requires_grad_() for name, x in tensors.items()}
    has_gradient = [name for name in tensors if device == "cpu" or name in ("query", "key", "value")]
    ours = {name: x.to(device).requires_grad_(name in has_gradient) for name, x in tensors.items()}
    expected = scan(**exact)
    results = linear_attention(**ours, return_state=True, mode=mode)
    tolerance = tolerance or TOLERANCES[tensors["query"].dtype]
    grads = [torch.randn_like(x) for x in expected]
    # On a GPU `kpt verify` compares the gradients of gates and of states.
    exact, ours = ({name: x[name] for name in has_gradient} for x in (exact, ours))
    wanted = torch.autograd.grad(expected, list(exact.values()), grads)
    given = [grad.to(device, result.dtype) for grad, result in zip(grads, results)]
    found = torch.autograd.grad(results, list(ours.values()), given)
    errors = {name: error(*pair) for name, *pair in zip(("output", "state"), results, expected)}
    errors |= {name: error(ours, theirs) for name, ours, theirs in zip(exact, found, wanted)}
    # grad_decay is one number of thousands of terms that cancel.
    assert {name: e for name, e in errors.items() if not e <= tolerance * (10 if name == "decay" else 1)} == {}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", ["none", "decay", "gate", "channels", "both"])
def test_values_and_gradients(kind, dtype, device):
    if dtype is torch.float64 and device == "cuda":
        pytest.skip("fp64 runs on the CPU")
    compare(inputs((2, 53, 4, 16), 24, kind=kind, dtype=dtype, query_heads=2), device)
    if device == "cuda":
        compare(inputs((1, 130, 2, 64), 64, kind=kind, dtype=dtype), device)


@pytest.mark.parametrize("kind", ["gate", "channels"])
@pytest.mark.parametrize("strength", [0.0, 1e-4, 3.0, 40.0])
def test_gates_near_zero_and_strong(kind, strength):
    tensors = inputs((1, 60, 2, 8), 8, kind=kind, strength=strength)
    # Gates so strong leave nothing of a gradient but differences of rounded sums.
    compare(tensors, tolerance=1e-5 if strength < 10 else 1e-4)


@pytest.mark.parametrize("mode", ["chunk", "recurrent"])
@pytest.mark.parametrize("tokens", [0, 1, 2, 49])
def test_lengths_and_modes(tokens, mode):
    tensors = inputs((2, tokens, 3, 8), 5, kind="both")
    output, state = linear_attention(**tensors, return_state=True, mode=mode)
    expected = scan(**{name: x.double() for name, x in tensors.items()})
    assert output.shape == expected[0].shape
    assert error(output, expected[0]) < 1e-6
    assert error(state, expected[1]) < 1e-6
    if tokens == 0:
        assert torch.equal(state, tensors["initial_state"])


@pytest.mark.parametrize("kind", ["gate", "channels"])
def test_segments_are_one_sequence(kind):
    tensors = inputs((2, 200, 2, 16), 16, kind=kind)
    whole, last = linear_attention(**tensors, return_state=True)
    state, parts = tensors.pop("initial_state"), []
    for begin, end in itertools.pairwise([0, 1, 77, 130, 200]):
        part = {name: x[:, begin:end] for name, x in tensors.items()}
        output, state = linear_attention(**part, initial_state=state, return_state=True)
        parts.append(output)
    assert error(torch.cat(parts, 1), whole.double()) < 1e-6
    assert error(state, last.double()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_packed_sequences(dtype):
    ends = [0, 30, 30, 101, 120]
    tensors = inputs((1, 128, 2, 16), 8, kind="both")
    starts = torch.randn(4, 2, 16, 8).requires_grad_()
    tensors["initial_state"] = starts
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    output, states = linear_attention(**leaves, cu_seqlens=torch.tensor(ends, dtype=dtype), return_state=True)
    loss = output.square().sum() + states.square().sum()
    found = torch.autograd.grad(loss, list(leaves.values()))
    exact = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    total = torch.zeros((), dtype=torch.float64)
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        part = {name: x[:, begin:end] if name != "decay" else x for name, x in exact.items()}
        part["initial_state"] = exact["initial_state"][i : i + 1]
        expected, state = scan(**part)
        assert error(output[:, begin:end], expected) < 1e-6
        assert error(states[i : i + 1], state) < 1e-6
        total = total + expected.square().sum() + state.square().sum()
    assert output[:, 120:].eq(0).all()
    for name, ours, theirs in zip(leaves, found, torch.autograd.grad(total, list(exact.values()))):
        assert error(ours, theirs) < 1e-5, name


def test_step_writes_the_state():
    tensors = inputs((3, 4, 2, 16), 32, kind="both")
    state = tensors["initial_state"].clone()
    expected, last = linear_attention(**tensors, return_state=True, mode="chunk")
    del tensors["initial_state"]
    steps = {name: x[:, :1] if name != "decay" else x for name, x in tensors.items()}
    first = linear_attention_step_(state=state, **steps)
    rest = {name: x[:, 1:] if name != "decay" else x for name, x in tensors.items()}
    others = linear_attention_step_(state=state, **rest)
    torch.testing.assert_close(torch.cat([first, others], 1), expected)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["both", "channels"])
def test_steps_in_a_pool(kind, device):
    tensors = {name: x.to(device) for name, x in inputs((3, 4, 2, 16), 32, kind=kind).items()}
    start, decay = tensors.pop("initial_state"), tensors.pop("decay", None)
    expected, last = linear_attention(**tensors, decay=decay, initial_state=start, return_state=True, mode="chunk")
    for dtype in (torch.int32, torch.int64):
        pool = torch.randn(7, 2, 16, 32, device=device)
        before = pool.clone()
        index = torch.tensor([5, 0, 2], dtype=dtype, device=device)
        pool[index.long()] = start
        outputs = []
        for cut in (slice(0, 3), slice(3, 4)):  # three draft tokens, one more
            part = {name: x[:, cut] for name, x in tensors.items()}
            outputs.append(linear_attention_step_(state=pool, state_index=index, decay=decay, **part))
        torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(pool[index.long()], last, rtol=1e-4, atol=1e-5)
        others = [1, 3, 4, 6]
        assert pool[others].equal(before[others])
        index[1] = -1
        fresh = linear_attention(**{name: x[1:2] for name, x in tensors.items()}, decay=decay)
        kept = pool[0].clone()
        output = linear_attention_step_(state=pool, state_index=index, decay=decay, **tensors)
        torch.testing.assert_close(output[1:2], fresh, rtol=1e-4, atol=1e-5)
        assert pool[0].equal(kept)


@pytest.mark.parametrize("device", DEVICES)
def test_drafts_of_different_lengths_in_a_pool(device):
    ends = [0, 3, 3, 4, 9]  # tokens 9 and 10 are in no sequence
    tensors = {name: x.to(device) for name, x in inputs((1, 11, 2, 16), 8, kind="both").items()}
    decay, pool = tensors.pop("decay"), torch.randn(6, 2, 16, 8, device=device)
    del tensors["initial_state"]
    one_by_one, index = pool.clone(), torch.tensor([4, 1, -1, 0], device=device)
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    output = linear_attention_step_(state=pool, state_index=index, cu_seqlens=offsets, decay=decay, **tensors)
    assert output[:, 9:].eq(0).all()
    for slot, begin, end in zip(index.tolist(), ends, ends[1:]):
        state = one_by_one[slot : slot + 1] if slot >= 0 else torch.zeros(1, 2, 16, 8, device=device)
        for token in range(begin, end):
            part = {name: x[:, token : token + 1] for name, x in tensors.items()}
            expected = linear_attention_step_(state=state, decay=decay, **part)
            torch.testing.assert_close(output[:, token : token + 1], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pool, one_by_one, rtol=1e-4, atol=1e-5)
    assert pool[[1, 2, 3, 5]].equal(one_by_one[[1, 2, 3, 5]])


def test_normalised_weights_sum_to_one():
    tensors = inputs((2, 60, 2, 8), 8, kind="gate")
    positive = {name: x.abs() if name in ("query", "key") else x for name, x in tensors.items()}
    del positive["initial_state"]
    output = linear_attention(**positive | {"value": torch.ones_like(positive["value"])}, normalize=True)
    torch.testing.assert_close(output, torch.ones_like(output))
    whole, last = linear_attention(**positive, normalize=True, return_state=True)
    parts, state = [], None
    for cut in (slice(0, 25), slice(25, 60)):
        part = {name: x[:, cut] for name, x in positive.items()}
        output, state = linear_attention(**part, normalize=True, initial_state=state, return_state=True)
        parts.append(output)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state, last)


def test_one_gate_of_a_token_is_one_of_each_channel():
    tensors = inputs((1, 90, 2, 16), 16, kind="gate")
    wide = tensors | {"gate": tensors["gate"][..., None].expand(-1, -1, -1, 16)}
    torch.testing.assert_close(linear_attention(**wide), linear_attention(**tensors))


def test_ssd_is_mamba():
    make = torch.Generator().manual_seed(0)
    x, B, C = (torch.randn(2, 70, *sizes, generator=make) for sizes in ((4, 6), (2, 5), (2, 5)))
    dt, A, D = (torch.randn(*sizes, generator=make) for sizes in ((2, 70, 4), (4,), (4,)))
    A, bias, start = -A.exp(), torch.ones(4), torch.randn(2, 4, 6, 5, generator=make)
    leaves = [one.requires_grad_() for one in (x, dt, A.detach(), B, C, D, bias, start)]
    state, outputs = start, []
    steps = torch.nn.functional.softplus(dt + bias)
    for t in range(70):
        key, query = (one[:, t].repeat_interleave(2, 1)[:, :, None] for one in (B, C))
        kept = (steps[:, t] * leaves[2]).exp()[..., None, None]
        state = kept * state + (steps[:, t, :, None] * x[:, t])[..., None] * key
        outputs.append((state * query).sum(-1) + D[:, None] * x[:, t])
    expected = torch.stack(outputs, 1)
    options = {"D": D, "dt_bias": bias, "dt_softplus": True, "initial_state": start, "return_state": True}
    output, last = ssd(x, dt, leaves[2], B, C, **options)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last, state, rtol=1e-4, atol=1e-4)
    wanted, found = (
        torch.autograd.grad(a.square().sum() + b.sum(), leaves) for a, b in ((expected, state), (output, last))
    )
    for ours, theirs in zip(found, wanted):
        assert error(ours, theirs.double()) < 1e-5


def test_bad_input():
    tensors = inputs((1, 8, 4, 8), 8)
    with pytest.raises(RuntimeError, match="heads of value must be a multiple"):
        linear_attention(**tensors | {"key": torch.randn(1, 8, 3, 8)})
    with pytest.raises(RuntimeError, match="gate has shape"):
        linear_attention(**tensors | {"gate": torch.randn(8, 4)})
    with pytest.raises(RuntimeError, match="initial_state is bf16"):
        linear_attention(**tensors | {"initial_state": tensors["initial_state"].bfloat16()})
    with pytest.raises(RuntimeError, match="the batch is 1"):
        linear_attention(**inputs((2, 8, 4, 8), 8), cu_seqlens=torch.tensor([0, 8]))
    with pytest.raises(RuntimeError, match="cu_seqlens"):
        linear_attention(**tensors, cu_seqlens=torch.tensor([0, 9]))
    with pytest.raises(RuntimeError, match="mode"):
        linear_attention(**tensors, mode="fast")
    state = tensors.pop("initial_state")
    with pytest.raises(RuntimeError, match=r"state_index\[0\] is 3, the pool has 1"):
        linear_attention_step_(state=state, state_index=torch.tensor([3]), **tensors)
    with pytest.raises(RuntimeError, match="state_index has shape"):
        linear_attention_step_(state=state, state_index=torch.tensor([0, 0]), **tensors)
    with pytest.raises(RuntimeError, match="state_index is fp32"):
        linear_attention_step_(state=state, state_index=torch.zeros(1), **tensors)


@pytest.mark.parametrize("layer", [GatedLinearAttention, LightningAttention, GatedDeltaNet])
def test_layers_go_on_from_their_state(layer):
    torch.manual_seed(0)
    module = layer(32, 4)
    x = torch.randn(2, 70, 32)
    whole = module(x)
    assert whole.shape == x.shape
    first, state = module(x[:, :40], return_state=True)
    second, _ = module(x[:, 40:], state=state, return_state=True)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-4, atol=1e-5)
    whole.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("layer", [GatedLinearAttention, LightningAttention, GatedDeltaNet])
def test_layers_without_tokens_and_under_autocast(layer):
    module, x = layer(16, 2), torch.randn(2, 9, 16)
    assert module(x[:, :0]).shape == (2, 0, 16)
    with torch.autocast("cpu", torch.bfloat16):
        output = module(x)
    output.float().sum().backward()
    assert output.dtype is torch.bfloat16
    torch.testing.assert_close(output.float(), module(x), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("strength", [1.0, 5.0, 30.0])
def test_gradients_of_strong_gates_keep_their_digits(strength):
    """They are small, and must not be differences of what is not."""
    torch.manual_seed(3)
    shape = (1, 150, 2, 16)
    tensors = [torch.randn(shape) for _ in range(3)]
    tensors += [
        -strength * (1 + 0.1 * torch.rand(shape[:3])),
        -strength * (1 + torch.rand(2)),
        torch.randn(1, 2, 16, 16),
    ]
    for is_delta in (False, True):
        found = []
        for dtype in (torch.float32, torch.float64):
            query, key, value, gate, decay, start = (x.to(dtype).requires_grad_() for x in tensors)
            if is_delta:
                key = torch.nn.functional.normalize(key, dim=-1)
                beta = torch.full(shape[:3], 0.5, dtype=dtype)
                results = delta_rule(query, key, value, beta, gate=gate, initial_state=start, return_state=True)
                inputs = (gate,)
            else:
                options = dict(gate=gate, decay=decay, initial_state=start, return_state=True)
                results, inputs = linear_attention(query, key, value, **options), (gate, decay)
            found.append(torch.autograd.grad(sum(x.sum() for x in results), inputs))
        for ours, exact in zip(*found, strict=True):
            error = (ours.double() - exact).norm() / exact.norm()
            assert error < 3e-5, (is_delta, strength, float(error))
