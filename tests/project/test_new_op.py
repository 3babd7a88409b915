"""What an op costs: new_op.py adds one to a copy of the tree, whose checks must pass, and its files are counted."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import new_op
import pytest
from scratch import changed, compile_errors, copy_tree

MOST_FILES = 10


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of this tree in a repository of their own, with the new op in it, not committed."""
    root = tmp_path_factory.mktemp("tree")
    copy_tree(root)
    new_op.add_op(root)
    return root


def test_an_op_takes_few_files(copy: Path) -> None:
    files = changed(copy)
    assert len(files) <= MOST_FILES, f"{len(files)} files for an op of the pointwise class: {files}"


def test_the_op_compiles(copy: Path) -> None:
    for source in (f"kernel_pytorch/ops/{new_op.OP}/{new_op.OP}.cpp", "kernel_pytorch/ops/operations.cpp"):
        assert not compile_errors(copy, source)


def test_the_tree_keeps_its_rules(copy: Path) -> None:
    done = subprocess.run([sys.executable, copy / "tools/check_layers.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tests = [copy / "tests/project" / name for name in ("test_documents.py", "test_counts.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "tree or index or folders", *tests]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def listed(module: Path, name: str) -> list[str]:
    """The texts of a list at the top of a module."""
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            found: list[str] = ast.literal_eval(node.value)
            return found
    raise AssertionError(f"{module} has no {name}")


def test_the_op_is_public_documented_sampled_and_fuzzed(copy: Path) -> None:
    """As test_public_names.py, test_torch_border.py and test_fuzz.py ask of a library that was built with the op."""
    assert new_op.OP in listed(copy / "python/kernel_pytorch/functional.py", "__all__")
    assert re.search(rf"`{new_op.OP}\(", (copy / "API.md").read_text())
    assert f"functional.{new_op.OP}," in (copy / "tests/python/op_samples.py").read_text()
    generators = "".join(path.read_text() for path in (copy / "tests/fuzz").glob("*.py"))
    assert f'@generates("{new_op.OP}")' in generators
    schemas = (copy / "tests/python/declared_schemas.txt").read_text().splitlines()
    assert [schema.split("(")[0] for schema in schemas[-3:]] == ["squash", "squash_forward", "squash_backward"]
