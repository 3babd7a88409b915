"""A report with every field filled, for tests of its three views. The numbers are made up: nothing quotes them."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
_PRODUCT = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64_warpgroupsize2x1x1_execute_segment_k_off"


def _kernel(name: str, calls: int, total_us: float, moved: float | None, flops: float | None, ours: bool) -> Row:
    return {"name": name, "calls": calls, "total_us": total_us, "bytes": moved, "flops": flops, "ours": ours}


def _measured(name: str, median_us: float, peak_bytes: int | None, launches: int | None) -> Row:
    return {
        "name": name,
        "median_us": median_us,
        "low_us": 0.98 * median_us,
        "high_us": 1.03 * median_us,
        "samples": 120,
        "peak_bytes": peak_bytes,
        "launches": launches,
    }


def _norm(path: str, before: float, after: float) -> Row:
    return {
        "path": path,
        "pattern": "residual + RMSNorm",
        "from": "LlamaRMSNorm",
        "to": "RMSNorm",
        "predicted_us_before": before,
        "predicted_us_after": after,
        "reason": "one pass over 33.6 MB instead of four",
        "kernel": "rms_norm_forward/sm90_tma",
    }


def sample() -> Row:
    """A fresh copy each time."""
    layers = range(4)
    return {
        "title": "Llama block, inference",
        "goal": "inference",
        "accuracy": "exact",
        "command": "kpt optimize --demo llama --goal inference --html report.html",
        "environment": {
            "device": "NVIDIA H200",
            "cpu": "Xeon Platinum 8481C",
            "torch": "2.13.0",
            "kernel_pytorch": "0.5.0",
            "threads": 16,
            "dtype": "bf16",
            "date": "2026-11-15 19:02 UTC",
            "driver": None,
        },
        "model": {"name": "LlamaForCausalLM", "parameters": 6_738_415_616, "inputs": ["input_ids 1x2048 int64"]},
        "measurements": [
            _measured("before", 5820.0, 1_900_000_000, 1284),
            _measured("after", 4110.0, 1_340_000_000, 420),
            _measured("torch.compile", 4530.0, 1_410_000_000, 610),
            _measured("torch.compile max-autotune", 4205.0, None, None),
        ],
        "replacements": [
            *(_norm(f"model.layers.{i}.input_layernorm", 31.0, 11.5) for i in layers),
            *(_norm(f"model.layers.{i}.post_attention_layernorm", 31.0, 11.5) for i in layers),
            *(
                {
                    "path": f"model.layers.{i}.mlp",
                    "pattern": "gated MLP",
                    "from": "LlamaMLP",
                    "to": "GatedMLP",
                    "predicted_us_before": None,
                    "predicted_us_after": None,
                    "reason": "silu and product are the epilogue of one product",
                    "kernel": None,
                }
                for i in layers
            ),
        ],
        "refusals": [
            {"path": "model.layers.3.self_attn", "pattern": "attention", "reason": "a forward hook reads the weights"},
            {"path": "lm_head", "pattern": "cross entropy", "reason": "the goal is inference: there is no loss"},
        ],
        "tuning": [
            {
                "op": "matmul",
                "problem": "batch=1 m=2048 n=28672 k=4096 dtype=bf16 output=bf16",
                "calls": 4,
                "share": 0.31,
                "from": "sm90_wgmma tile=128x256",
                "to": "sm90_wgmma tile=256x128",
                "from_us": 512.0,
                "to_us": 471.0,
                "kept": True,
                "reason": "1.09x",
            },
            {
                "op": "attention_forward",
                "problem": "sequences=1 heads=32 queries=2048",
                "calls": 4,
                "share": 0.09,
                "from": "sm90_wgmma",
                "to": None,
                "from_us": None,
                "to_us": None,
                "kept": False,
                "reason": "no time left in the budget: 9 % of the step, some 2.7 s, of which 0.4 s were left",
            },
        ],
        "numerics": [
            {"path": "", "quantity": "output", "max_abs": 3.1e-3, "relative": 4.2e-4, "tolerance": 1e-2, "ok": True},
            {"path": "", "quantity": "gradient", "max_abs": 1.1e-3, "relative": 7.2e-3, "tolerance": 1e-2, "ok": True},
            *(
                {
                    "path": f"model.layers.{i}.input_layernorm",
                    "quantity": "output",
                    "max_abs": 2e-3,
                    "relative": 1e-3 * (i + 1),
                    "tolerance": 1e-2,
                    "ok": True,
                }
                for i in layers
            ),
        ],
        "kernels": {
            "before": [
                _kernel(_PRODUCT, 28, 3150.0, 1.9e9, 1.9e12, False),
                _kernel("flash_fwd_kernel", 4, 620.0, 1.3e8, 1.4e11, False),
                _kernel("vectorized_elementwise_kernel<4, silu>", 96, 910.0, 2.6e9, 1.5e8, False),
                _kernel("reduce_kernel<512, 1, ReduceOp<float, MeanOps>>", 72, 640.0, 1.7e9, None, False),
                _kernel("CatArrayBatchedCopy", 16, 130.0, None, None, False),
            ],
            "after": [
                _kernel(_PRODUCT, 28, 2950.0, 1.9e9, 1.9e12, False),
                _kernel("attention_forward/sm90_wgmma", 4, 410.0, 1.3e8, 1.4e11, True),
                _kernel("rms_norm_forward/sm90_tma", 8, 96.0, 3.6e8, 5.4e8, True),
                _kernel("gated_activation_forward/cuda_rows", 4, 210.0, 8e8, 9e8, True),
                *(_kernel(f"small_kernel_{i}", 2, 14.0 - i, None, None, False) for i in range(9)),
            ],
        },
        "roofs": {"copy_bytes_per_second": 4.2e12, "matmul_flops_per_second": 7.6e14, "dtype": "bf16"},
        "notes": ["CUDA graphs were tried and gained nothing at this size."],
    }
