// Host side of the product of few rows with a weight whose codes have 2, 3, 5 or 6 bits.
#include <bit>
#include <string>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/quantized_matmul/cuda/host.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::quantized_matmul {
namespace {

constexpr const char* kBitsSource = "kernel_pytorch/ops/quantized_matmul/cuda/bits.cuh";
constexpr const char* kOtherFormats = "takes codes of 2, 3, 5 and 6 bits";
constexpr const char* kRowsOfBits = "takes 1 to 16 rows; of more, decoding the weight once costs less";
constexpr const char* kWordsOfBits =
    "needs a multiple of 32 columns, codes that begin at multiples of 4 bytes and rows of x at multiples of 16";
constexpr const char* kLargeBits = "n or k is 2^30 or more";
constexpr Format kBitFormats[] = {Format::kInt2, Format::kInt3, Format::kInt5, Format::kInt6};

registry::Support supports_bits(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.x.dtype, device)) return registry::Support::no(obstacle);
  if (!group_format::is_bit_stream(problem.format)) return registry::Support::no(kOtherFormats);
  const int64_t m = problem.x.sizes[0], k = problem.x.sizes[1];
  if (m < 1 || m > kThinRows) return registry::Support::no(kRowsOfBits);
  const bool is_aligned = k % 32 == 0 && reinterpret_cast<uintptr_t>(problem.codes.data) % 4 == 0 &&
                          vector_access_obstacle(problem.x) == nullptr;
  if (!is_aligned) return registry::Support::no(kWordsOfBits);
  return registry::Support::unless(std::max(k, problem.codes.sizes[0]) >= int64_t{1} << 30 ? kLargeBits : nullptr);
}

// Rows of x at a time: 1, 2, 4 or 8.
int rows_at_once(int64_t m) {
  return m >= kBitsMostRows ? kBitsMostRows : static_cast<int>(std::bit_ceil(static_cast<uint64_t>(m)));
}

DeviceCode bits_code(DType dtype, Format format, int rows) {
  return {.source = kBitsSource,
          .entry = concat("kernel_pytorch::quantized_matmul::bits_product<", element_type_name(dtype), ", ",
                          cuda_format_name(format), ", ", rows, ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

void run_bits(const Product& problem, int, Context& context) {
  static const std::string kLabel = "quantized_matmul bits";
  constexpr int kRowChoices = 4;
  static KernelTable<3 * group_format::kFormats * kRowChoices> kernels;
  const int64_t m = problem.x.sizes[0], n = problem.codes.sizes[0];
  if (n == 0) return;
  const int rows = rows_at_once(m);
  const int entry =
      (cuda_type_index(problem.x.dtype) * group_format::kFormats + static_cast<int>(problem.format)) * kRowChoices +
      std::countr_zero(static_cast<unsigned>(rows));
  CUkern_st* kernel = kernels.get(entry, context, [&] { return bits_code(problem.x.dtype, problem.format, rows); });
  Arguments arguments = cuda_arguments(problem);
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(divide_up(n, kBitsThreads / 32 * kBitsColumns));
  shape.grid_y = static_cast<unsigned>(divide_up(m, rows));
  shape.block_x = kBitsThreads;
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

std::vector<DeviceCode> bits_device_code() {
  std::vector<DeviceCode> codes;
  for (const Format format : kBitFormats) codes.push_back(bits_code(DType::kBFloat16, format, kBitsMostRows));
  codes.push_back(bits_code(DType::kFloat32, Format::kInt3, 1));
  codes.push_back(bits_code(DType::kFloat16, Format::kInt5, 2));
  return codes;
}
uint64_t bits_source_hash() {
  return jit::source_hash(kBitsSource);
}

}  // namespace

constinit const registry::Kernel<Product> kCudaBits{.name = "cuda_bits",
                                                    .supports = supports_bits,
                                                    .run = run_bits,
                                                    .source_hash = bits_source_hash,
                                                    .device_code = bits_device_code};

}  // namespace kernel_pytorch::quantized_matmul
