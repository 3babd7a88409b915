"""timm, torchvision and diffusers, where they are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from .case import Case, NotBuilt, seeded

_TIMM = (
    "vit_tiny_patch16_224", "deit_tiny_patch16_224", "deit3_small_patch16_224", "cait_xxs24_224",
    "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "beit_base_patch16_224", "beitv2_base_patch16_224",
    "eva02_tiny_patch14_224", "convnext_atto", "convnextv2_atto", "mixer_s32_224", "gmlp_s16_224", "resmlp_12_224",
    "coatnet_nano_rw_224", "maxvit_nano_rw_256", "xcit_nano_12_p16_224", "pvt_v2_b0", "twins_pcpvt_small",
    "twins_svt_small", "crossvit_tiny_240", "levit_128s", "mobilevit_xxs", "mobilevitv2_050", "edgenext_xx_small",
    "efficientformer_l1", "efficientformerv2_s0", "poolformer_s12", "poolformerv2_s12", "caformer_s18",
    "convformer_s18", "davit_tiny", "focalnet_tiny_srf", "gcvit_xxtiny", "hiera_tiny_224", "mvitv2_tiny",
    "nextvit_small", "pit_ti_224", "tnt_s_legacy_patch16_224", "visformer_tiny", "volo_d1_224", "sequencer2d_s",
    "repvit_m0_9", "resnet18", "resnet26d", "resnetv2_50", "seresnet18", "regnetx_002", "regnety_002",
    "efficientnet_b0", "mobilenetv3_small_050", "mobilenetv4_conv_small", "densenet121", "dla34", "hrnet_w18_small",
    "nfnet_l0", "rexnet_100", "tf_efficientnetv2_b0", "vit_small_patch14_dinov2", "vit_base_patch16_siglip_224",
    "vit_relpos_small_patch16_224", "flexivit_small", "fastvit_t8", "tiny_vit_5m_224", "inception_next_atto",
)  # fmt: skip
_TORCHVISION = (
    "resnet18", "vit_b_32", "swin_t", "swin_v2_t", "convnext_tiny", "maxvit_t", "efficientnet_b0",
    "mobilenet_v3_small", "densenet121", "regnet_y_400mf", "squeezenet1_1", "shufflenet_v2_x0_5", "googlenet",
    "mnasnet0_5", "vgg11_bn", "alexnet",
)  # fmt: skip


def names() -> list[str]:
    """Each with the name of its library in front."""
    found = [f"timm/{name}" for name in _TIMM] if _installed("timm") else []
    found += [f"torchvision/{name}" for name in _TORCHVISION] if _installed("torchvision") else []
    return found + ([f"diffusers/{name}" for name in _DIFFUSERS] if _installed("diffusers") else [])


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def name_missing_ops() -> None:
    """torchvision's wheel for GPUs cannot load its ops into a torch for CPUs, and its import stops at their names. The
    models here call none of them."""
    if not _installed("torchvision"):
        return
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def build(name: str) -> Case:
    library, _, model = name.partition("/")
    return {"timm": _timm, "torchvision": _torchvision, "diffusers": _diffusers}[library](model)


def _images(size: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(2, 3, size, size, generator=generator),), (torch.randn(1, 3, size, size, generator=generator),)


def _timm(name: str) -> Case:
    import timm

    made: Any = None
    for options in ({"img_size": 64}, {}):
        try:
            with seeded():
                made = timm.create_model(name, pretrained=False, **options).eval()
            size = options.get("img_size") or made.default_cfg["input_size"][-1]
            if not options and not made.default_cfg.get("fixed_input_size"):
                size = 96
            inputs, other = _images(size)
            with torch.no_grad():
                made(*inputs)
            return Case(made, inputs, other)
        except Exception as error:  # not every model takes another size
            reason = f"{type(error).__name__}: {error}"
    raise NotBuilt(reason)


def _torchvision(name: str) -> Case:
    import torchvision

    options: dict[str, Any] = {"image_size": 64} if name.startswith("vit") else {}
    options |= {"input_size": (64, 64), "partition_size": 2} if name == "maxvit_t" else {}
    options |= {"init_weights": True, "aux_logits": False} if name == "googlenet" else {}
    with seeded():
        model = getattr(torchvision.models, name)(**options).eval()
    return Case(model, *_images(64))


def _diffusers(name: str) -> Case:
    with seeded():
        return _DIFFUSERS[name]()


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _dit() -> Case:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        4, 8, in_channels=4, num_layers=2, sample_size=8, patch_size=2, num_embeds_ada_norm=10
    )
    made = lambda batch: {  # noqa: E731
        "hidden_states": _drawn(batch, 4, 8, 8), "timestep": torch.arange(batch), "class_labels": torch.arange(batch),
    }  # fmt: skip
    return Case(model.eval(), made(2), made(1))


def _flux() -> Case:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    made = lambda batch: {  # noqa: E731
        "hidden_states": _drawn(batch, 16, 4), "encoder_hidden_states": _drawn(batch, 6, 32),
        "pooled_projections": _drawn(batch, 32), "timestep": torch.full((batch,), 0.5), "img_ids": _drawn(16, 3),
        "txt_ids": _drawn(6, 3),
    }  # fmt: skip
    return Case(model.eval(), made(2), made(1))


def _unet() -> Case:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=8, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32, attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip
    made = lambda batch: {  # noqa: E731
        "sample": _drawn(batch, 4, 8, 8), "timestep": torch.tensor(3), "encoder_hidden_states": _drawn(batch, 6, 32),
    }  # fmt: skip
    return Case(model.eval(), made(2), made(1))


def _vae() -> Case:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=8, sample_size=16,
    )  # fmt: skip
    return Case(model.eval(), {"sample": _drawn(2, 3, 16, 16)}, {"sample": _drawn(1, 3, 16, 16)})


def _sd3() -> Case:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=64, out_channels=4,
    )  # fmt: skip
    made = lambda batch: {  # noqa: E731
        "hidden_states": _drawn(batch, 4, 8, 8), "encoder_hidden_states": _drawn(batch, 6, 32),
        "pooled_projections": _drawn(batch, 64), "timestep": torch.arange(batch),
    }  # fmt: skip
    return Case(model.eval(), made(2), made(1))


_DIFFUSERS: dict[str, Callable[[], Case]] = {"dit": _dit, "flux": _flux, "unet": _unet, "vae": _vae, "sd3": _sd3}
