// libFuzzer: every reader of requests on arbitrary bytes. Only kInvalidArgument may come out.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/c/request.h"

namespace {

template <class Read>
void read_or_refuse(const Read& read) {
  try {
    read();
  } catch (const kernel_pytorch::Error& error) {
    if (error.code() != kernel_pytorch::ErrorCode::kInvalidArgument) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kernel_pytorch::c_interface;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  read_or_refuse([&] { shape_from(text); });
  read_or_refuse([&] { matching_operations(text); });
  read_or_refuse([&] {
    const Json json = parse_request(text);
    read_or_refuse([&] { read_overlay(json); });
    read_or_refuse([&] { read_directories(json); });
    read_or_refuse([&] { read_clear(json); });
    FieldReader fields(json, "fuzz");
    read_operation(fields);
    fields.number("budget_seconds", 1, 0, 10);
    fields.boolean("every_kernel", false);
    fields.finish();
  });
  return 0;
}
