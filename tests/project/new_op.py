"""Adds an op of the pointwise class to a checkout, as a person would: `python tests/project/new_op.py CHECKOUT`.

`squash` is tanh of each element, on the kernels of the pointwise engine, with a gradient. test_new_op.py adds it to a
copy of the tree and counts the files. To see it compute, build that checkout and run `make test` there.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

OP = "squash"

CONTRACT = """\
// output = tanh(x), per element. Arithmetic is fp32 (fp64 for fp64), rounded once. NaN propagates.
//
// Shapes: x [..., columns] with any strides. Types: fp32, bf16, fp16 everywhere, fp64 on the CPU. Empty x is legal.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::squash {

struct Forward {
  TensorView x{};
  TensorView output{};  // x's shape and type, contiguous
};
inline constexpr auto kForwardFields =
    fields<Forward>(input<&Forward::x>({.shape = "... columns", .leads = true}),
                    output<&Forward::output>({.shape = "... columns", .dtype = "x"}));

struct Backward {
  TensorView grad_output{};
  TensorView x{};
  TensorView grad_input{};  // x's shape and type, contiguous
};
inline constexpr auto kBackwardFields =
    fields<Backward>(input<&Backward::grad_output>({.shape = "... columns"}),
                     input<&Backward::x>({.shape = "... columns", .leads = true}),
                     output<&Backward::grad_input>({.shape = "... columns", .dtype = "x"}));

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void forward(const Forward& arguments, Context& context);
KP_EXPORT void backward(const Backward& arguments, Context& context);

}  // namespace kernel_pytorch::squash
"""

SOURCE = """\
// The kernels of squash are the pointwise engine's; this is what makes a problem one of squash.
#include "kernel_pytorch/ops/squash/squash.h"

#include "kernel_pytorch/ops/engines/pointwise/operation.h"
#include "kernel_pytorch/registry/choose.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::squash {
namespace {

constexpr auto kKind = pointwise::Kind::kTanh;

pointwise::ForwardProblem make_forward(const registry::ProblemRequest& request) {
  registry::check_options(request, {});
  return pointwise::make_forward(request, false, "tanh");
}
pointwise::BackwardProblem make_backward(const registry::ProblemRequest& request) {
  registry::check_options(request, {});
  return pointwise::make_backward(request, false, "tanh");
}

template <class Problem>
void check(Problem& problem, Device device) {
  pointwise::check_and_merge("squash", "x", problem, device);
}

std::vector<registry::ProblemRequest> shapes() {
  registry::RequestList add;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    for (int64_t columns : {1, 7, 8, 100, 1024, 4100}) add({13, columns}, dtype);
    add({0, 16}, dtype);
  }
  return std::move(add.all);
}

constinit const registry::Operation<pointwise::ForwardProblem> kForward =
    pointwise::forward_operation("squash_forward", make_forward, check, shapes);
constinit const registry::Operation<pointwise::BackwardProblem> kBackward =
    pointwise::backward_operation("squash_backward", make_backward, check, shapes);

}  // namespace

void forward(const Forward& arguments, Context& context) {
  pointwise::ForwardProblem problem;
  problem.kind = kKind;
  problem.gate = arguments.x;
  problem.output = arguments.output;
  check(problem, context.device());
  registry::run_best(kForward, problem, context);
}

void backward(const Backward& arguments, Context& context) {
  pointwise::BackwardProblem problem;
  problem.kind = kKind;
  problem.grad_output = arguments.grad_output;
  problem.gate = arguments.x;
  problem.grad_gate = arguments.grad_input;
  check(problem, context.device());
  registry::run_best(kBackward, problem, context);
}

constexpr auto kDeclarations =
    registry::join(registry::differentiable<Forward, forward>("squash", "squash_forward", kForwardFields),
                   registry::plain<Backward, backward>("squash_backward", kBackwardFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kForward, kBackward>};

}  // namespace kernel_pytorch::squash
"""

SCHEMAS = """\
squash(Tensor x) -> Tensor
squash_forward(Tensor x) -> Tensor
squash_backward(Tensor grad_output, Tensor x) -> Tensor
"""

PYTHON = '''\
"""squash."""

from __future__ import annotations

from torch import Tensor

from ._declare import differentiable


def squash(x: Tensor) -> Tensor:
    """tanh of each element of x [..., columns]; fp32, bf16, fp16, and fp64 on the CPU."""
    if x.dim() == 0:
        return squash(x[None])[0]
    return _squash(x)  # type: ignore[no-any-return]


_squash = differentiable("squash", instead="torch.tanh")
'''

GENERATOR = """

@generates("squash")
def squash(d: Draw, name: str) -> Case:
    x = d.tensor(d.shape(0, 4), d.dtype(), scale=d.magnitude())
    case = Case((x,), {}, torch.tanh, least_top=1.0)
    if d.maybe(0.08):
        case.args, case.refused = (x.to(torch.int64),), "x is of integers"
    return case
"""


def insert(path: Path, pattern: str, text: str) -> None:
    """Puts `text` behind the last match of `pattern`, a line or lines; raises where there is none."""
    old = path.read_text()
    matches = list(re.finditer(pattern, old, re.MULTILINE))
    if not matches:
        raise ValueError(f"{path} has nothing like {pattern!r}: new_op.py no longer knows how an op is added")
    end = matches[-1].end()
    path.write_text(old[:end] + text + old[end:])


def add_op(root: Path) -> None:
    folder = root / "kernel_pytorch/ops" / OP
    folder.mkdir()
    (folder / f"{OP}.h").write_text(CONTRACT)
    (folder / f"{OP}.cpp").write_text(SOURCE)
    operations = root / "kernel_pytorch/ops/operations.cpp"
    insert(operations, r"^  OP\(\w+\) *(?=\n\n|\n$)", " \\\n  OP(squash)")
    row = f"| [{OP}]({OP}/{OP}.h) | `{OP}_forward`, `{OP}_backward` | tanh of each element |\n"
    insert(root / "kernel_pytorch/ops/README.md", r"^\| \[dropout\].*\n", row)

    (root / "python/kernel_pytorch/_ops" / f"{OP}.py").write_text(PYTHON)
    functional = root / "python/kernel_pytorch/functional.py"
    insert(functional, r"^from \._ops\.softmax import .*\n", f"from ._ops.{OP} import {OP}\n")
    insert(functional, r'^    "softmax_",\n', f'    "{OP}",\n')
    table = f"\n`{OP}(x)` is tanh of each element:\n\n<!-- options: functional.{OP} -->\n<!-- end -->\n"
    insert(root / "API.md", r"^<!-- options: functional\.activation -->\n(?:\|.*\n)*<!-- end -->\n", table)

    insert(root / "tests/python/declared_schemas.txt", r"\n(?!.*\n)", SCHEMAS)
    sample = f"    _both(functional.{OP}, leaf(2, 3, 8))\n"
    insert(root / "tests/python/op_samples.py", r"^    _both\(functional\.dropout,.*\n", sample)
    insert(root / "tests/fuzz/elementwise.py", r"\Z", GENERATOR)


if __name__ == "__main__":
    add_op(Path(sys.argv[1]))
