"""Runs the code blocks of the documents, so that nothing they show can go stale.

```python   all blocks of a document run in order, in one process of its own
```cpp      each block is a program: compiled against the installed tree and run
```bash     only with the word `run` behind it ("```bash run"); the others are for the reader's own machine
A block with the word `gpu` behind it is skipped where there is no CUDA device. The code cells of a notebook are its
Python blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Block:
    language: str
    marks: set[str]
    code: str
    line: int


def cells_of(notebook: Path) -> list[Block]:
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    return [Block("python", set(), f"# cell {i + 1}\n{''.join(cell['source'])}\n", 0) for i, cell in enumerate(cells)]


def blocks_of(document: Path) -> list[Block]:
    if document.suffix == ".ipynb":
        return cells_of(document)
    text = document.read_text()
    return [
        Block(match[1], set(match[2].split()), match[3], text.count("\n", 0, match.start()) + 1)
        for match in FENCE.finditer(text)
    ]


def documents() -> list[Path]:
    pages = [page for folder in (ROOT, ROOT / "docs", ROOT / "learn") for page in sorted(folder.glob("*.md"))]
    return [*pages, *sorted((ROOT / "examples/notebooks").glob("*.ipynb"))]


class Runner:
    def __init__(self, build: Path, scratch: Path) -> None:
        self.scratch = scratch
        self.prefix = scratch / "prefix"
        self.build = build
        environment = dict(os.environ)
        environment["PYTHONPATH"] = str(ROOT / "python")
        environment["PATH"] = os.pathsep.join([str(build), str(Path(sys.executable).parent), environment["PATH"]])
        environment["KERNEL_PYTORCH_CACHE_DIR"] = str(scratch / "cache")
        environment.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
        self.environment = environment
        devices = subprocess.run([build / "kpt", "devices"], env=environment, capture_output=True, text=True)
        self.has_gpu = "cuda:0" in devices.stdout

    def run(self, command: list[str | Path]) -> str:
        """Empty when the command succeeded, its output otherwise."""
        work = self.scratch / "work"
        work.mkdir(exist_ok=True)
        done = subprocess.run(command, cwd=work, env=self.environment, capture_output=True, text=True, timeout=300)
        return "" if done.returncode == 0 else done.stdout + done.stderr or f"exit status {done.returncode}"

    def run_python(self, document: Path, blocks: list[Block]) -> str:
        # Blank lines in front make the line numbers of a traceback those of the document.
        script = ""
        for block in blocks:
            script += "\n" * (block.line - script.count("\n")) + block.code
        path = self.scratch / (document.stem + ".py")
        path.write_text(script)
        return self.run([sys.executable, path])

    def run_cpp(self, block: Block) -> str:
        if not self.prefix.exists():
            subprocess.run(["cmake", "--install", self.build, "--prefix", self.prefix], check=True, capture_output=True)
        source, program = self.scratch / "block.cpp", self.scratch / "block"
        source.write_text(block.code)
        library = self.prefix / "lib"
        link = ["-L", library, "-lkernel_pytorch", f"-Wl,-rpath,{library}"]
        include = ["-I", self.prefix / "include"]
        compiled = self.run(["g++", "-std=c++20", "-Wall", "-Wextra", *include, source, "-o", program, *link])
        return compiled or self.run([program])

    def run_document(self, document: Path) -> tuple[int, list[str]]:
        blocks = [block for block in blocks_of(document) if self.has_gpu or "gpu" not in block.marks]
        python = [block for block in blocks if block.language == "python"]
        failures, count = [], len(python)
        if python and (problem := self.run_python(document, python)):
            failures.append(f"{document.name}: python blocks:\n{problem}")
        for block in blocks:
            if block.language == "cpp":
                problem = self.run_cpp(block)
            elif block.language == "bash" and "run" in block.marks:
                problem = self.run(["bash", "-euo", "pipefail", "-c", block.code])
            else:
                continue
            count += 1
            if problem:
                failures.append(f"{document.name}:{block.line}: {block.language} block:\n{problem}")
        return count, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("documents", type=Path, nargs="*")
    arguments = parser.parse_args()
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        runner = Runner(arguments.build.resolve(), Path(scratch))
        for document in arguments.documents or documents():
            begin = time.monotonic()
            count, problems = runner.run_document(document)
            failures += problems
            if count:
                state = "FAILED" if problems else "ok"
                print(f"{document.name}: {count} blocks {state}, {time.monotonic() - begin:.1f} s", flush=True)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
