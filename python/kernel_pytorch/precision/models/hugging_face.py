"""Hugging Face's interface of quantisers: from_pretrained(quantization_config=KernelPyTorchConfig(...))."""

from __future__ import annotations

from typing import Any

from ..._ops.quantized_matmul import FORMATS
from .conversion import convert_model

_registered: Any = None


def register_huggingface() -> Any:
    """Registers the method "kernel_pytorch" with transformers, once, and returns its configuration class.

    `AutoModelForCausalLM.from_pretrained(name, quantization_config=register_huggingface()("nvfp4"))` loads a model and
    converts it with `convert_model`: weights are read as they are in the checkpoint and rounded layer by layer once
    they are there. The head stays, unless skip says otherwise. For inference.
    """
    global _registered
    if _registered is not None:
        return _registered
    from transformers.quantizers import (  # slow to load, and optional
        HfQuantizer,
        register_quantization_config,
        register_quantizer,
    )
    from transformers.utils.quantization_config import QuantizationConfigMixin  # with the above

    class KernelPyTorchConfig(QuantizationConfigMixin):  # type: ignore[misc]
        """What `convert_model` takes: a format, its options and the names of layers that stay."""

        def __init__(
            self, format: str = "nvfp4", group: int | None = None, asymmetric: bool = False,
            skip: tuple[str, ...] = ("lm_head",), embeddings: bool = False, experts: bool = False,
            quant_method: str = "kernel_pytorch",
        ) -> None:  # fmt: skip
            if format not in FORMATS:
                raise ValueError(f'KernelPyTorchConfig: format is "{format}"; it is one of {", ".join(FORMATS)}')
            self.quant_method = quant_method
            self.format, self.group, self.asymmetric = format, group, asymmetric
            self.skip, self.embeddings, self.experts = list(skip), embeddings, experts

    class KernelPyTorchQuantizer(HfQuantizer):  # type: ignore[misc]
        requires_calibration = False

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
            return model

        def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
            config = self.quantization_config
            return convert_model(
                model, config.format, group=config.group, asymmetric=config.asymmetric, skip=config.skip,
                embeddings=config.embeddings, experts=config.experts,
            )  # fmt: skip

        def is_serializable(self, *_: Any, **__: Any) -> bool:
            return False  # save_quantized writes such a model

        @property
        def is_trainable(self) -> bool:
            return False

    register_quantization_config("kernel_pytorch")(KernelPyTorchConfig)
    register_quantizer("kernel_pytorch")(KernelPyTorchQuantizer)
    _registered = KernelPyTorchConfig
    return _registered
