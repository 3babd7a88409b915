// The exchange format of measurements, apart from the store so that a fuzzer can reach it.
//
//   {"format": "kernel_pytorch tuning measurements", "version": 1, "library_version": "...", "measurements": [
//     {"device", "op", "kernel_set", "problem", "kernel", "config", "median_us", "spread_us", "date",
//     "library_version"}]}
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/tuning/store.h"

namespace kernel_pytorch::tuning {

inline constexpr size_t kLargestImportBytes = size_t{64} << 20;

// Throws kInvalidArgument with the first problem and its place. Never recurses, whatever the text nests.
std::vector<StoredMeasurement> parse_measurements(std::string_view json, const std::vector<std::string>& known_ops);
std::string format_measurements(const std::vector<StoredMeasurement>& rows);

}  // namespace kernel_pytorch::tuning
