// The host side of the CPU kernels with tables that the registry does not run: AMX against the reference, on every
// shape in bf16 and of the named precisions, with tiles emulated, and with AMX where the machine has it; and blocks,
// chunks and slabs so small that small shapes have several of each.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/emulation_test.h"
#include "kernel_pytorch/ops/matmul/cpu/plan.h"
#include "kernel_pytorch/registry/declared.h"

namespace kernel_pytorch::matmul {
#if defined(__x86_64__)
namespace isa_v4 {
extern const ProductKernels kAmxProductKernels;  // matmul/cpu/amx_probes_isa.cpp
extern const ProductKernels kDotProductKernels;  // matmul/cpu/dots_probes_isa.cpp
}  // namespace isa_v4
#endif
namespace {

struct Bound {
  Product problem;
  std::vector<std::vector<char>> memory;
  std::vector<TensorView> outputs;
};

Bound bind(const registry::ProblemRequest& request) {
  Bound bound{registry::make_problem(kMultiply, request), {}, {}};
  kMultiply.visit_tensors(
      bound.problem,
      [](void* state, std::string_view, registry::Role role, TensorView& view) {
        auto& to = *static_cast<Bound*>(state);
        const int64_t elements = span_elements(view);
        to.memory.emplace_back(static_cast<size_t>(elements * size_of(view.dtype) + 64));
        view.data = to.memory.back().data();
        if (role == registry::Role::kOutput) {
          to.outputs.push_back(view);
          return;
        }
        std::mt19937 random(static_cast<unsigned>(to.memory.size()));
        std::normal_distribution<double> normal;
        for (int64_t i = 0; i < elements; ++i) store_element(view.data, view.dtype, i, normal(random));
      },
      &bound);
  return bound;
}

std::vector<double> values_of(const TensorView& view) {
  std::vector<double> values;
  const int64_t rows = view.rank == 3 ? view.sizes[1] : 1, columns = view.size(-1);
  for (int64_t i = 0; i < view.sizes[0] * rows * columns; ++i) {
    const int64_t offset = i / columns / rows * view.strides[0] +
                           (view.rank == 3 ? i / columns % rows * view.strides[1] : 0) + i % columns;
    values.push_back(load_element(view.data, view.dtype, offset));
  }
  return values;
}

void expect_reference(const ProductKernels& kernels, bool takes_all, bool splits = true) {
  int compared = 0;
  for (const registry::ProblemRequest& request : kMultiply.shapes()) {
    std::string name;
    bool is_named = false;
    for (int64_t size : request.shape) name += std::to_string(size) + " ";
    for (const auto& [word, value] : request.options) {
      name += word + "=" + value + " ";
      is_named = is_named || (word == "precision" && (splits || value == "bf16"));
    }
    if (request.dtype == DType::kFloat64) continue;  // the reference's
    int64_t work = 1;
    for (int64_t size : request.shape) work *= size;
    if (work > unless_emulated(50'000'000, 600'000)) continue;  // minutes, with sanitizers
    if (!takes_all && request.dtype != DType::kBFloat16 && !is_named) continue;
    Bound expected = bind(request), actual = bind(request);
    OwnContext context;
    if (!kCpu.supports(actual.problem, device_info({}))) continue;
    kReference.run(expected.problem, 0, context);
    run_packed(actual.problem, kernels, context);
    for (size_t t = 0; t < expected.outputs.size(); ++t) {
      const std::vector<double> wanted = values_of(expected.outputs[t]), found = values_of(actual.outputs[t]);
      const bool is_wide = expected.outputs[t].dtype == DType::kFloat32;
      double largest = 0;
      for (double value : wanted) largest = std::max(largest, std::abs(value));
      for (size_t i = 0; i < wanted.size(); ++i) {
        const double allowed = is_wide ? 2e-5 * largest : std::abs(wanted[i]) * 0x1p-7 + largest * 0x1p-9;
        ASSERT_NEAR(found[i], wanted[i], allowed) << name << ", result " << t << ", element " << i;
      }
    }
    ++compared;
  }
  EXPECT_GT(compared, unless_emulated(50, 15));
}

// Several of everything, at sizes that a reference can follow.
ProductKernels in_small_pieces(ProductKernels kernels) {
  kernels.block_steps = 64;
  kernels.chunk_rows = 2 * kernels.tile_rows;
  kernels.group_panels = 2;
  kernels.solo_rows = kernels.tile_rows;
  kernels.row_slab_bytes = kernels.column_slab_bytes = 1 << 15;
  return kernels;
}

TEST(MatmulCpu, SmallPiecesAreTheReference) {
  const CpuIsa isa = device_info({}).cpu.isa;
  expect_reference(in_small_pieces(KP_AT_CPU_LEVEL(isa, kProductKernels)), true);
}

#if defined(__x86_64__)
TEST(MatmulCpu, PairsOfBfloat16AreTheReference) {
  const CpuIsa isa = device_info({}).cpu.machine_isa;
  if (isa < CpuIsa::kX86V4) GTEST_SKIP() << "this CPU has no AVX-512";
  expect_reference(isa_v4::kDotProductKernels, false, false);
  expect_reference(in_small_pieces(isa_v4::kDotProductKernels), false, false);
  if (isa < CpuIsa::kX86V4Bf16) return;
  expect_reference(isa_v4bf16::kDotProductKernels, false, false);
  expect_reference(in_small_pieces(isa_v4bf16::kDotProductKernels), false, false);
}

TEST(MatmulCpu, AmxIsTheReference) {
  const CpuIsa isa = device_info({}).cpu.machine_isa;
  if (isa < CpuIsa::kX86V4) GTEST_SKIP() << "this CPU has no AVX-512";
  expect_reference(isa_v4::kAmxProductKernels, false);
  expect_reference(in_small_pieces(isa_v4::kAmxProductKernels), false);
  if (isa != CpuIsa::kX86V4Amx) return;
  expect_reference(isa_v4amx::kAmxProductKernels, false);
  expect_reference(in_small_pieces(isa_v4amx::kAmxProductKernels), false);
}
#elif defined(__aarch64__)
TEST(MatmulCpu, MatrixInstructionsOfBfloat16AreTheReference) {
  if (device_info({}).cpu.machine_isa < CpuIsa::kNeonBf16) GTEST_SKIP() << "this CPU has no products of bf16";
  expect_reference(isa_neonbf16::kDotProductKernels, false, false);
  expect_reference(in_small_pieces(isa_neonbf16::kDotProductKernels), false, false);
}
#endif

}  // namespace
}  // namespace kernel_pytorch::matmul
