// Host side of gradients' codes on CUDA.
#include <string>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/gradient_code/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/gradient_code/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::gradient_code {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/gradient_code/cuda/kernel.cuh";
constexpr const char* kTooLarge = "has 2^31 tiles of 256 numbers or more";

DeviceCode code_of(std::string_view kernel, DType dtype, Code code) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::gradient_code::", kernel, "<", element_type_name(dtype),
                          ", kernel_pytorch::gradient_code::Code(", static_cast<int>(code), ")>"),
          .minimum_capability = 80,
          .architecture_specific = false};
}
int index_of(DType dtype, Code code) {
  return cuda_type_index(dtype) * kCodes + static_cast<int>(code);
}
bool has_units(const TensorView& view) {
  return reinterpret_cast<uintptr_t>(view.data) % (4 * size_of(view.dtype)) == 0;
}
template <class Problem>
int64_t message_tiles(const Problem& problem) {
  return problem.codes.sizes[0] * (columns_of(problem.scales, problem.code) / kTile);
}

template <class Problem>
registry::Support supports(const Problem& problem, const TensorView& numbers, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(numbers.dtype, device)) return registry::Support::no(obstacle);
  return registry::Support::unless(message_tiles(problem) >= int64_t{1} << 31 ? kTooLarge : nullptr);
}
registry::Support supports_encode(const Encode& problem, const DeviceInfo& device) {
  return supports(problem, problem.x, device);
}
registry::Support supports_decode(const Decode& problem, const DeviceInfo& device) {
  return supports(problem, problem.output, device);
}

template <class Arguments>
void launch(Arguments& arguments, CUkern_st* kernel, Context& context, const std::string& label) {
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(divide_up(arguments.tiles, kTilesOfBlock));
  shape.block_x = kThreads;
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, label);
}

void run_encode(const Encode& problem, int, Context& context) {
  static const std::string kLabel = "gradient_encode";
  static KernelTable<3 * kCodes> kernels;
  const int64_t tiles = message_tiles(problem);
  if (tiles == 0) return;
  CUkern_st* kernel = kernels.get(index_of(problem.x.dtype, problem.code), context,
                                  [&] { return code_of("encode", problem.x.dtype, problem.code); });
  EncodeArguments arguments{
      .x = problem.x.data,
      .error = problem.error.as<float>(),
      .codes = problem.codes.as<uint8_t>(),
      .scales = problem.scales.as<float>(),
      .count = problem.x.sizes[0],
      .code_stride = problem.codes.strides[0],
      .scale_stride = problem.scales.strides[0],
      .tiles = static_cast<int32_t>(tiles),
      .tiles_of_row = static_cast<int32_t>(tiles / problem.codes.sizes[0]),
      .gain = static_cast<float>(problem.gain),
      .carries = problem.carries,
      .is_aligned = has_units(problem.x) && (!problem.error.is_present() || has_units(problem.error))};
  launch(arguments, kernel, context, kLabel);
}

void run_decode(const Decode& problem, int, Context& context) {
  static const std::string kLabel = "gradient_decode";
  static KernelTable<3 * kCodes> kernels;
  const int64_t tiles = tiles_of(problem.output.sizes[0]);
  if (tiles == 0) return;
  CUkern_st* kernel = kernels.get(index_of(problem.output.dtype, problem.code), context,
                                  [&] { return code_of("decode", problem.output.dtype, problem.code); });
  const int64_t tiles_of_row = columns_of(problem.scales, problem.code) / kTile;
  DecodeArguments arguments{.codes = problem.codes.as<const uint8_t>(),
                            .scales = problem.scales.as<const float>(),
                            .output = problem.output.data,
                            .count = problem.output.sizes[0],
                            .code_stride = problem.codes.strides[0],
                            .scale_stride = problem.scales.strides[0],
                            .tiles = static_cast<int32_t>(tiles),
                            .tiles_of_row = static_cast<int32_t>(tiles_of_row),
                            .rows = static_cast<int32_t>(problem.mean ? problem.codes.sizes[0] : 1),
                            .is_mean = problem.mean,
                            .adds = problem.adds,
                            .is_aligned = has_units(problem.output)};
  launch(arguments, kernel, context, kLabel);
}

std::vector<DeviceCode> all_code(std::string_view kernel) {
  std::vector<DeviceCode> codes;
  for (const DType dtype : kCudaTypes) {
    for (int code = 0; code < kCodes; ++code) codes.push_back(code_of(kernel, dtype, static_cast<Code>(code)));
  }
  return codes;
}
std::vector<DeviceCode> encode_device_code() {
  return all_code("encode");
}
std::vector<DeviceCode> decode_device_code() {
  return all_code("decode");
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}

}  // namespace

constinit const registry::Kernel<Encode> kEncodeCuda{.name = "cuda",
                                                     .supports = supports_encode,
                                                     .run = run_encode,
                                                     .source_hash = source_hash,
                                                     .device_code = encode_device_code};
constinit const registry::Kernel<Decode> kDecodeCuda{.name = "cuda",
                                                     .supports = supports_decode,
                                                     .run = run_decode,
                                                     .source_hash = source_hash,
                                                     .device_code = decode_device_code};

}  // namespace kernel_pytorch::gradient_code
