// Whether a measurement from outside (a file, an import) can be believed.
#pragma once

#include <string>
#include <string_view>

#include "kernel_pytorch/tuning/store.h"

namespace kernel_pytorch::tuning {

inline constexpr size_t kLongestText = 4096;  // of any field; a parser need not collect more

// "median_us: is -3; it must be above 0 and at most 1e+12", empty when the row is plausible.
std::string problem_with(const StoredMeasurement& row);

std::string utc_now();  // "2025-01-31T12:00:00Z"

}  // namespace kernel_pytorch::tuning
