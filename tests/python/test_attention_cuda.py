"""attention on a GPU: values and gradients of every option, repeatability, CUDA graphs, what it leaves allocated."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from attention_cases import ALL_OPTIONS, assert_close, compare, option_values, products, products_of_fp32  # noqa: E402
from kernel_pytorch.functional import attention  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from kernel_pytorch import overlay  # noqa: E402

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def full_precision():
    """fp32 as it is, whatever this machine's torch is set to."""
    with products_of_fp32("ieee"):
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size, value_size", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (40, 40)])
def test_head_sizes(size, value_size, dtype):
    shape = (2, 4, 150, 190, size)
    arguments = dict(key_heads=2, value_size=value_size, device="cuda")
    compare(*products(shape, dtype, **arguments), dtype, causal=True)
    compare(*products(shape, dtype, layout="bshd", **arguments), dtype, layout="bshd")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ALL_OPTIONS)
def test_every_option(name, dtype):
    shape = (2, 4, 140, 200, 64)
    tensors = products(shape, dtype, key_heads=2, device="cuda")
    compare(*tensors, dtype, **option_values(name, shape, dtype, "cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "names", [("causal", "alibi", "sinks"), ("window", "softcap", "bias_heads"), ("lengths", "bias")]
)
def test_options_together(names, dtype):
    shape = (2, 4, 140, 200, 128)
    options = {}
    for name in names:
        options |= option_values(name, shape, dtype, "cuda")
    compare(*products(shape, dtype, key_heads=1, device="cuda"), dtype, **options)


@pytest.mark.parametrize("name", ["alibi", "softcap", "mask", "documents"])
def test_the_backward_of_hopper_takes_options(name):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")
    shape = (1, 4, 500, 460, 128)
    tensors = products(shape, torch.bfloat16, key_heads=2, device="cuda")
    if name == "documents":
        ids = [torch.arange(length, device="cuda").div(170, rounding_mode="floor")[None] for length in shape[2:4]]
        options = dict(query_segment_ids=ids[0], key_segment_ids=ids[1], causal=True, causal_offset=0)
    else:
        options = option_values(name, shape, torch.bfloat16, "cuda")
    with overlay({"attention_backward": "sm90"}):
        compare(*tensors, torch.bfloat16, **options)


# Kernels compare ids by where they change in each 64 rows, and one by one where they change more often.
@pytest.mark.parametrize("kind", ["documents", "short", "shuffled", "padded", "swapped"])
@pytest.mark.parametrize("size, causal", [(64, True), (128, True), (128, False), (256, True)])
def test_segments_change_anywhere(kind, size, causal):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for compute capability 9.0")
    shape = (2, 2, 700, 700, size)
    lengths = {"documents": (130, 64, 301, 205), "short": (9, 70, 1, 33, 200, 17, 128, 242)}.get(kind, (170, 333, 197))
    starts = torch.tensor(lengths).cumsum(0)
    ids = torch.bucketize(torch.arange(shape[2]), starts, right=True)
    ids = torch.stack([ids, (torch.arange(shape[2]) // 97)]).to(torch.int32)
    if kind == "shuffled":
        ids = ids[:, torch.randperm(shape[2])]
    elif kind == "padded":
        ids[:, 590:] = -1
    elif kind == "swapped":  # ids that fall, within 64 rows too
        ids = ids.max() - ids
    options = dict(query_segment_ids=ids.cuda(), key_segment_ids=ids.cuda(), causal=causal)
    if kind == "documents":
        options["window"] = (150, 0 if causal else 40)
    tensors = products(shape, torch.bfloat16, device="cuda")
    with overlay({"attention_forward": "sm90_wgmma", "attention_backward": "sm90"}):
        compare(*tensors, torch.bfloat16, **options)


# The softmax without a maximum must notice scores that its first block did not prepare it for.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", ["x60", "x300", "x-200", "a few x-200", "falling", "rising"])
def test_scores_far_from_those_before(keys, causal, dtype):
    shape = (2, 40, 1500, 1500, 128)
    query, key, value = (x.detach() for x in products(shape, dtype, device="cuda"))
    ramp = torch.linspace(12, 0.1, 1500, device="cuda")
    factors = torch.ones(1500, device="cuda")
    if keys.startswith("x"):
        factors[700:] = float(keys[1:])
    elif keys == "a few x-200":
        factors[100:103] = -200
    else:
        factors = ramp if keys == "falling" else ramp.flip(0)
    key = (key * factors[:, None]).to(dtype)
    output, lse = attention(query, key, value, causal=causal, return_lse=True)
    scores = query.float() @ key.float().transpose(-1, -2) / 128**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(1500, 1500, device="cuda", dtype=torch.bool).triu(1), float("-inf"))
    assert_close(output, torch.softmax(scores, -1) @ value.float(), dtype, "output")
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dropout_is_that_of_the_cpu(dtype):
    query, key, _ = (x.detach() for x in products((1, 2, 100, 64, 64), dtype, device="cuda"))
    eye = torch.eye(64, dtype=dtype, device="cuda").expand(1, 2, 64, 64)
    seed = torch.tensor([5, 6], device="cuda")
    kept = attention(query, key, eye, dropout_p=0.3, seed=seed) != 0
    on_cpu = attention(query.cpu(), key.cpu(), eye.cpu(), dropout_p=0.3, seed=seed.cpu()) != 0
    assert torch.equal(kept.cpu(), on_cpu)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [dict(causal=True), dict(bias=True), dict(window=(100, 0))], ids=str)
def test_deterministic_gradients_are_equal_a_hundred_times(options, dtype):
    query, key, value = products((2, 4, 700, 700, 128), dtype, key_heads=2, device="cuda")
    leaves = [query, key, value]
    if "bias" in options:
        leaves.append(torch.randn(4, 700, 700, device="cuda", requires_grad=True))
        options = dict(bias=leaves[-1])
    output = attention(query, key, value, deterministic=True, **options)
    grad = torch.randn_like(output)
    first = torch.autograd.grad(output, leaves, grad, retain_graph=True)
    for _ in range(99):
        again = torch.autograd.grad(output, leaves, grad, retain_graph=True)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_batch_invariant_rows_do_not_depend_on_their_neighbours():
    query, key, value = (x.detach() for x in products((5, 4, 130, 700, 128), torch.bfloat16, device="cuda"))
    together = attention(query, key, value, batch_invariant=True, causal=True)
    for i in range(5):
        alone = attention(query[i : i + 1], key[i : i + 1], value[i : i + 1], batch_invariant=True, causal=True)
        assert torch.equal(together[i], alone[0])


def test_cuda_graph_replays_with_new_data_and_new_dropout():
    query, key, value = (x.detach() for x in products((1, 2, 128, 128, 64), torch.bfloat16, device="cuda"))
    attention(query, key, value, dropout_p=0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plain = attention(query, key, value, causal=True)
        dropped = attention(query, key, value, dropout_p=0.5)
    graph.replay()
    first = dropped.clone()
    query.copy_(torch.randn_like(query))
    graph.replay()
    torch.testing.assert_close(plain, attention(query, key, value, causal=True))
    assert not torch.equal(first, dropped)


def test_memory_is_linear_in_the_sequence():
    query, key, value = (
        torch.randn(1, 8, 8192, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    attention(query, key, value, causal=True).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = attention(query, key, value, causal=True)
    after = torch.cuda.max_memory_allocated() - before
    assert after <= output.numel() * 2 + 8 * 8192 * 4 * 4 + (1 << 20)
    torch.autograd.grad(output.sum(), [query, key, value])
    assert torch.cuda.max_memory_allocated() - before <= 16 * output.numel() * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_packed_sequences_wait_for_nobody(dtype):
    tokens = torch.randn(1000, 4, 64, device="cuda", dtype=dtype)
    starts = torch.tensor([0, 300, 300, 990], device="cuda", dtype=torch.int32)
    options = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=690, max_seqlen_k=690, causal=True)
    attention(tokens, tokens, tokens, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = attention(tokens, tokens, tokens, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    alone = attention(*(tokens[300:990].transpose(0, 1)[None],) * 3, causal=True)[0].transpose(0, 1)
    torch.testing.assert_close(output[300:990], alone)
    assert (output[990:] == 0).all()


def errors_of(shape, causal, attend, dtype=torch.float32):
    """Of output and gradients against fp64, relative to the norm; and the results themselves."""
    query, key, value = (x.detach() for x in products(shape, torch.float32, device="cuda"))
    weights = torch.randn(*shape[:3], shape[4], generator=torch.Generator().manual_seed(3)).cuda()

    def results(function, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (query, key, value)]
        output = function(*leaves, causal)
        return [output, *torch.autograd.grad(output, leaves, weights.to(dtype))]

    exact = results(math_attention, torch.float64)
    ours = results(attend, dtype)
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(ours, exact, strict=True)], ours


def math_attention(query, key, value, causal):
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("tokens", [256, 2048])
def test_fp32_is_as_close_as_torch(tokens, size, causal):
    shape = (1, 4, tokens, tokens, size)
    theirs, _ = errors_of(shape, causal, math_attention)
    ours, _ = errors_of(shape, causal, lambda q, k, v, causal: attention(q, k, v, causal=causal))
    for what, mine, other in zip(("output", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert mine <= 2 * other, f"{what}: {mine:.2e} from fp64, torch's {other:.2e}"


def test_tf32_where_torch_allows_it():
    shape = (1, 4, 500, 500, 64)
    full, exact = errors_of(shape, True, lambda q, k, v, causal: attention(q, k, v, causal=causal))
    short, rounded = errors_of(shape, True, lambda q, k, v, causal: attention(q, k, v, causal=causal, allow_tf32=True))
    assert all(3e-5 < error < 2e-3 for error in short) and all(error < 2e-6 for error in full)
    with products_of_fp32("tf32"):
        _, asked = errors_of(shape, True, lambda q, k, v, causal: attention(q, k, v, causal=causal))
        _, refused = errors_of(shape, True, lambda q, k, v, causal: attention(q, k, v, causal=causal, allow_tf32=False))
    assert all(torch.equal(a, b) for a, b in zip(asked, rounded, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(refused, exact, strict=True))


def test_fp64_is_the_hosts():
    query = torch.randn(1, 2, 16, 64, device="cuda", dtype=torch.float64).requires_grad_()
    on_host = query.detach().cpu().requires_grad_()
    output, expected = attention(query, query, query, causal=True), attention(on_host, on_host, on_host, causal=True)
    assert output.is_cuda and torch.equal(output.cpu(), expected)
    output.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(query.grad.cpu(), on_host.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [64, 80, 128])
@pytest.mark.parametrize("queries", [1, 3])
def test_decoding_in_fp32(queries, size):
    query, key, value = (
        x.detach() for x in products((2, 8, queries, 3000, size), torch.float32, key_heads=2, device="cuda")
    )
    lengths = torch.tensor([3000, 1234], device="cuda")
    expected = attention(*(x.cpu().double() for x in (query, key, value)), key_lengths=lengths.cpu())
    for kernel in ("cuda_decode", "cuda_mma"):
        with overlay({"attention_forward": kernel}):
            assert_close(attention(query, key, value, key_lengths=lengths), expected, torch.float32, kernel)
