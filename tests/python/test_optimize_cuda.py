"""kernel_pytorch.optimize on a GPU: half precision, autocast, CUDA graphs, FP8."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
from kernel_pytorch._optimize import demo_models  # noqa: E402
from kernel_pytorch._optimize.patterns import linears, names  # noqa: E402
from kernel_pytorch._optimize.patterns.context import Context  # noqa: E402
from kernel_pytorch._optimize.record import record  # noqa: E402
from kernel_pytorch._optimize.verify import row_error  # noqa: E402
from test_optimize import always, one_thread, optimize, patterns, untouched  # noqa: E402, F401
from test_optimize_train import float8_pays  # noqa: E402, F401

import kernel_pytorch  # noqa: E402

pytestmark = pytest.mark.gpu


def demo(name):
    torch.manual_seed(0)
    made = {
        "llama": (demo_models.Llama(256, 2, 4, 2, 512, 256), torch.randint(512, (2, 128))),
        "gpt": (demo_models.GPT(256, 2, 4, 512, 256), torch.randint(512, (2, 128))),
        "bert": (demo_models.Bert(256, 2, 4, 512, 256, 0.0), torch.randint(512, (2, 128))),
        "vit": (demo_models.ViT(256, 2, 4, 64, 8, 16), torch.randn(2, 3, 64, 64)),
    }[name]
    return made[0].cuda(), made[1].cuda()


@pytest.mark.parametrize("goal", ["inference", "train"])
@pytest.mark.parametrize("name", ["llama", "gpt", "bert", "vit"])
def test_bundled_models_in_half_precision(name, goal, always):  # noqa: F811
    model, x = demo(name)
    model.to(torch.bfloat16).train(goal == "train")
    x = x.bfloat16() if x.is_floating_point() else x
    reference = copy.deepcopy(model).eval()
    result = optimize(model, x, goal=goal)
    assert patterns(result), result.report
    assert all(one["ok"] for one in result.report.data["numerics"] if one["path"] == "")
    model.eval()
    with torch.no_grad():
        for _ in range(3):
            assert row_error(model(x), reference(x))[1] < 0.15
        if goal == "inference":
            assert "cuda graph" in patterns(result)
            other = x.flip(0)
            assert row_error(model(other), reference(other))[1] < 0.15
            shorter = x[:1]
            assert row_error(model(shorter), reference(shorter))[1] < 0.15
    result.restore()
    assert untouched(model)
    with torch.no_grad():
        assert torch.equal(model(x), reference(x))


@pytest.mark.parametrize("goal", ["inference", "train"])
def test_autocast(goal, always):  # noqa: F811
    model, x = demo("gpt")
    reference = copy.deepcopy(model)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        result = optimize(model, x, goal=goal)
        assert patterns(result)
        after, before = model(x), reference(x)
    assert after.dtype is before.dtype
    assert row_error(after, before)[1] < 0.15


def test_float8(always, float8_pays):  # noqa: F811
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("no FP8 units")
    torch.manual_seed(0)
    block = demo_models.LlamaBlock(1024, 8, 2, 4096).cuda().bfloat16()
    x = torch.randn(4, 2048, 1024, device="cuda", dtype=torch.bfloat16)
    angles = torch.outer(torch.arange(2048), 1e4 ** (-torch.arange(0, 128, 2) / 128)).cuda()
    cos, sin = (torch.cat([f(angles)] * 2, -1)[None].bfloat16() for f in (torch.cos, torch.sin))
    before = block(x, cos, sin)
    others = [name for name in names() if name != "linears"]  # with which, where all is taken, bf16 takes FP8's place
    result = optimize(block, (x, cos, sin), goal="train", accuracy="tolerant", patterns=others)
    narrow = {one["path"] for one in result.report.data["replacements"] if "FP8" in one["to"]}
    assert narrow == {"mlp", "self_attn", "self_attn.o_proj"}, str(result.report)
    assert 1e-4 < row_error(block(x, cos, sin), before)[1] < 0.25
    block(x, cos, sin).sum().backward()
    kernel_pytorch.restore(block)
    assert torch.equal(block(x, cos, sin), before)


def test_a_vocabulary_that_is_not_aligned():
    """Its padded product is proposed, computes the same, and goes away again; whether it pays is the clock's to say."""
    torch.manual_seed(0)
    model = demo_models.GPT(256, 1, 4, 5027, 256).cuda()
    x = torch.randint(5027, (2, 128), device="cuda")
    reference = copy.deepcopy(model)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        context = Context(model, "train", "exact", x.device, record(model, lambda: model(x)))
        proposal = linears.find(context, "head", model.head, context.recording.call("head"))
        assert "padded" in proposal.ways[0].name
        change = proposal.ways[0].change()
        change.apply()
        output, expected = model(x), reference(x)
        assert output.shape == expected.shape and output.stride(-2) % 8 == 0
        assert row_error(output, expected)[1] < 0.05
    grad = torch.randn_like(output)
    output.backward(grad)
    expected.backward(grad)
    assert row_error(model.head.weight.grad, reference.head.weight.grad)[1] < 0.05
    change.undo()
    assert "forward" not in vars(model.head)
