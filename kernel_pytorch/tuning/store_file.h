// The file behind the store, for the rest of tuning; store.h is the public face. Every use of the file opens it, acts
// and closes it, so no connection is ever open across a fork().
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernel_pytorch/tuning/sqlite_database.h"
#include "kernel_pytorch/tuning/store.h"

namespace kernel_pytorch::tuning {

inline constexpr int kStoreSchemaVersion = 1;

std::string store_path();  // empty where there is no cache directory
// Why other users could have written the file or its folder, which is then not used; empty where none could.
std::string reason_store_not_private();

// Opens the file, calls `use`, closes it. Damage sets the file aside, with a warning, and the use is tried again on a
// new one. Returns why the store could not be used, empty when it could. A missing file is not made for reading: then
// `use` is not called and the answer is empty.
std::string read_store(const std::function<void(Database&)>& use);
std::string write_store(const std::function<void(Database&)>& use);
// As read_store, but damage is only reported: the file stays where it is.
std::string inspect_store(const std::function<void(Database&)>& use);
// Logs the reason, once a process.
void say_memory_only(const std::string& reason);

// Statements over the one table.
std::vector<StoredMeasurement> read_rows(Database& database, std::vector<std::string>* problems);
// Returns rows written: of two measurements of a key the one with the later date stays.
int64_t upsert_rows(Database& database, const std::vector<StoredMeasurement>& rows);

// For selection: neither throws, and a store that cannot be used is said once.
std::vector<StoredMeasurement> load_store_for_selection();
void write_measurement(const StoredMeasurement& row);
std::string last_write_failure();  // of write_measurement in this process; empty after a success

}  // namespace kernel_pytorch::tuning
