# Every job does its own set-up (tools/setup), so `make run` and `make test` work from a clean clone.
# The virtual environment is .venv, the build is build/; sanitizer builds stand beside it.
SHELL := /bin/bash
PYTHON := .venv/bin/python
BUILD := build
# torch's oneDNN dies on some virtual machines that show AMX (see docs/setup.md); tests do not depend on it.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

.PHONY: help arm64 build run test test-cpp test-python test-isa test-docs fuzz zoo bench compiled format lint site wheel wheel-arm64 asan tsan clean setup setup-ci

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup:
	@tools/setup

setup-ci:
	@tools/setup --ci

build: setup  ## set up the machine and build everything into build/
	@tools/build $(BUILD)

run: build  ## show this machine, then make the bundled Llama-style model faster on it and print the report
	@$(BUILD)/kpt doctor
	@$(BUILD)/kpt optimize --demo llama --budget 15 --html $(BUILD)/report.html

test: test-cpp test-python test-docs  ## all tests: C++, Python, the code in the docs

test-cpp: build
	@ctest -j2 --no-tests=error --test-dir $(BUILD) --output-on-failure

# Two processes, a file at a time: most tests keep one core busy. Passive: one's idle threads do not spin in the other's way.
# Without --max-worker-restart=0 xdist waits for ever at the end of a run in which a process crashed; so it names the test.
PYTEST_TWICE := OMP_WAIT_POLICY=passive PYTHONPATH=python $(PYTHON) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder \
  --max-worker-restart=0 --timeout=600
test-python: build
	@$(PYTEST_TWICE) tests

# The Python tests as on a machine without AVX-512. Left out is what does not compute by our CPU kernels, or repeats with
# them what other files test: torch.compile's tracing, whole models and what optimize does to them, several processes,
# training until it converges, memory, benchmarks, pages, the course, declarations, and what needs a GPU.
ISA_LEFT_OUT := *_compile.py *_compile_backend*.py *_compat.py *_provider.py *_distributed.py *_parallel*.py *_huggingface.py \
  *_convergence.py *_benchmark*.py *_browser.py *_learn.py *_report.py *_cuda.py *_optimize*.py *_demos.py *_examples*.py \
  *_step_*.py *_pygraph.py *_offload.py *_overlap.py *_release.py *_sharded.py *_memory*.py *_hardware.py *_tuning.py \
  *_serving.py *_backend*.py *_modules.py *_declare*.py *_border.py *_errors.py *_formulas.py *_framework.py *_api.py
test-isa: build  ## the Python tests on the CPU level of AVX2
	@KERNEL_PYTORCH_CPU_ISA=v3 $(PYTEST_TWICE) \
	  $(foreach pattern,$(ISA_LEFT_OUT),--ignore-glob='$(pattern)') tests/python

test-docs: build
	@$(PYTHON) tools/run_docs.py --build $(BUILD)

fuzz: build  ## 2,000 random calls of every functional against torch in fp64; crashes and hangs are findings
	@PYTHONPATH=python:tests $(PYTHON) -m fuzz --calls 2000

zoo: build  ## optimize on some 400 architectures of other libraries, built small; a model that fails is a finding
	@PYTHONPATH=python:tests:tests/python $(PYTHON) -m zoo --jobs 2 --output $(BUILD)/zoo.json

bench: build  ## the full comparison with torch, as JSON under build/ and as a table
	@PYTHONPATH=python $(PYTHON) benchmarks/torch_norms.py --output $(BUILD)/torch_norms.json
	@PYTHONPATH=python $(PYTHON) benchmarks/torch_ops.py --output $(BUILD)/torch_ops.json
	@PYTHONPATH=python $(PYTHON) benchmarks/torch_optim.py --output $(BUILD)/torch_optim.json
	@PYTHONPATH=python $(PYTHON) benchmarks/overhead.py --output $(BUILD)/overhead.json

format: setup-ci  ## format the C++ and the Python
	@git ls-files '*.cpp' '*.h' '*.cuh' | xargs clang-format-14 -i
	@.venv/bin/ruff format python tools benchmarks tests learn demos examples && .venv/bin/ruff check --fix python tools benchmarks tests learn demos examples

lint: build setup-ci  ## layers, headers, formatting, types
	@tools/lint $(BUILD)

compiled: build setup-ci  ## list what CUDA kernels compile without flaws, so that the gate need not compile them again
	@tools/compile_kernels $(BUILD) --record

site: build setup-ci  ## the documents and the docstrings as HTML in build/site
	@$(PYTHON) tools/site.py $(BUILD)/site --strict

wheel: setup-ci  ## a manylinux wheel in dist/
	@tools/wheel dist

wheel-arm64: setup-ci  ## a wheel for arm64 in dist/, cross-compiled; its program runs under qemu
	@tools/setup --arm64
	@tools/wheel dist --arm64
	@$(PYTHON) -m pytest -q tests/installed/test_wheel_arm64.py -m wheel

asan: setup  ## C++ tests under AddressSanitizer and UBSan
	@tools/sanitize address,undefined build-asan

tsan: setup  ## C++ tests under ThreadSanitizer
	@tools/sanitize thread build-tsan

arm64:  ## the core and its C++ tests cross-compiled for arm64 and run under qemu, ops on a sample of shapes
	@tools/setup --arm64 && tools/test_arm64 build-arm64

clean:  ## remove what was built (.venv stays)
	@rm -rf build build-asan build-tsan build-wheel build-wheel-arm64 build-arm64 dist
