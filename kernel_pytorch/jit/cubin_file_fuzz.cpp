// libFuzzer: any bytes either decode to a file that encodes to the same bytes, or are refused with a reason.
// kp-fuzz-with: kernel_pytorch/jit/cubin_file.cpp kernel_pytorch/base/error.cpp
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "kernel_pytorch/jit/cubin_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  std::string problem;
  const auto file = kernel_pytorch::jit::decode_cubin_file(bytes, problem);
  if (file ? kernel_pytorch::jit::encode_cubin_file(*file) != bytes : problem.empty()) std::abort();
  return 0;
}
