"""Files that take longest come first, so that two processes that take a file at a time end at about the same time."""

from __future__ import annotations

import pytest

# A minute or more on a busy machine with two cores, longest first.
LONGEST = (
    "test_learn", "test_compile_backend_cases", "test_zoo", "test_cpp_example", "test_compile_backend",
    "test_transforms", "test_optimize_tuned", "test_torch_compile", "test_torch_border", "test_optimize_traced",
    "test_optimize_huggingface", "test_cli_doctor", "test_plain", "test_optimize_parts", "test_serving",
    "test_optimize_conditions", "test_fuzz", "test_hardware_memory", "test_experts", "test_copies",
    "test_attention_compile", "test_torch_process", "test_examples_training", "test_optimize",
    "test_examples_distributed", "test_precision", "test_demos", "test_fit_memory", "test_gpu_tests",
)  # fmt: skip
_RANKS = {name: rank for rank, name in enumerate(LONGEST)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _RANKS.get(item.path.stem, len(LONGEST)))  # stable: the others stay in their order
