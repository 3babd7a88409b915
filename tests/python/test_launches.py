"""What is handed to the CUDA driver, by our own counter: a fused op is one launch, its gradient one or two."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch.hardware import LaunchCounts, launch_counts  # noqa: E402
from kernel_pytorch.optim import AdamW, clip_grad_norm_  # noqa: E402
from kernel_pytorch.utils.profiling import count_launches  # noqa: E402

from kernel_pytorch import functional  # noqa: E402

ROWS, COLUMNS = 256, 1024


def test_nothing_is_launched_for_the_cpu():
    x = torch.randn(8, 64, requires_grad=True)
    assert count_launches(lambda: functional.gelu(x).sum().backward()) == LaunchCounts(0, 0)


def random(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def seed():
    return torch.tensor([5, 7], device="cuda")


def heads():
    cos, sin = functional.rope_tables(ROWS, 64, device="cuda")
    return random(1, ROWS, 12, 64), random(1, ROWS, 4, 64), cos, sin


def targets():
    return torch.randint(0, COLUMNS, (ROWS,), device="cuda")


def indices():
    return torch.randint(0, 64, (ROWS,), device="cuda")


# name: the call, its leaves, launches of forward and of backward. Sums over rows (of a bias, a weight) are a second
# kernel of the backward; so is counting the targets that are not ignored, before a mean's gradient can be written.
FUSED = {
    "rms_norm": (functional.rms_norm, lambda: [random(ROWS, COLUMNS), random(COLUMNS)], 1, 2),
    "add_rms_norm": (
        functional.add_rms_norm,
        lambda: [random(ROWS, COLUMNS), random(ROWS, COLUMNS), random(COLUMNS)],
        1,
        2,
    ),
    "layer_norm": (functional.layer_norm, lambda: [random(ROWS, COLUMNS), random(COLUMNS), random(COLUMNS)], 1, 2),
    "gelu": (functional.gelu, lambda: [random(ROWS, COLUMNS)], 1, 1),
    "bias, gelu, dropout, residual": (
        lambda x, bias, residual: functional.activation(
            x, "gelu", bias=bias, residual=residual, dropout_p=0.1, seed=seed()
        ),
        lambda: [random(ROWS, COLUMNS), random(COLUMNS), random(ROWS, COLUMNS)],
        1,
        2,
    ),
    "swiglu": (functional.swiglu, lambda: [random(ROWS, COLUMNS), random(ROWS, COLUMNS)], 1, 1),
    "swiglu of packed rows": (functional.swiglu_packed, lambda: [random(ROWS, 2 * COLUMNS)], 1, 1),
    "softmax, scaled and causal": (
        lambda x: functional.softmax(x, scale=0.5, causal=True),
        lambda: [random(ROWS, ROWS)],
        1,
        1,
    ),
    "log_softmax": (functional.log_softmax, lambda: [random(ROWS, COLUMNS)], 1, 1),
    "rope of query and key": (functional.rope, heads, 1, 1),
    "cross entropy, loss and gradient": (
        lambda x: functional.cross_entropy(x, targets(), reduction="sum", label_smoothing=0.1, softcap=30.0),
        lambda: [random(ROWS, COLUMNS)],
        1,
        0,
    ),
    "dropout": (lambda x: functional.dropout(x, 0.1, seed=seed()), lambda: [random(ROWS, COLUMNS)], 1, 1),
    "embedding": (lambda table: functional.embedding(indices(), table), lambda: [random(64, COLUMNS)], 1, None),
    "mean_pool": (functional.mean_pool, lambda: [random(4, 64, COLUMNS)], 1, 1),
    "chunk_mean_pool": (lambda x: functional.chunk_mean_pool(x, 16), lambda: [random(4, 64, COLUMNS)], 1, 1),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUSED)
def test_a_fused_op_is_one_launch(name):
    function, make, forward, backward = FUSED[name]
    tensors = make()
    leaves = [tensor.requires_grad_() for tensor in tensors[: 2 if name.startswith("rope") else None]]
    kept = []

    def run():
        kept[:] = [function(*tensors)]

    def gradients():
        outputs = [output for output in (kept[0] if isinstance(kept[0], tuple) else kept)]
        torch.autograd.grad(outputs, leaves, [torch.ones_like(output) for output in outputs], retain_graph=True)

    for step, wanted in ((run, forward), (gradients, backward)):
        step()
        counted = count_launches(step)
        if wanted is not None:
            assert counted.kernels == wanted, f"{step.__name__}: {counted}"


@pytest.mark.gpu
def test_a_decoder_block_is_eight_launches():
    width, heads, hidden = 512, 4, 1024
    x, cos_sin = random(1, ROWS, width), functional.rope_tables(ROWS, width // heads, device="cuda")
    norms, packed, output = [random(width) for _ in range(2)], random(3 * width, width), random(width, width)
    pairs, down = random(2 * hidden, width), random(width, hidden)

    def block():
        products = functional.linear(functional.rms_norm(x, norms[0]), packed)
        query, key, value = (one.view(1, ROWS, heads, -1) for one in products.chunk(3, -1))
        query, key = functional.rope(query, key, *cos_sin)
        attended = functional.attention(query, key, value, causal=True, layout="bshd").reshape(x.shape)
        normed, total = functional.add_rms_norm(x, functional.linear(attended, output), norms[1])
        return functional.linear(functional.linear(normed, pairs, activation="swiglu"), down, residual=total)

    with torch.no_grad():
        block()
        assert count_launches(block).kernels == 8


@pytest.mark.gpu
def test_a_step_over_many_parameters_is_one_launch():
    parameters = [random(7 * i + 1).requires_grad_() for i in range(200)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = AdamW(parameters)
    optimizer.step()
    assert count_launches(optimizer.step).kernels == 1
    clip_grad_norm_(parameters, 1.0)
    assert count_launches(clip_grad_norm_, parameters, 1.0).kernels <= 2
    clipped = AdamW(parameters, max_grad_norm=1.0)
    clipped.step()
    assert count_launches(clipped.step).kernels == 2


@pytest.mark.gpu
def test_the_counter_agrees_with_the_drivers_own_trace():
    x, target = random(ROWS, COLUMNS).requires_grad_(), targets()

    def run():
        functional.cross_entropy(functional.gelu(x), target).backward()

    run()
    torch.cuda.synchronize()
    before = launch_counts()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    counted = launch_counts() - before
    names = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    ours = [name for name in names if "kernel_pytorch::" in name]
    assert counted.kernels == len(ours) >= 3, names
    assert counted.fills <= sum("memset" in name.lower() for name in names), names


@pytest.mark.gpu
def test_a_captured_graph_counts_once():
    x = random(ROWS, COLUMNS)
    functional.gelu(x)
    graph = torch.cuda.CUDAGraph()
    before = launch_counts()
    with torch.cuda.graph(graph):
        functional.gelu(x)
    for _ in range(3):
        graph.replay()
    assert (launch_counts() - before).kernels == 1
