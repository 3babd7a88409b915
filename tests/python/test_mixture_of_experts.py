"""Layers of experts: values against a loop over them, kinds, losses, capacities, the experts of Hugging Face."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_pytorch.mixture_of_experts import (
    GLaMStyleMoE,
    HashRouter,
    LoadBalancer,
    MoEConfig,
    MoELayer,
    SwitchRouter,
    SwitchTransformerMoE,
    TopKRouter,
    create_moe,
    create_moe_layer,
    create_router,
)
from torch import Tensor

from kernel_pytorch import functional as F


def by_loop(layer: MoELayer, x: Tensor) -> Tensor:
    """Every expert by torch's own functions."""
    rows = x.reshape(-1, x.shape[-1]).double()
    routing = layer.router(x)
    experts, weights = routing.experts.reshape(len(rows), -1), routing.weights.reshape(len(rows), -1).double()
    kept = routing.row_of_token.reshape(len(rows), -1) >= 0
    output = torch.zeros_like(rows)
    for e in range(layer.config.num_experts):
        token, slot = ((experts == e) & kept).nonzero(as_tuple=True)
        v = rows[token] @ layer.gate_up[e].double().T
        v = v if layer.gate_up_bias is None else v + layer.gate_up_bias[e].double()
        if layer.config.activation == "relu":
            hidden = v.relu()
        else:
            gate, up = v.chunk(2, -1)
            silu, gelu = torch.nn.functional.silu, torch.nn.functional.gelu
            hidden = (silu(gate) if layer.config.activation == "swiglu" else gelu(gate)) * up
        y = hidden @ layer.down[e].double().T
        y = y if layer.down_bias is None else y + layer.down_bias[e].double()
        output.index_add_(0, token, y * weights[token, slot, None])
    return output.reshape(x.shape)


@pytest.mark.parametrize("kind", ["standard", "switch", "glam", "mixtral", "deepseek"])
def test_kinds_compute_their_experts(kind: str) -> None:
    torch.manual_seed(0)
    layer = create_moe_layer(kind, 24, num_experts=6, d_hidden=20).eval()
    x = torch.randn(3, 11, 24, requires_grad=True)
    output, losses = layer(x, return_losses=True)
    torch.testing.assert_close(output.double(), by_loop(layer, x), rtol=1e-4, atol=1e-5)
    (output.square().sum() + losses["load_balance_loss"] + losses["router_z_loss"]).backward()
    gradients = [x.grad, *(p.grad for p in layer.parameters())]
    assert all(g is not None and torch.count_nonzero(g) > 0 for g in gradients)
    torch.testing.assert_close(losses["expert_utilization"].sum(), torch.tensor(1.0))
    assert create_moe is create_moe_layer


def test_a_shared_expert_is_added_for_every_token() -> None:
    torch.manual_seed(1)
    layer = MoELayer(16, 8, 4, 2, shared_hidden=12)
    x = torch.randn(5, 16)
    assert layer.shared_in is not None and layer.shared_out is not None
    gate, up = layer.shared_in(x).chunk(2, -1)
    shared = layer.shared_out(torch.nn.functional.silu(gate) * up)
    torch.testing.assert_close(layer(x).double(), by_loop(layer, x) + shared.double(), rtol=1e-4, atol=1e-5)


def test_tokens_are_dropped_only_on_request_and_counted() -> None:
    torch.manual_seed(2)
    x = torch.randn(64, 16)
    assert MoELayer(16, 8, 8, 2)(x, return_losses=True)[1]["tokens_dropped"] == 0
    config = MoEConfig(8, 2, capacity_factor=1.0)
    assert config.capacity(64) == 16  # 64 tokens, two experts each, over eight
    layer = MoELayer(16, 8, config=config)
    routing = layer.router(x)
    assert routing.dropped == (routing.counts - 16).clamp(min=0).sum()
    torch.testing.assert_close(layer(x).double(), by_loop(layer, x), rtol=1e-4, atol=1e-5)


def test_selection_bias_moves_towards_balance() -> None:
    torch.manual_seed(3)
    router = create_router("sigmoid", 8, 4, 1)
    x = torch.randn(400, 8) + 1.0
    first = router(x)
    for _ in range(60):
        router.update_selection_bias(router(x).counts, 0.02)
    assert router(x).counts.max() < first.counts.max()
    with pytest.raises(RuntimeError, match="selection_bias=True"):
        TopKRouter(8, 4).update_selection_bias(first.counts)


def test_routers_of_training_jitter() -> None:
    router = SwitchRouter(8, 4)
    x = torch.randn(10, 8)
    assert not torch.equal(router.logits(x), router.logits(x))
    assert torch.equal(router.eval().logits(x), router.logits(x))


@pytest.mark.parametrize(("make", "message"), [
    (lambda: create_moe("dense", 8), "moe_type"), (lambda: MoELayer(8, top_k=9), "top_k is 9"),
    (lambda: MoELayer(8, activation="mish"), "activation"), (lambda: MoELayer(8, dropout=1), "no option 'dropout'"),
    (lambda: MoEConfig(capacity_factor=0.0), "capacity_factor"), (lambda: create_router("hash", 8, 4), "kind"),
])  # fmt: skip
def test_bad_numbers_say_what_to_do(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(("make", "kind"), [(SwitchTransformerMoE, "switch"), (GLaMStyleMoE, "glam")])
def test_named_layers_are_their_kinds(make: Any, kind: str) -> None:
    assert make(16, 8, 4).config == create_moe_layer(kind, 16, 4, d_hidden=8).config
    assert make(16, 8, 4, capacity_factor=None).config.capacity_factor is None


def test_learned_router_has_a_gradient_in_both_layers() -> None:
    router = create_router("learned", 16, 4, top_k=2, router_hidden=8)
    routing = router(torch.randn(10, 16))
    routing.weights.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in router.parameters())


@pytest.mark.parametrize(("experts", "k"), [(8, 1), (12, 5), (7, 7), (1, 1)])
def test_hash_router_spreads_ids_and_repeats(experts: int, k: int) -> None:
    ids = torch.arange(6000).view(2, 3000)
    router = HashRouter(experts, k)
    routing = router(ids)
    assert torch.equal(routing.experts, router(ids).experts)
    assert experts == 1 or not torch.equal(routing.experts, HashRouter(experts, k, seed=1)(ids).experts) or k == experts
    assert all(len(set(one)) == k for one in routing.experts.flatten(0, 1)[:200].tolist())
    even = 6000 * k / experts
    assert (routing.counts - even).abs().max() < 0.15 * even
    layer = MoELayer(16, 8, experts, k)
    assert layer(torch.randn(2, 3000, 16), routing=routing).shape == (2, 3000, 16)
    with pytest.raises(ValueError, match="ids of tokens"):
        router(torch.randn(3))


@pytest.mark.parametrize("loss", LoadBalancer.KINDS)
def test_balancing_losses_are_least_where_experts_are_used_alike(loss: str) -> None:
    balancer = LoadBalancer(loss, weight=1.0)
    even = torch.eye(4).repeat(8, 1) * 8
    skewed = (torch.randn(32, 4) + torch.tensor([6.0, 0, 0, 0])).requires_grad_()
    least = balancer(even, F.route(even, 1))
    assert float(least) == pytest.approx(0.0 if loss == "entropy" else 1.0, abs=1e-3)
    value = balancer(skewed, F.route(skewed, 1))
    assert value > least + 0.1
    (gradient,) = torch.autograd.grad(value, skewed)
    assert gradient[:, 0].sum() > 0  # descent takes from the first expert
    if loss == "switch":
        assert value.item() == pytest.approx(F.route(skewed, 1).aux_loss.item(), rel=1e-5)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "olmoe", "deepseek_v3"])
@pytest.mark.parametrize("says", [True, False])
def test_hugging_face_experts_are_found_by_numbers(name: str, says: bool) -> None:
    """Each model's experts module has a forward on moe_mlp, with the same values and gradients; also where it does not
    say how its weights lie, as in older versions of transformers."""
    transformers = pytest.importorskip("transformers")
    from kernel_pytorch._optimize.patterns.hugging_face.grouped_experts import forward_of

    torch.manual_seed(4)
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=32)
    sizes |= dict(intermediate_size=24, moe_intermediate_size=24, num_experts_per_tok=2)
    special = {"deepseek_v3": dict(n_routed_experts=8, n_group=2, topk_group=1, first_k_dense_replace=0, q_lora_rank=8,
                                   kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)}  # fmt: skip
    count = special.get(name, dict(num_local_experts=4, num_experts=4))
    config = transformers.AutoConfig.for_model(name, **{**sizes, **count})
    model = transformers.AutoModel.from_config(config)
    module = next(m for path, m in model.named_modules() if path.endswith("mlp.experts"))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(9, 16, requires_grad=True)
    weights = torch.rand(9, 2, requires_grad=True)
    chosen = torch.stack([torch.randperm(module.num_experts)[:2] for _ in range(9)])
    expected = module(x, chosen, weights)
    for flag in () if says else ("has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm"):
        delattr(module, flag)
    forward = forward_of(module, chosen)
    assert forward is not None
    leaves = [x, weights, *module.parameters()]
    upstream = torch.randn(9, 16)
    found = forward.__get__(module)(x, chosen, weights)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    pairs = zip(torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(expected, leaves, upstream))
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("folder", "name"), [
    ("deepseek_v4", "DeepseekV4Experts"), ("glm4_moe", "Glm4MoeExperts"), ("granitemoe", "GraniteMoeExperts"),
    ("hunyuan_v1_moe", "HunYuanMoEV1Experts"), ("jamba", "JambaExperts"), ("minimax", "MiniMaxExperts"),
    ("minimax_m3_vl", "MiniMaxM3VLExperts"), ("nemotron_h", "NemotronHExperts"), ("phimoe", "PhimoeExperts"),
])  # fmt: skip
def test_experts_of_other_families(folder: str, name: str) -> None:
    """Built from small configurations, without their models."""
    pytest.importorskip("transformers")
    from kernel_pytorch._optimize.patterns.hugging_face.grouped_experts import forward_of

    source = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    make = getattr(source, name, None)
    if make is None:
        pytest.skip(f"this version of transformers has no {name}")
    known = [one for one in vars(source).values() if isinstance(one, type) and one.__name__.endswith("Config")]
    config = next(one for one in known if one.__name__ != "PreTrainedConfig")().get_text_config()
    sizes = dict(hidden_size=16, intermediate_size=24, moe_intermediate_size=24, num_experts=4, num_local_experts=4)
    for key, value in (sizes | dict(n_routed_experts=4, moe_latent_size=None)).items():
        setattr(config, key, value)
    torch.manual_seed(5)
    module = make(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x, weights = torch.randn(9, 16), torch.rand(9, 2)
    chosen = torch.stack([torch.randperm(module.num_experts)[:2] for _ in range(9)])
    forward = forward_of(module, chosen)
    assert forward is not None
    torch.testing.assert_close(forward.__get__(module)(x, chosen, weights), module(x, chosen, weights), rtol=1e-4,
                               atol=1e-4)  # fmt: skip
