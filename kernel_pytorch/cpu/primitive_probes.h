// The CPU words as plain functions over arrays, one table per instruction level, for words_test.cpp. Not in the
// library.
#pragma once

#include <cstdint>

#include "kernel_pytorch/base/float_types.h"

namespace kernel_pytorch::cpu_probes {

// What a level makes of one element type.
template <class T>
struct TypeProbes {
  void (*to_float)(const T* from, float* to, int64_t count);
  void (*from_float)(const float* from, T* to, int64_t count);
  void (*from_float_pairs)(const float* from, T* to, int64_t count);     // load2, store2
  void (*from_float_streamed)(const float* from, T* to, int64_t count);  // `to` aligned to two vectors
  void (*load_then_store_partial)(const T* from, T* to, int64_t count);  // count up to one vector
  void (*copy_unordered)(const T* from, T* to, int64_t count);           // pairs, stored and then streamed
};

struct PrimitiveProbes {
  int lanes;
  TypeProbes<BFloat16> bfloat16;
  TypeProbes<Float16> float16;
  TypeProbes<Float8E4M3> float8_e4m3;
  TypeProbes<Float8E5M2> float8_e5m2;
  TypeProbes<float> float32;
  void (*double_partial)(const double* from, double* to, int64_t count);
  void (*exp)(const float*, float*, int64_t);
  void (*exp_fast)(const float*, float*, int64_t);
  void (*exp2_fast)(const float*, float*, int64_t);
  void (*log)(const float*, float*, int64_t);
  void (*tanh)(const float*, float*, int64_t);
  void (*erf)(const float*, float*, int64_t);
  void (*sigmoid)(const float*, float*, int64_t);
  void (*sqrt)(const float*, float*, int64_t);
  void (*reciprocal)(const float*, float*, int64_t);
  // exp2_rough and sigmoid_rough of 8 and of 11 bits.
  void (*exp2_for_bfloat16)(const float*, float*, int64_t);
  void (*exp2_for_float16)(const float*, float*, int64_t);
  void (*sigmoid_for_bfloat16)(const float*, float*, int64_t);
  void (*sigmoid_for_float16)(const float*, float*, int64_t);
  // Over the first whole vectors: {sum, max} of floats and of doubles; {sum of squares in double} of floats.
  void (*reduce)(const float* from, int64_t count, float* sum_and_max);
  void (*reduce_double)(const double* from, int64_t count, double* sum_max_root);
  double (*sum_squares_in_double)(const float* from, int64_t count);
  void (*round_trip_double)(const float* from, float* to, int64_t count);
  void (*minimum)(const float* a, const float* b, float* to, int64_t count);
  void (*maximum)(const float* a, const float* b, float* to, int64_t count);
  int64_t (*elements_to_alignment)(const BFloat16* address, int64_t bytes);
  void (*philox_blocks)(uint64_t seed, uint64_t offset, uint64_t first_block, uint32_t* to);  // of `lanes` blocks
  // tile_product.h: a tile of six rows and `vectors` vectors, of which a level has up to tile_vectors; C is
  // [6][c_stride].
  int tile_vectors;
  void (*multiply_tile)(int vectors, const float* a, int64_t row_stride, int64_t step_stride, const float* b,
                        int64_t b_stride, int64_t steps, float* c, int64_t c_stride, bool add);
  void (*transpose)(const float* from, float* to);  // [lanes][lanes]
};

// clang-format off
namespace isa_v2 { PrimitiveProbes primitive_probes(); }
namespace isa_v3 { PrimitiveProbes primitive_probes(); }
namespace isa_v4 { PrimitiveProbes primitive_probes(); }
namespace isa_neon { PrimitiveProbes primitive_probes(); }
namespace isa_sve256 { PrimitiveProbes primitive_probes(); }
// clang-format on

}  // namespace kernel_pytorch::cpu_probes
