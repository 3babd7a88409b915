// Tensor maps, matrix moves, wgmma and the hand-over of registers, against the host. Small integers, so every order of
// summation gives the same float. Each probe also compiles where there is a compiler and no GPU.
#include <algorithm>
#include <random>

#include "kernel_pytorch/base/emulation_test.h"
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cuda/primitives_fixture_test.h"
#include "kernel_pytorch/cuda/tile/tensor_map_cuda.h"
#include "kernel_pytorch/device/cuda/tensor_map.h"

namespace kernel_pytorch {
namespace {

DeviceCode probe(const std::string& entry) {
  return {.source = "kernel_pytorch/cuda/matrix_primitives_probe.cuh",
          .entry = "kernel_pytorch::primitives_probe::" + entry,
          .minimum_capability = 90,
          .architecture_specific = true};
}

// "multiply_tiles<...>" of this product.
struct Product {
  DType dtype;
  int columns, depth;
  bool along_rows, from_registers;
  std::string entry() const {
    return concat("multiply_tiles<kernel_pytorch::tile::", dtype == DType::kBFloat16 ? "BFloat16" : "Float16", ", ",
                  columns, ", ", depth, ", ", along_rows ? "true" : "false", ", ", from_registers ? "true" : "false",
                  ">");
  }
};

std::vector<Product> products() {
  std::vector<Product> all;
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (bool along_rows : {false, true}) {
      for (bool from_registers : {false, true}) {
        all.push_back({dtype, 128, 128, along_rows, from_registers});
        all.push_back({dtype, along_rows ? 256 : 80, along_rows ? 80 : 256, along_rows, from_registers});
      }
    }
  }
  all.push_back({DType::kBFloat16, 64, 64, false, false});
  all.push_back({DType::kBFloat16, 96, 96, true, true});
  all.push_back({DType::kBFloat16, 112, 192, false, true});
  all.push_back({DType::kFloat16, 192, 112, true, false});
  return all;
}

class CudaMatrixPrimitives : public CudaPrimitivesTest {
 protected:
  template <class T>
  void check_product(const Product& product);
};

template <class T>
std::vector<T> random_integers(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<T> values(count);
  for (T& value : values) value = from_float<T>(static_cast<float>(static_cast<int>(random() % 17) - 8));
  return values;
}

template <class T>
tile::TensorMap map_of(const OnDevice<T>& memory, DType dtype, std::initializer_list<int64_t> sizes, int box_rows) {
  tile::TensorMap map;
  cuda_device::encode_tensor_map(contiguous_view(memory.data(), dtype, sizes, {DeviceKind::kCuda, 0}), box_rows,
                                 map.words);
  return map;
}

template <class T>
void CudaMatrixPrimitives::check_product(const Product& product) {
  const int rows = 64, columns = product.columns, depth = product.depth;
  const int b_rows = product.along_rows ? depth : columns, b_columns = product.along_rows ? columns : depth;
  const std::vector<T> a = random_integers<T>(static_cast<size_t>(rows) * depth, 3);
  const std::vector<T> b = random_integers<T>(static_cast<size_t>(b_rows) * b_columns, 4);
  OnDevice<T> a_memory(a), b_memory(b);
  OnDevice<float> result(std::vector<float>(static_cast<size_t>(rows) * columns));
  const int chunks = (depth + 63) / 64, b_chunks = (b_columns + 63) / 64;
  this->launch_code(probe(product.entry()), shape_of(1, 128, 1, 128 * (64 * chunks + b_rows * b_chunks)),
                    map_of(a_memory, product.dtype, {1, 1, rows, depth}, rows),
                    map_of(b_memory, product.dtype, {1, 1, b_rows, b_columns}, b_rows), result.data());
  const std::vector<float> actual = result.read();
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j) {
      float expected = 0;
      for (int k = 0; k < depth; ++k) {
        expected += to_float(a[i * depth + k]) * to_float(b[product.along_rows ? k * columns + j : j * depth + k]);
      }
      ASSERT_EQ(actual[i * columns + j], 2 * expected) << product.entry() << " row " << i << " column " << j;
    }
  }
}

TEST_F(CudaMatrixPrimitives, ProductsAreExact) {
  for (const Product& product : products()) {
    if (product.dtype == DType::kBFloat16) {
      check_product<BFloat16>(product);
    } else {
      check_product<Float16>(product);
    }
  }
}

// Rows past the end are read as zero and not written: what lay behind the tensor stays.
TEST_F(CudaMatrixPrimitives, FragmentsMoveAndTheEdgeIsKept) {
  const int outer = 3, rows = 100, columns = 64;
  const std::vector<BFloat16> values = random_integers<BFloat16>(static_cast<size_t>(outer) * rows * columns, 5);
  const BFloat16 old = from_float<BFloat16>(99.0f);
  for (const bool transposed : {false, true}) {
    const char* entry = transposed ? "move_fragments<true>" : "move_fragments<false>";
    for (int row : {0, 37, 64}) {
      OnDevice<BFloat16> source(values), target(std::vector<BFloat16>(values.size(), old));
      launch_code(probe(entry), shape_of(1, 128, 1, 2 * 64 * 128),
                  map_of(source, DType::kBFloat16, {outer, 1, rows, columns}, 64),
                  map_of(target, DType::kBFloat16, {outer, rows, columns}, 64), row, 1);
      const std::vector<BFloat16> actual = target.read();
      for (int i = 0; i < outer * rows; ++i) {
        const bool is_moved = i / rows == 1 && i % rows >= row && i % rows < row + 64;
        for (int j = 0; j < columns; ++j) {
          // Where the value came from: the mirrored place of its 8 x 8, which begin at the first row moved.
          const int down = i % rows - row;
          const int from_row = transposed ? row + down / 8 * 8 + j % 8 : i % rows;
          const int from_column = transposed ? j / 8 * 8 + down % 8 : j;
          const float moved = from_row < rows ? to_float(values[(rows + from_row) * columns + from_column]) : 0.0f;
          ASSERT_EQ(to_float(actual[i * columns + j]), is_moved ? moved : to_float(old)) << entry << " row " << i;
        }
      }
    }
  }
}

TEST_F(CudaMatrixPrimitives, WarpgroupsTakeTurns) {
  OnDevice<int32_t> order(std::vector<int32_t>(1));
  OnDevice<float> sums(std::vector<float>(4));
  launch_code(probe("take_turns"), shape_of(1, 256), order.data(), sums.data(), 10);
  EXPECT_EQ(order.read(), std::vector<int32_t>{0b10101010101010101010});
  EXPECT_EQ(sums.read(), (std::vector<float>{256, 256 * 255 / 2, 256 * 255, -256}));
}

TEST(CudaMatrixPrimitivesCompile, WithoutSpillsOrSerialisedProducts) {
  if (!jit::nvrtc_info(true).found) GTEST_SKIP() << jit::nvrtc_info(true).absence;
  std::vector<std::string> entries = {"move_fragments<true>", "take_turns"};
  for (const Product& product : products()) {
    if (product.dtype == DType::kBFloat16) entries.push_back(product.entry());
  }
  entries.resize(std::min(entries.size(), unless_emulated(entries.size(), size_t{4})));
  for (const std::string& entry : entries) {
    const jit::CompiledKernel kernel = jit::compile(probe(entry), "sm_90a");
    EXPECT_EQ(kernel.spill_bytes, 0) << entry;
    EXPECT_EQ(kernel.warnings, "") << entry;
  }
}

TEST(TensorMapObstacle, NamesWhatTheCopyEngineCannotRead) {
  alignas(16) uint16_t memory[64];
  TensorView view = contiguous_view(memory, DType::kBFloat16, {2, 2, 8});
  EXPECT_EQ(cuda_device::tensor_map_obstacle(view), nullptr);
  TensorView moved = view;
  moved.data = memory + 1;
  EXPECT_STREQ(cuda_device::tensor_map_obstacle(moved), "the address is no multiple of 16 bytes");
  TensorView ragged = view;
  ragged.strides[1] = 12;
  EXPECT_STREQ(cuda_device::tensor_map_obstacle(ragged), "a stride is no multiple of 16 bytes");
  ragged.sizes[1] = 1;
  EXPECT_EQ(cuda_device::tensor_map_obstacle(ragged), nullptr);
  TensorView strided = view;
  strided.strides[2] = 2;
  EXPECT_STREQ(cuda_device::tensor_map_obstacle(strided), "the last dimension is not dense");
}

}  // namespace
}  // namespace kernel_pytorch
