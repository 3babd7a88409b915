// libFuzzer: any bytes are refused with an error that blames the caller, or make a program that prints to a text of the
// same program, and whose gradient does too.
// clang-format off
// kp-fuzz-with: kernel_pytorch/expression/text.cpp kernel_pytorch/expression/builder.cpp kernel_pytorch/expression/simplify.cpp kernel_pytorch/expression/expression.cpp kernel_pytorch/expression/gradient.cpp kernel_pytorch/base/dtype.cpp kernel_pytorch/base/error.cpp kernel_pytorch/base/tensor_view.cpp kernel_pytorch/base/device.cpp
// clang-format on
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/expression/gradient.h"
#include "kernel_pytorch/expression/text.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kernel_pytorch::expression;
  try {
    const Program program = parse({reinterpret_cast<const char*>(data), size});
    if (!(parse(print(program)) == program)) std::abort();
    if (program.results.size() > 1 || program.result_type() != Type::kFloat) return 0;
    const Program gradient = differentiate(program).program;
    if (!(parse(print(gradient)) == gradient)) std::abort();
  } catch (const kernel_pytorch::Error& error) {
    if (error.code() != kernel_pytorch::ErrorCode::kInvalidArgument) std::abort();
  }
  return 0;
}
