// One row of a 2:4 weight times a panel of x, on the lanes of the CPU, built once per instruction level: each kept
// value is broadcast and meets the rows of x that lie in its column. Only kept products are computed.
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/vec.h"
#include "kernel_pytorch/ops/sparse_matmul/cpu/rows.h"

namespace kernel_pytorch::sparse_matmul::KP_ISA_NAMESPACE {
namespace {

using cpu::kLanes;
using cpu::Vec;
static_assert(kPanelRows % kLanes == 0);

// Two kept values in turns, so that twice as many sums are under way.
template <int kVectors>
void multiply_vectors(const RowPart& part, int64_t first) {
  Vec even[kVectors] = {}, odd[kVectors] = {};
  for (int64_t i = 0; i + 1 < part.count; i += 2) {  // kept values come in pairs
    const Vec values[2] = {cpu::broadcast(part.values[i]), cpu::broadcast(part.values[i + 1])};
    const float* columns[2] = {part.panel + part.offsets[i] + first, part.panel + part.offsets[i + 1] + first};
    for (int v = 0; v < kVectors; ++v) even[v] = cpu::fma(values[0], cpu::load(columns[0] + v * kLanes), even[v]);
    for (int v = 0; v < kVectors; ++v) odd[v] = cpu::fma(values[1], cpu::load(columns[1] + v * kLanes), odd[v]);
  }
  for (int v = 0; v < kVectors; ++v) cpu::store(part.sums + first + v * kLanes, even[v] + odd[v]);
}

void multiply(const RowPart& part) {
  int64_t vector = 0;
  for (; vector + 4 <= part.vectors; vector += 4) multiply_vectors<4>(part, vector * kLanes);
  for (; vector + 2 <= part.vectors; vector += 2) multiply_vectors<2>(part, vector * kLanes);
  if (vector < part.vectors) multiply_vectors<1>(part, vector * kLanes);
}

}  // namespace

constinit const RowKernels kRowKernels{.lanes = kLanes, .multiply = multiply};

}  // namespace kernel_pytorch::sparse_matmul::KP_ISA_NAMESPACE
