// libFuzzer entry for the parser of imported measurements: whatever the bytes, it returns rows that pass the checks or
// throws one Error; and what it takes survives the way out and back in.
// kp-fuzz-with: kernel_pytorch/tuning/store_json.cpp kernel_pytorch/tuning/row_check.cpp kernel_pytorch/base/error.cpp
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/tuning/row_check.h"
#include "kernel_pytorch/tuning/store_json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kernel_pytorch;
  const std::vector<std::string> known_ops = {"toy", "other"};
  std::vector<tuning::StoredMeasurement> rows;
  try {
    rows = tuning::parse_measurements({reinterpret_cast<const char*>(data), size}, known_ops);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidArgument || error.message().size() > 1000) std::abort();
    return 0;
  }
  for (const tuning::StoredMeasurement& row : rows) {
    if (!tuning::problem_with(row).empty()) std::abort();
  }
  const auto again = tuning::parse_measurements(tuning::format_measurements(rows), known_ops);
  if (again.size() != rows.size()) std::abort();
  for (size_t i = 0; i < rows.size(); ++i) {
    if (again[i].key != rows[i].key || again[i].measurement.median_us != rows[i].measurement.median_us) std::abort();
  }
  return 0;
}
