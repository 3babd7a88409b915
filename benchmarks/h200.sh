#!/usr/bin/env bash
# Everything a GPU machine has to show, as one command; nothing is installed there.
#
#   benchmarks/h200.sh pack   on the machine that built: puts the few files that must travel besides the checkout under
#                             build/carry (Debian's libsqlite3 and a plain pytest), strips the programs
#   benchmarks/h200.sh        on the GPU machine: checks, tests, sweeps; JSON and a log under $OUT (default build/h200)
#
# What travels: the checkout and build/{kpt,libkernel_pytorch.so,libkernel_pytorch_torch.so,kernel_pytorch_tests,carry,bundle}.
# Every stage has its own time limit and none stops the others; the last lines say how each ended.
set -uo pipefail
cd "$(dirname "$0")/.."
carry=build/carry

pack() {
  rm -rf $carry
  mkdir -p $carry/lib $carry/python
  cp -L "$(ldd build/libkernel_pytorch.so | awk '/libsqlite3/ { print $3 }')" $carry/lib/
  strip build/kpt build/libkernel_pytorch.so build/libkernel_pytorch_torch.so build/kernel_pytorch_tests
  # hypothesis has a compiled part: of the GPU machine's Python, not of this one's.
  .venv/bin/pip install --quiet --target $carry/python --python-version "${GPU_PYTHON:-3.12}" --only-binary=:all: pytest hypothesis
  du -sch build/kpt build/libkernel_pytorch.so build/libkernel_pytorch_torch.so build/kernel_pytorch_tests $carry
}
if [[ "${1:-}" == pack ]]; then
  set -e
  pack
  exit
fi

out=${OUT:-build/h200}
python=${PYTHON:-python3}
mkdir -p "$out"
rm -f "$out/log.txt"
cache=$(mktemp -d)
export LD_LIBRARY_PATH=$PWD/$carry/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export PYTHONPATH=$PWD/python:$PWD/benchmarks PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export KERNEL_PYTORCH_CACHE_DIR=$cache
limit_seconds=${H200_LIMIT_SECONDS:-570}
summary=()

# stage NAME SECONDS COMMAND...: its output ends in $out/log.txt, or in $stdout where that is set; a failure shows its end.
stage() {
  local name=$1 seconds=$2 left=$((limit_seconds - SECONDS)) begin=$SECONDS status
  shift 2
  ((seconds < left)) || seconds=$left
  if ((seconds < 5)); then
    summary+=("$name: not run, the time was used up")
    return
  fi
  timeout "$seconds" "$@" >"${stdout:-$cache/log}" 2>"$cache/errors"
  status=$?
  [[ -n ${stdout:-} ]] && : >"$cache/log"
  { echo "=== $name"; cat "$cache/log" "$cache/errors"; } >>"$out/log.txt"
  summary+=("$name: $([[ $status == 0 ]] && echo ok || echo "FAILED ($status)"), $((SECONDS - begin)) s")
  if [[ $status != 0 ]]; then
    printf -- '--- %s\n' "$name"
    tail -n 25 "$cache/log" "$cache/errors"
  fi
}
# pytest of this machine where there is one; the carried one otherwise.
pytest_gpu() {
  $python -c 'import pytest' 2>/dev/null || export PYTHONPATH=$PYTHONPATH:$PWD/$carry/python
  $python -m pytest -q -m gpu -rs -p no:cacheprovider tests
}
export -f pytest_gpu
export python carry

# Kernels compiled ahead (kpt compile --arch sm_90a --all --output build/bundle), where they were carried along.
[[ -d build/bundle ]] && export KERNEL_PYTORCH_BUNDLE=$PWD/build/bundle
stage doctor 60 build/kpt doctor
stage cpp_tests 150 build/kernel_pytorch_tests --gtest_brief=1
stage verify 120 build/kpt verify --device cuda
stage pytest 150 bash -c pytest_gpu
stage torch_norms 150 $python benchmarks/torch_norms.py --device cuda --quick --output "$out/torch_norms.json"
stage torch_ops 200 $python benchmarks/torch_ops.py --device cuda --quick --compile --output "$out/torch_ops.json"
stage torch_optim 60 $python benchmarks/torch_optim.py --device cuda --quick --output "$out/torch_optim.json"
stage memory 120 $python benchmarks/memory.py --device cuda --output "$out/memory.json"
stage overhead 60 env -u KERNEL_PYTORCH_BUNDLE $python benchmarks/overhead.py --output "$out/overhead.json"
stage call_path 60 $python benchmarks/call_path.py
stage llama_block 120 $python benchmarks/llama_block.py --output "$out/llama_block.json"
stage variable_length 200 $python benchmarks/variable_length.py --device cuda --quick --output "$out/variable_length.json"
for op in rms_norm layer_norm; do
  stdout=$out/bench_$op.json stage "bench_$op" 60 build/kpt bench $op --device cuda --dtype bf16 --all --json --seconds 0.1 \
    --shape 16384x4096 --shape 8192x8192 --shape 2048x131072
done

for result in torch_norms torch_ops torch_optim overhead llama_block variable_length; do
  [[ -f $out/$result.json ]] && $python benchmarks/table.py "$out/$result.json"
done
printf '%s\n' "${summary[@]}" | tee "$out/summary.txt"
rm -rf "$cache"
! grep -qE 'FAILED|not run' "$out/summary.txt"
