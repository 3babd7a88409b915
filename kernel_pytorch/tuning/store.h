// Tier 4 on disk: SQLite, shared by any number of processes. Never throws towards an op call: a damaged file is set
// aside with one warning, a read-only or full disk means memory only, said once.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/tuning/key.h"
#include "kernel_pytorch/tuning/selection.h"

namespace kernel_pytorch::tuning {

struct StoredMeasurement {
  Key key;
  Measurement measurement;
};

struct StoreInfo {
  std::string path;
  std::string state;  // "ready", "memory only: read-only file system", ...
  int schema_version = 0;
  int64_t rows = 0;
  bool outlives_process() const { return !state.starts_with("memory only"); }  // what is measured now
};
KP_EXPORT StoreInfo store_info();

// Where the file cannot be used, what this process measured itself.
KP_EXPORT std::vector<StoredMeasurement> list_store();
// Rows removed, of one op or (empty) all; this process forgets them too. Throws kDevice where the file cannot be
// written.
KP_EXPORT int64_t clear_store(std::string_view op = {});
// Integrity check of the file and plausibility of every row: one line per problem, empty when sound. Changes nothing.
KP_EXPORT std::vector<std::string> verify_store();

// JSON with a format version, and the same back. import validates everything before it writes anything and throws
// kInvalidArgument with the first problem and its place; returns rows written (a newer
// measurement in the store stays). Text above 64 MiB is refused.
KP_EXPORT std::string export_store();
KP_EXPORT int64_t import_store(std::string_view json, const std::vector<std::string>& known_ops);

}  // namespace kernel_pytorch::tuning
