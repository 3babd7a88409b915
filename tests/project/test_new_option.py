"""What an option of attention costs: new_option.py adds one to a copy of the tree, and its files are counted."""

from __future__ import annotations

import ast
from pathlib import Path

import new_option
import pytest
from scratch import changed, compile_errors, copy_tree

MOST_FILES = 7


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This tree with the new option in it, not committed."""
    root = tmp_path_factory.mktemp("tree")
    copy_tree(root)
    new_option.add_option(root)
    return root


def test_an_option_takes_few_files(copy: Path) -> None:
    files = changed(copy)
    assert len(files) <= MOST_FILES, f"{len(files)} files for an option of attention: {files}"


@pytest.mark.parametrize("source", ["attention.cpp", "cpu/plan.cpp"])
def test_the_option_compiles(copy: Path, source: str) -> None:
    assert not compile_errors(copy, f"kernel_pytorch/ops/attention/{source}")


def test_python_passes_it_by_name(copy: Path) -> None:
    """Once in the signature, once to the options: nothing counts places."""
    tree = ast.parse((copy / "python/kernel_pytorch/_ops/attention.py").read_text())
    parameters = [node for node in ast.walk(tree) if isinstance(node, ast.arg) and node.arg == new_option.OPTION]
    keywords = [node for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == new_option.OPTION]
    assert len(parameters) == len(keywords) == 1
