"""The documents and the docstrings as a site: python tools/site.py OUTPUT [--strict]

Pages are the project's Markdown as it stands; the reference is made from docstrings. Sphinx works on a copy of the
tracked files, since links between pages and sources are relative. Nothing is fetched. It needs sphinx, myst-parser and
furo (tools/requirements-ci.txt).
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMPORT_PATHS = ("kernel_pytorch.optimizations", "kernel_pytorch.core.compilers")  # of the seeds: names of other pages
PARTS = {
    "Start": ["README", "docs/setup", "API", "demos/README", "examples/README"],
    "Reference": ["reference/*"],
    "Course": ["learn/README", "learn/[01]*/README", "learn/profiling", "learn/numerics", "learn/when_kernels_pay"],
    "Understand": ["docs/*", "BENCHMARKS", "kernel_pytorch/ops/README"],
    "Take part": ["CONTRIBUTING", "SECURITY", "CHANGELOG", "kernel_pytorch/**/NOTES", "cmake/NOTES"],
}
SETTINGS = {
    "project": "KernelPyTorch",
    "extensions": ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"],
    "source_suffix": {".md": "markdown", ".rst": "restructuredtext"},
    "exclude_patterns": [".github", "tests"],
    "html_theme": "furo",
    "html_title": "KernelPyTorch",
    "myst_heading_anchors": 4,
    "myst_fence_as_directive": [],
    "autodoc_typehints": "none",  # signatures of tensors are long; the options say what is meant
    "default_role": "any_code",
    # Links to folders have no page; that every link leads somewhere is tests/project/test_documents.py.
    "suppress_warnings": ["myst.xref_missing", "myst.header", "misc.highlighting_failure", "toc.not_readable"],
}
# Docstrings are plain text: `name` is code, and other marks of reStructuredText are themselves.
SET_UP = r"""
import re
from docutils import nodes
from docutils.parsers.rst import roles

def _code(name, rawtext, text, lineno, inliner, options=None, content=None):
    return [nodes.literal(rawtext, text)], []

def _plain(app, what, name, obj, options, lines):
    result, is_code = [], False
    for line in lines:
        starts = line.startswith("    ") and result and not result[-1] and not result[-2:-1][0].startswith(" ")
        if starts and not is_code:  # an indented paragraph
            result += ["::", ""]
            is_code = True
        elif line and not line.startswith("    "):
            is_code = False
        if not is_code:
            parts = re.split("(`[^`]*`)", line)
            parts[::2] = [re.sub(r"[*|]|_(?!\w)", r"\\\g<0>", part) for part in parts[::2]]
            line = "".join(parts)
        result.append(line)
    lines[:] = result

def setup(app):
    roles.register_local_role("any_code", _code)
    app.connect("autodoc-process-docstring", _plain, priority=100)  # before napoleon reads the sections
"""


def copy_tracked(target: Path) -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in listed:
        path = ROOT / name
        if path.is_file() and not path.is_symlink() and "fuzz_corpus" not in name:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target / name)


def public_modules() -> list[str]:
    """Packages, and modules beside them at the top, with public names of their own."""
    import kernel_pytorch  # found in the folder that main puts on the path

    found = pkgutil.walk_packages(kernel_pytorch.__path__, "kernel_pytorch.")
    names = [each.name for each in found if (each.ispkg or each.name.count(".") == 1) and "._" not in each.name]
    return ["kernel_pytorch", *(name for name in names if not name.startswith((*IMPORT_PATHS, "kernel_pytorch.__")))]


def write_reference(target: Path) -> None:
    """A page for every module: what its __all__ names. What two of them name has its entry in the first."""
    target.mkdir()
    seen: set[int] = set()
    for name in public_modules():
        module = importlib.import_module(name)
        public = sorted(each for each in getattr(module, "__all__", []) if not each.startswith("__"))
        lines = [name, "=" * len(name), "", (module.__doc__ or "").strip().split("\n\n")[0], ""]
        for each in public:
            value = getattr(module, each)
            kind = "autoclass" if isinstance(value, type) else "autofunction" if callable(value) else "py:data"
            lines += [f".. {kind}:: {name}.{each}", *(["   :members:"] if kind == "autoclass" else [])]
            lines += [*(["   :no-index:"] if id(value) in seen else []), ""]
            seen.add(id(value))
        if public:
            (target / f"{name}.rst").write_text("\n".join(lines))


def write_frame(source: Path) -> None:
    contents = ["# KernelPyTorch", "", "Kernels for CPUs and NVIDIA GPUs, for PyTorch, JAX, C++ and C.", ""]
    for caption, pages in PARTS.items():
        contents += ["```{toctree}", ":glob:", ":maxdepth: 1", f":caption: {caption}", "", *pages, "```", ""]
    (source / "index.md").write_text("\n".join(contents))
    settings = [f"{name} = {value!r}" for name, value in SETTINGS.items()]
    (source / "conf.py").write_text("\n".join(settings) + "\n" + SET_UP)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--strict", action="store_true", help="a warning fails")
    words = parser.parse_args()
    sys.path.insert(0, str(ROOT / "python"))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        copy_tracked(source)
        write_reference(source / "reference")
        write_frame(source)
        command = [
            sys.executable,
            "-m",
            "sphinx",
            "-q",
            "-j",
            "auto",
            "-b",
            "html",
            "-d",
            f"{folder}/doctrees",
            source,
            words.output,
        ]
        paths = [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(
            [*command, *(["-W", "--keep-going"] if words.strict else [])], env=environment, check=False
        )
    if done.returncode == 0:
        print(f"site: {len(list(words.output.rglob('*.html')))} pages in {words.output}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
