"""The same names, options and numbers as kernel_pytorch.functional."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import kernel_pytorch.jax as kp

torch = pytest.importorskip("torch", reason="it compares with torch's front end")
from kernel_pytorch import functional  # noqa: E402
from kernel_pytorch import optim as torch_optim  # noqa: E402

IN_PLACE = "arrays of JAX are not written in place: XLA reuses the memory of donated ones"
# Functions that are missing, and why.
MISSING = {
    "BlockLists": "BlockMask is what block_lists returns",
    "QuantizedTensor": "quantize_weight returns a QuantizedWeight",
    "attention_part_": IN_PLACE + "; attention(return_lse=True) and merge_attention compute parts",
    "attention_part_backward_": IN_PLACE + "; parts have gradients by jax.grad",
    "causal_conv1d_step_": IN_PLACE + "; causal_conv1d(return_state=True) returns the state",
    "cross_entropy_": IN_PLACE,
    "delta_rule_step_": IN_PLACE + "; delta_rule(return_state=True) returns the state",
    "linear_attention_step_": IN_PLACE + "; linear_attention(return_state=True) returns the state",
    "log_softmax_": IN_PLACE,
    "rope_": IN_PLACE,
    "softmax_": IN_PLACE,
}
DEVICE = "arrays are made where jax's default device is"
# (function, option): missing, and why.
MISSING_OPTIONS = {
    ("rope_frequencies", "device"): DEVICE,
    ("rope_tables", "device"): DEVICE,
    ("paged_attention", "out"): IN_PLACE,
    ("plan_decode", "out"): IN_PLACE,
    **{
        ("quantize", one): "weights in few bits are made by quantize_weight"
        for one in ("format", "group", "stochastic")
    },
    (
        "quantized_matmul",
        "activations",
    ): "scaled_matmul of quantize's rows and of dequantize_weight in FP8 is that product",
    ("append_kv", "cache_layout"): "XLA would copy the whole cache to transpose it; keep it as nhd",
}
# Arguments of rope_frequencies are checked by the core's list.
THROUGH = {"rope_frequencies": "options", "rope_tables": "frequencies"}


def test_every_function_is_here_or_has_a_reason() -> None:
    missing = {name for name in functional.__all__ if not hasattr(kp, name)}
    assert missing == set(MISSING)


def test_every_option_is_here_or_has_a_reason() -> None:
    missing = set()
    for name in set(functional.__all__) - set(MISSING):
        ours = inspect.signature(getattr(kp, name)).parameters
        if THROUGH.get(name) in ours:
            continue
        theirs = inspect.signature(getattr(functional, name)).parameters
        missing |= {(name, option) for option in theirs if option not in ours}
    assert missing == {one for one in MISSING_OPTIONS if THROUGH.get(one[0]) is None}


def test_defaults_agree() -> None:
    """But for attention's layout, which is JAX's, and what torch asks of its own settings."""
    different = set()
    for name in set(functional.__all__) - set(MISSING):
        ours = inspect.signature(getattr(kp, name)).parameters
        for option, theirs in inspect.signature(getattr(functional, name)).parameters.items():
            if option in ours and not _same(theirs.default, ours[option].default):
                different.add((name, option))
    assert different == {
        ("attention", "layout"),
        ("attention", "deterministic"),
        ("attention", "allow_tf32"),
        ("matmul", "precision"),
        ("linear", "precision"),
        ("mlp", "precision"),
        ("select_blocks", "layout"),
        ("linear_cross_entropy", "chunk_bytes"),  # None: the core's
    }


def _same(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, torch.dtype):
        return str(theirs).removeprefix("torch.") == jnp.dtype(ours).name
    return bool(theirs == ours)


# torch's arguments by ours, and those that are torch's own ways of running (params: optax gives them to each call).
OPTIMIZER = {"lr": "learning_rate", "betas": "b1", "max_grad_norm": "max_norm"}
TORCH_ONLY = {"self", "params", "foreach", "fused", "capturable", "differentiable"}
OFFLOAD = "where a state lies is said by its arrays' memory kinds in JAX"
# Options that are missing, and why.
MISSING_OF_OPTIMIZERS = {("AdamW", "offload"): OFFLOAD}


def test_optimizers_take_what_torch_has() -> None:
    missing = set()
    for name in ("AdamW", "Lion", "SGD", "Muon"):
        ours = inspect.signature(getattr(kp.optim, name.lower())).parameters
        theirs = inspect.signature(getattr(torch_optim, name).__init__).parameters
        missing |= {(name, one) for one in set(theirs) - TORCH_ONLY if OPTIMIZER.get(one, one) not in ours}
    assert missing == set(MISSING_OF_OPTIMIZERS)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {"master_weights": True}),
        ("AdamW", {"amsgrad": True, "maximize": True}),
        ("AdamW", {"state_dtype": "bfloat16"}),
        ("AdamW", {"state_dtype": None, "master_weights": True, "amsgrad": True}),
        ("AdamW", {"state": "compact"}),
        ("AdamW", {"state": "8bit"}),
        ("Lion", {"weight_decay": 0.1}),
        ("Lion", {"state": "compact", "maximize": True}),
        ("SGD", {}),
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ("SGD", {"momentum": 0.9, "dampening": 0.1, "state": "8bit"}),
    ],
)
def test_optimizers_agree(name: str, options: Any) -> None:
    """8-bit states are of parameters from 4096 elements on."""
    start = {"a": normal(0, 33, 7), "b": normal(1, 4099)}
    theirs = {place: torch.nn.Parameter(torch.from_numpy(one).bfloat16()) for place, one in start.items()}
    names = {option: getattr(torch, one) if option == "state_dtype" and one else one for option, one in options.items()}
    optimizer = getattr(torch_optim, name)(theirs.values(), lr=1e-2, **names)
    ours = {place: jnp.asarray(one, jnp.bfloat16) for place, one in start.items()}
    stepper = getattr(kp.optim, name.lower())(1e-2, **options)
    state, step_ours = stepper.init(ours), jax.jit(stepper.step)
    for step in range(4):
        grads = {place: normal(10 + step, *one.shape) for place, one in start.items()}
        for place, one in theirs.items():
            one.grad = torch.from_numpy(grads[place]).bfloat16()
        optimizer.step()
        ours, state = step_ours(ours, {n: jnp.asarray(g, jnp.bfloat16) for n, g in grads.items()}, state)
    for place, one in theirs.items():
        np.testing.assert_allclose(ours[place].astype(jnp.float32), one.detach().float().numpy(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("options", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}])
def test_muon_agrees(options: Any) -> None:
    """As Newton-Schulz steps in bf16 allow: rates are small beside the parameters, so the changes are compared."""
    start = {"a": normal(0, 24, 40), "b": normal(1, 40, 24), "c": normal(2, 24, 40)}
    theirs = {place: torch.nn.Parameter(torch.from_numpy(one.copy())) for place, one in start.items()}
    optimizer = torch_optim.Muon(theirs.values(), lr=1e-2, **options)
    stepper = kp.optim.muon(1e-2, **options)
    ours = {place: jnp.asarray(one) for place, one in start.items()}
    state = stepper.init(ours)
    for step in range(2):
        for one in theirs.values():
            one.grad = torch.from_numpy(normal(10 + step, *one.shape))
        optimizer.step()
        grads = {place: jnp.asarray(normal(10 + step, *one.shape)) for place, one in start.items()}
        ours, state = jax.jit(stepper.step)(ours, grads, state)
    for place, one in theirs.items():
        changes = np.asarray(ours[place]) - start[place], one.detach().numpy() - start[place]
        assert np.linalg.norm(changes[0] - changes[1]) < 0.04 * np.linalg.norm(changes[1])


def test_optimizers_say_what_is_wrong() -> None:
    for call, words in [
        (lambda: kp.optim.adamw(state="4bit"), '"4bit"'),
        (lambda: kp.optim.adamw(state="compact", amsgrad=True), "amsgrad is for"),
        (lambda: kp.optim.lion().init([jnp.ones(3, jnp.int32)]), "int32"),
        (lambda: kp.optim.sgd(nesterov=True), "needs momentum"),
        (lambda: kp.optim.sgd(state="8bit"), "without momentum"),
        (lambda: kp.optim.muon().init([jnp.ones(3)]), "takes matrices"),
        (lambda: kp.optim.muon(adjust_lr_fn="x"), '"x"'),
    ]:
        with pytest.raises((TypeError, ValueError), match=words):
            call()


def test_stochastic_rounding_keeps_small_steps_on_average() -> None:
    parameters = {"a": jnp.ones(4096, jnp.bfloat16)}
    gradients = {"a": jnp.ones(4096, jnp.bfloat16)}
    optimizer = kp.optim.adamw(1e-4, weight_decay=0.0, stochastic_rounding=True, seed=3)
    state = optimizer.init(parameters)
    for _ in range(10):
        parameters, state = optimizer.step(parameters, gradients, state)
    mean = float(parameters["a"].astype(jnp.float32).mean())
    assert abs(mean - (1 - 10e-4)) < 3e-4
    with pytest.raises(ValueError, match="choose one"):
        kp.optim.adamw(stochastic_rounding=True, master_weights=True)


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def same(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    ours, theirs = jax.tree.leaves(ours), jax.tree.leaves(theirs)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), other.float().numpy(), atol=tolerance, rtol=1e-5)


def test_gates_and_norms_agree() -> None:
    x, weight = normal(0, 4, 32), normal(1, 32)
    given = torch.from_numpy(x)
    for name in ("swiglu_packed", "geglu_packed", "reglu_packed"):
        same(getattr(kp, name)(x), getattr(functional, name)(given))
    same(kp.add_rms_norm(x, x + 1, weight), functional.add_rms_norm(given, given + 1, torch.from_numpy(weight)))
    ours = kp.layer_norm(x, weight, weight, residual=x, activation="tanh")
    theirs = functional.layer_norm(given, *[torch.from_numpy(weight)] * 2, residual=given, activation="tanh")
    same(ours, theirs)


def test_rotary_tables_agree() -> None:
    for options in ({}, {"scaling": "llama3", "factor": 8.0, "original_positions": 8192.0}):
        same(kp.rope_frequencies(64, **options)[0], functional.rope_frequencies(64, **options)[0])
        assert kp.rope_frequencies(64, **options)[1] == functional.rope_frequencies(64, **options)[1]
        same(kp.rope_tables(40, 64, **options), functional.rope_tables(40, 64, **options))
    with pytest.raises(TypeError, match="no argument 'bases'"):
        kp.rope_frequencies(64, bases=3)
    with pytest.raises(ValueError, match="even"):
        kp.rope_frequencies(63)


@pytest.mark.parametrize("form", ["padding", "integers", "heads", "added", "whole"])
def test_attention_masks_agree(form: str) -> None:
    query, key = normal(0, 2, 5, 4, 8), normal(1, 2, 7, 2, 8)
    keep = np.random.default_rng(3).random((2, 7)) < 0.7
    mask = {
        "padding": keep,
        "integers": keep.astype(np.int32),
        "heads": np.random.default_rng(4).random((4, 5, 7)) < 0.7,
        "added": normal(5, 5, 7),
        "whole": np.random.default_rng(6).random((2, 1, 5, 7)) < 0.7,
    }[form]
    tensors = [torch.from_numpy(one) for one in (query, key, key)]
    theirs = functional.attention(*tensors, attention_mask=torch.from_numpy(mask), layout="bshd")
    same(kp.attention(query, key, key, attention_mask=mask), theirs)
    with pytest.raises(ValueError, match="attention_mask has shape"):
        kp.attention(query, key, key, attention_mask=np.ones((3, 7), bool))


def test_selected_blocks_agree() -> None:
    query, key = normal(0, 1, 64, 2, 8), normal(1, 1, 64, 2, 8)
    options = {"sparsity": 0.5, "block_size": 8, "causal": True, "key_parts": 2}
    ours = kp.select_blocks(query, key, **options)
    theirs = functional.select_blocks(torch.from_numpy(query), torch.from_numpy(key), layout="bshd", **options)
    same(ours.lists, [theirs.kv_num_blocks, theirs.kv_indices, theirs.q_num_blocks, theirs.q_indices])
    output = kp.attention(query, key, key, causal=True, block_mask=ours)
    tensors = [torch.from_numpy(one) for one in (query, key, key)]
    same(output, functional.attention(*tensors, causal=True, layout="bshd", block_mask=theirs))
    gradient = jax.grad(lambda q: (kp.attention(q, key, key, causal=True, block_mask=ours) ** 2).sum())(
        jnp.array(query)
    )
    assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0
    packed, begins = {"max_seqlen_q": 40, "max_seqlen_k": 40}, np.array([0, 24, 64], np.int32)
    ours = kp.select_blocks(query[0], key[0], cu_seqlens_q=begins, **packed, **options)
    tensors = [torch.from_numpy(one[0]) for one in (query, key)]
    theirs = functional.select_blocks(*tensors, cu_seqlens_q=torch.from_numpy(begins), **packed, **options)
    same(ours.lists, [theirs.kv_num_blocks, theirs.kv_indices, theirs.q_num_blocks, theirs.q_indices])
    scores = normal(2, 1, 2, 8, 8)
    options.pop("key_parts")
    ours = kp.select_by_scores(scores, 64, 64, **options)
    theirs = functional.select_by_scores(torch.from_numpy(scores), 64, 64, **options)
    same(ours.lists[:2], [theirs.kv_num_blocks, theirs.kv_indices])
    table = np.random.default_rng(3).random((1, 1, 8, 8)) < 0.5
    theirs = functional.block_lists(torch.from_numpy(table), 8)
    same(kp.block_lists(table, 8).lists[:2], [theirs.kv_num_blocks, theirs.kv_indices])


def test_fused_quantisation_agrees() -> None:
    x, up = normal(0, 64, 128), normal(1, 64, 128)
    given, other = torch.from_numpy(x), torch.from_numpy(up)
    for options in ({"granularity": "row", "transposed": True}, {"granularity": "128x128"}):
        ours = kp.rms_norm_quantized(x, residual=up, with_output=True, **options)
        theirs = functional.rms_norm_quantized(given, residual=other, with_output=True, **options)
        for one, two in zip(jax.tree.leaves(ours), [leaf for leaf in _leaves(theirs) if leaf is not None], strict=True):
            np.testing.assert_allclose(np.asarray(one, np.float32), two.float().numpy(), rtol=1e-5, atol=1e-6)
        same(kp.dequantize(ours.quantized.codes, ours.quantized.scales), kp_dequantized(theirs.quantized))
    ours = kp.gated_activation_quantized(x, up, "silu")
    same(ours.quantized.codes, functional.gated_activation_quantized(given, other, "silu").quantized.codes)
    ours = kp.gated_activation_backward_quantized(x, up, x)
    same(ours.quantized.codes, functional.gated_activation_backward_quantized(given, other, given).quantized.codes)
    found = kp.quantize(x.copy(), amax=jnp.zeros(1), found_nonfinite=jnp.zeros(1))
    assert float(found.amax[0]) == np.abs(x).max() and float(found.found_nonfinite[0]) == 0


def kp_dequantized(quantized: Any) -> Any:
    return functional.dequantize(quantized.codes, quantized.scales)


def _leaves(value: Any) -> list[Any]:
    return [leaf for one in value for leaf in _leaves(one)] if isinstance(value, tuple) else [value]


def test_a_vocabulary_in_parts() -> None:
    logits, target = normal(0, 6, 40), np.array([3, 39, -100, 20, 19, 0])
    options = {"label_smoothing": 0.1, "z_loss": 0.01}

    def whole(logits: Any) -> Any:
        return kp.cross_entropy(logits, target, reduction="none", **options)

    if len(jax.devices()) < 4:
        pytest.skip("it takes four devices")
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    split, every = PartitionSpec(None, "model"), PartitionSpec()

    def part(logits: Any) -> Any:
        first = jax.lax.axis_index("model") * logits.shape[-1]
        return kp.parallel_cross_entropy(
            logits,
            target,
            vocabulary=40,
            first_column=first,
            gather=lambda x: jax.lax.all_gather(x, "model"),
            **options,
        )

    losses = jax.jit(jax.shard_map(part, mesh=mesh, in_specs=split, out_specs=every, check_vma=False))(logits)
    np.testing.assert_allclose(losses, whole(logits), atol=1e-5)

    def gradients(logits: Any) -> Any:  # of each device's own columns
        return jax.grad(lambda x: part(x).sum())(logits)

    found = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))(logits)
    np.testing.assert_allclose(found, jax.grad(lambda x: whole(x).sum())(jnp.array(logits)), atol=1e-5)


def test_chunks_of_the_linear_loss() -> None:
    hidden, weight, target = normal(0, 32, 16), normal(1, 64, 16), np.arange(32) * 2
    usual = jax.value_and_grad(kp.linear_cross_entropy, argnums=(0, 1))(jnp.array(hidden), jnp.array(weight), target)
    small = jax.value_and_grad(
        lambda h, w: kp.linear_cross_entropy(h, w, target, chunk_bytes=4096, accumulate_dtype=jnp.float32), (0, 1)
    )(jnp.array(hidden), jnp.array(weight))
    for one, other in zip(jax.tree.leaves(usual), jax.tree.leaves(small)):
        np.testing.assert_allclose(one, other, atol=1e-5)
    with pytest.raises(ValueError, match="accumulate_dtype"):
        kp.linear_cross_entropy(hidden, weight, target, accumulate_dtype=jnp.float16)
