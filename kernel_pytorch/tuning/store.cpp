#include "kernel_pytorch/tuning/store.h"

#include <sqlite3.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <set>
#include <shared_mutex>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/tuning/row_check.h"
#include "kernel_pytorch/tuning/selection_state.h"
#include "kernel_pytorch/tuning/store_file.h"
#include "kernel_pytorch/tuning/store_json.h"

namespace kernel_pytorch::tuning {
namespace {

constexpr const char* kSelect =
    "SELECT device, op, kernel_set, problem, kernel, config, median_us, spread_us, date, library_version "
    "FROM measurements ORDER BY op, device, problem, kernel_set";

constexpr const char* kUpsert =
    "INSERT INTO measurements(device, op, kernel_set, problem, kernel, config, median_us, spread_us, date, "
    "library_version) VALUES(?,?,?,?,?,?,?,?,?,?) ON CONFLICT(device, op, kernel_set, problem) DO UPDATE SET "
    "kernel=excluded.kernel, config=excluded.config, median_us=excluded.median_us, spread_us=excluded.spread_us, "
    "date=excluded.date, library_version=excluded.library_version WHERE excluded.date >= measurements.date";

// Whether a file that is not there yet could be made: the nearest folder that exists decides.
std::string obstacle_to_making(std::string path) {
  while (true) {
    const size_t slash = path.rfind('/');
    path = slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
    struct stat facts {};
    if (stat(path.c_str(), &facts) != 0) {
      if (path == "." || path == "/") return concat(path, " cannot be looked at");
      if (errno == ENOENT) continue;
      return concat(path, " is not a folder that can be made");
    }
    if (!S_ISDIR(facts.st_mode)) return concat(path, " is not a folder");
    return access(path.c_str(), W_OK | X_OK) == 0 ? "" : concat(path, " cannot be written");
  }
}

// What this process measured and could not write.
void add_rows_in_memory(std::vector<StoredMeasurement>& rows) {
  std::set<Key> listed;
  for (const StoredMeasurement& row : rows) listed.insert(row.key);
  SelectionState& state = selection_state();
  const std::shared_lock lock(state.mutex);
  for (const auto& [key, remembered] : state.measured) {
    if (!listed.contains(key)) rows.push_back({key, remembered.measurement});
  }
}

}  // namespace

std::vector<StoredMeasurement> read_rows(Database& database, std::vector<std::string>* problems) {
  std::vector<StoredMeasurement> rows;
  Statement statement(database, kSelect);
  for (int64_t number = 1; statement.step(); ++number) {
    StoredMeasurement row;
    Key& key = row.key;
    Measurement& value = row.measurement;
    const bool is_typed = statement.read(0, key.device) && statement.read(1, key.op) &&
                          statement.read(2, key.kernel_set) && statement.read(3, key.problem) &&
                          statement.read(4, value.kernel) && statement.read(5, value.config) &&
                          statement.read(6, value.median_us) && statement.read(7, value.spread_us) &&
                          statement.read(8, value.date) && statement.read(9, value.library_version);
    const std::string problem = is_typed ? problem_with(row) : "a column has the wrong type";
    if (problem.empty()) {
      rows.push_back(std::move(row));
    } else if (problems != nullptr) {
      problems->push_back(concat("row ", number, ": ", problem));
    }
  }
  return rows;
}

int64_t upsert_rows(Database& database, const std::vector<StoredMeasurement>& rows) {
  int64_t written = 0;
  Transaction transaction(database);
  Statement statement(database, kUpsert);
  for (const StoredMeasurement& row : rows) {
    const Measurement& value = row.measurement;
    statement.bind(1, row.key.device);
    statement.bind(2, row.key.op);
    statement.bind(3, row.key.kernel_set);
    statement.bind(4, row.key.problem);
    statement.bind(5, value.kernel);
    statement.bind(6, value.config);
    statement.bind(7, value.median_us);
    statement.bind(8, value.spread_us);
    statement.bind(9, value.date);
    statement.bind(10, value.library_version);
    statement.step();
    written += database.changes();
    statement.reset();
  }
  transaction.commit();
  return written;
}

StoreInfo store_info() {
  StoreInfo info{.path = store_path(), .state = "ready", .schema_version = kStoreSchemaVersion, .rows = 0};
  std::string obstacle = info.path.empty() ? "" : reason_store_not_private();
  if (!obstacle.empty()) {
    info.state = "memory only: " + obstacle;
    return info;
  }
  if (!info.path.empty() && access(info.path.c_str(), F_OK) != 0) {
    obstacle = obstacle_to_making(info.path);
  } else {
    obstacle = read_store([&](Database& database) {
      info.schema_version = static_cast<int>(database.query_number("PRAGMA user_version"));
      info.rows = database.query_number("SELECT count(*) FROM measurements");
      if (sqlite3_db_readonly(database.handle(), "main") == 1) info.state = "read only";
    });
  }
  if (obstacle.empty()) obstacle = last_write_failure();
  if (!obstacle.empty()) info.state = "memory only: " + obstacle;
  return info;
}

std::vector<StoredMeasurement> list_store() {
  std::vector<StoredMeasurement> rows;
  const std::string reason = read_store([&](Database& database) { rows = read_rows(database, nullptr); });
  if (!reason.empty() || !last_write_failure().empty()) add_rows_in_memory(rows);
  return rows;
}

int64_t clear_store(std::string_view op) {
  int64_t removed = 0;
  forget_measured(op);
  if (access(store_path().c_str(), F_OK) != 0) return 0;
  const std::string reason = write_store([&](Database& database) {
    Transaction transaction(database);
    Statement statement(database, op.empty() ? "DELETE FROM measurements" : "DELETE FROM measurements WHERE op = ?");
    if (!op.empty()) statement.bind(1, op);
    statement.step();
    removed = database.changes();
    transaction.commit();
  });
  if (!reason.empty()) fail(ErrorCode::kDevice, "tuning: ", store_path(), " cannot be cleared: ", reason);
  return removed;
}

std::vector<std::string> verify_store() {
  std::vector<std::string> problems;
  const std::string path = store_path();
  if (path.empty() || access(path.c_str(), F_OK) != 0) return problems;
  const std::string reason = inspect_store([&](Database& database) {
    Statement statement(database, "PRAGMA integrity_check(100)");
    for (std::string line; statement.step();) {
      if (statement.read(0, line) && line != "ok") problems.push_back(line);
    }
    if (problems.empty()) read_rows(database, &problems);
  });
  if (!reason.empty()) problems.push_back(reason);
  return problems;
}

std::string export_store() {
  return format_measurements(list_store());
}

int64_t import_store(std::string_view json, const std::vector<std::string>& known_ops) {
  const std::vector<StoredMeasurement> rows = parse_measurements(json, known_ops);
  int64_t written = 0;
  const std::string reason = write_store([&](Database& database) { written = upsert_rows(database, rows); });
  if (!reason.empty()) fail(ErrorCode::kDevice, "tuning import: ", store_path(), " cannot be written: ", reason);
  const std::vector<StoredMeasurement> all = load_store_for_selection();
  SelectionState& state = selection_state();
  const std::unique_lock lock(state.mutex);
  merge_stored_locked(state, all);
  return written;
}

}  // namespace kernel_pytorch::tuning
