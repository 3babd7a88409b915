// Faults and what they lead to: damage (not a database, wrong schema, broken pages) -> the file is renamed aside and a
// new one begun; a newer schema, no permission, a full disk -> memory only; another process writing -> wait, then
// retry.
#include "kernel_pytorch/tuning/store_file.h"

#include <fcntl.h>
#include <pthread.h>
#include <sqlite3.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <thread>

#include "kernel_pytorch/base/log.h"
#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/base/private_files.h"
#include "kernel_pytorch/tuning/selection_state.h"

namespace kernel_pytorch::tuning {
namespace {

constexpr int kBusyMilliseconds = 10000;
constexpr int kAttempts = 4;
constexpr auto kLongestWait = std::chrono::seconds(30);
constexpr auto kForkWait = std::chrono::seconds(1);

// One user of SQLite at a time in this process, and none across a fork: a child must not inherit a connection.
std::mutex& file_mutex() {
  static std::mutex* mutex = new std::mutex;
  return *mutex;
}
// A timed_mutex would do, but ThreadSanitizer does not know the call it is made of.
bool lock_file_within(std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!file_mutex().try_lock()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}
thread_local bool locked_for_fork = false;
std::atomic<bool> lost_in_fork{false};

void lock_before_fork() {
  locked_for_fork = lock_file_within(kForkWait);
}
void unlock_in_parent() {
  if (locked_for_fork) file_mutex().unlock();
}
void unlock_in_child() {
  if (locked_for_fork) return file_mutex().unlock();
  lost_in_fork = true;  // the store hung in another thread of the parent; what SQLite held there is held for good here
}

void guard_against_fork() {
  static const int registered = pthread_atfork(lock_before_fork, unlock_in_parent, unlock_in_child);
  static_cast<void>(registered);
}

class NewerSchema : public std::exception {};

bool is_on_network(const std::string& path) {
  struct statfs facts {};
  if (statfs(path.c_str(), &facts) != 0) return true;  // the careful answer
  constexpr uint32_t kNetworkKinds[] = {
      0x6969,      // NFS
      0x517b,      // SMB
      0xff534d42,  // CIFS
      0xfe534d42,  // SMB2
      0x0bd00bd0,  // Lustre
      0x47504653,  // GPFS
      0x19830326,  // BeeGFS
      0x00c36400,  // Ceph
      0x5346414f,  // AFS
      0x01021997,  // 9p
      0x65735546,  // FUSE: sshfs and the like
  };
  for (const uint32_t kind : kNetworkKinds) {
    if (static_cast<uint32_t>(facts.f_type) == kind) return true;
  }
  return false;
}

bool exists(const std::string& path) {
  struct stat facts {};
  return stat(path.c_str(), &facts) == 0;
}

// Write-ahead logging wants shared memory between the processes, which network file systems do not give. Failure is
// harmless: every mode is safe, this one only lets readers continue during a write.
void choose_journal(Database& database, const std::string& path) {
  const bool wants_log = !is_on_network(path);
  try {
    if ((database.query_text("PRAGMA journal_mode") == "wal") == wants_log) return;
    database.query_text(wants_log ? "PRAGMA journal_mode=WAL" : "PRAGMA journal_mode=DELETE");
  } catch (const SqliteFailure& failure) {
    if (failure.code() != SQLITE_BUSY && failure.code() != SQLITE_LOCKED) throw;
  }
}

// False for an empty database. Throws for one that is not ours. Tables are counted first: tables and version appear
// together, so a database that another process makes in between is never one with tables and no version.
bool has_schema(Database& database) {
  const int64_t tables = database.query_number("SELECT count(*) FROM sqlite_schema");
  const int64_t version = database.query_number("PRAGMA user_version");
  if (version > kStoreSchemaVersion) throw NewerSchema();
  if (version == 0 && tables == 0) return false;
  if (version != kStoreSchemaVersion)
    throw SqliteFailure(SQLITE_CORRUPT, concat("schema version ", version, " is not known"));
  return true;
}

void make_schema(Database& database) {
  Transaction transaction(database);
  if (has_schema(database)) return;  // another process was first
  database.execute(
      "CREATE TABLE measurements("
      "device TEXT NOT NULL, op TEXT NOT NULL, kernel_set TEXT NOT NULL, problem TEXT NOT NULL, "
      "kernel TEXT NOT NULL, config TEXT NOT NULL, median_us REAL NOT NULL, spread_us REAL NOT NULL, "
      "date TEXT NOT NULL, library_version TEXT NOT NULL, "
      "PRIMARY KEY(device, op, kernel_set, problem)) WITHOUT ROWID");
  database.execute(concat("PRAGMA user_version=", kStoreSchemaVersion).c_str());
  transaction.commit();
}

void use_for_writing(const std::string& path, const std::function<void(Database&)>& use) {
  make_private_folders(path.substr(0, path.rfind('/')));
  make_private_file(path);  // SQLite gives its side files the mode of this one
  Database database(path, OpenMode::kCreate, kBusyMilliseconds);
  choose_journal(database, path);
  if (!has_schema(database)) make_schema(database);
  use(database);
}

void use_for_reading(const std::string& path, const std::function<void(Database&)>& use) {
  if (!exists(path)) return;
  std::unique_ptr<Database> database;
  bool is_made = false;
  try {
    database = std::make_unique<Database>(path, OpenMode::kExisting, kBusyMilliseconds);
    is_made = has_schema(*database);
  } catch (const SqliteFailure& failure) {
    // A store shipped on a read-only file system: readable, as long as no side file is wanted.
    const int code = failure.code();
    if (code != SQLITE_CANTOPEN && code != SQLITE_READONLY && code != SQLITE_PERM) throw;
    database = std::make_unique<Database>(path, OpenMode::kImmutable, kBusyMilliseconds);
    is_made = has_schema(*database);
  }
  if (is_made) use(*database);
}

struct FileIdentity {
  dev_t device = 0;
  ino_t inode = 0;
  friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
};

FileIdentity identify(const std::string& path) {
  struct stat facts {};
  if (stat(path.c_str(), &facts) != 0) return {};
  return {facts.st_dev, facts.st_ino};
}

class LockFile {
 public:
  explicit LockFile(const std::string& path) : file_(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
    if (file_ >= 0) flock(file_, LOCK_EX);
  }
  ~LockFile() {
    if (file_ >= 0) close(file_);
  }
  LockFile(const LockFile&) = delete;
  LockFile& operator=(const LockFile&) = delete;

 private:
  int file_;
};

// Renames the file that was found damaged, and not a new one that another process has begun meanwhile: that would lose
// its rows. The side files go first; left behind, they would be replayed into the new database.
std::string set_aside(const std::string& path, const FileIdentity& damaged, const std::string& why) {
  const LockFile lock(path + ".lock");
  if (identify(path) != damaged) return "";
  std::string aside;
  for (int n = 1; aside.empty() || exists(aside); ++n) aside = concat(path, ".damaged-", n);
  rename((path + "-wal").c_str(), (aside + "-wal").c_str());
  unlink((path + "-shm").c_str());
  rename((path + "-journal").c_str(), (aside + "-journal").c_str());
  if (rename(path.c_str(), aside.c_str()) != 0)
    return concat("damaged (", why, ") and not movable: ", std::strerror(errno));
  log_once(LogLevel::kWarning, "tuning store damaged " + aside,
           concat("tuning: ", path, " is damaged (", why, "); it was set aside as ", aside, " and a new one is begun"));
  return "";
}

bool is_damage(int code) {
  return code == SQLITE_CORRUPT || code == SQLITE_NOTADB || code == SQLITE_FORMAT || code == SQLITE_ERROR ||
         code == SQLITE_SCHEMA || code == SQLITE_MISMATCH || code == SQLITE_CONSTRAINT;
}

using Use = void (*)(const std::string& path, const std::function<void(Database&)>& use);

std::string use_file(Use open_and_use, const std::function<void(Database&)>& use, bool repairs = true) {
  const std::string path = store_path();
  if (path.empty()) return "there is no cache directory; set KERNEL_PYTORCH_CACHE_DIR";
  if (std::string reason = reason_store_not_private(); !reason.empty()) return reason;
  guard_against_fork();
  if (lost_in_fork) return "the process was forked while its store hung";
  if (!lock_file_within(kLongestWait)) return "another thread of this process hangs in it";
  const std::lock_guard lock(file_mutex(), std::adopt_lock);
  std::string reason;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const FileIdentity identity = identify(path);
    try {
      open_and_use(path, use);
      return "";
    } catch (const NewerSchema&) {
      return "it was written by a newer version of the library";
    } catch (const SqliteFailure& failure) {
      reason = failure.what();
      if (is_damage(failure.code()) && repairs) {
        const std::string obstacle = set_aside(path, identity, reason);
        if (!obstacle.empty()) return obstacle;
      } else if (failure.code() != SQLITE_BUSY && failure.code() != SQLITE_LOCKED) {
        return reason;
      }
    }
  }
  return reason;
}

}  // namespace

std::string store_path() {
  const std::string& directory = options().cache_directory;
  return directory.empty() ? "" : directory + "/tuning.db";
}

std::string reason_store_not_private() {
  const std::string reason = reason_not_private(options().cache_directory);
  return reason.empty() ? reason_not_private(store_path()) : reason;
}

std::string read_store(const std::function<void(Database&)>& use) {
  return use_file(use_for_reading, use);
}
std::string write_store(const std::function<void(Database&)>& use) {
  return use_file(use_for_writing, use);
}
std::string inspect_store(const std::function<void(Database&)>& use) {
  return use_file(use_for_reading, use, false);
}

void say_memory_only(const std::string& reason) {
  log_once(LogLevel::kWarning, "tuning store unusable",
           concat("tuning: ", store_path(), " cannot be used (", reason, "); measurements are kept in memory only"));
}

std::vector<StoredMeasurement> load_store_for_selection() {
  std::vector<StoredMeasurement> rows;
  std::vector<std::string> problems;
  const std::string reason = read_store([&](Database& database) {
    const std::string state = database.query_text("PRAGMA quick_check(1)");
    if (state != "ok") throw SqliteFailure(SQLITE_CORRUPT, state);
    problems.clear();
    rows = read_rows(database, &problems);
  });
  if (!reason.empty()) {
    say_memory_only(reason);
    return {};
  }
  for (const std::string& problem : problems) KP_LOG(kDebug, "tuning: passed over ", problem);
  return rows;
}

void write_measurement(const StoredMeasurement& row) {
  const std::string path = store_path();
  const std::string reason = write_store([&](Database& database) { upsert_rows(database, {row}); });
  {
    SelectionState& state = selection_state();
    const std::unique_lock state_lock(state.mutex);
    state.write_failure_path = path;
    state.write_failure = reason;
  }
  if (!reason.empty()) say_memory_only(reason);
}

std::string last_write_failure() {
  SelectionState& state = selection_state();
  const std::shared_lock lock(state.mutex);
  return state.write_failure_path == store_path() ? state.write_failure : "";
}

}  // namespace kernel_pytorch::tuning
