#include "kernel_pytorch/jit/cubin_cache.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/base/log.h"
#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/base/private_files.h"
#include "kernel_pytorch/jit/file_lock.h"
#include "kernel_pytorch/jit/hiprtc.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/jit/nvrtc.h"
#include "kernel_pytorch/jit/sources.h"

namespace kernel_pytorch::jit {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSuffix = ".cubin";
constexpr auto kTemporaryLife = std::chrono::minutes(10);
constexpr int kLockFiles = 64;  // keys share them, so that the directory does not fill with locks

struct CachedFile {
  fs::path path;
  int64_t bytes;
  fs::file_time_type used;
};

// Every cached kernel; temporary files of processes that died are removed on the way.
std::vector<CachedFile> list_files(const std::string& directory) {
  std::vector<CachedFile> files;
  std::error_code error;
  if (directory.empty()) return files;
  for (fs::directory_iterator item(directory, error), end; !error && item != end; item.increment(error)) {
    const std::string name = item->path().filename();
    std::error_code gone;  // another process may remove files while we look
    const fs::file_time_type used = item->last_write_time(gone);
    const auto bytes = static_cast<int64_t>(item->file_size(gone));
    if (gone) continue;
    if (is_temporary_name(name) && fs::file_time_type::clock::now() - used > kTemporaryLife) {
      fs::remove(item->path(), gone);
    } else if (name.ends_with(kSuffix)) {
      files.push_back({item->path(), bytes, used});
    }
  }
  return files;
}

bool prepare_directory(const std::string& directory, std::string& problem) {
  std::error_code error;
  if (fs::is_directory(directory, error)) return true;
  make_private_folders(directory);
  if (fs::is_directory(directory, error)) return true;
  mkdir(directory.c_str(), 0700);
  problem = concat("creating ", directory, ": ", std::strerror(errno));
  return false;
}

// The folder of the cache where it may be used; empty where there is none, or where other users could have written what
// is in it, which is said once.
std::string private_directory() {
  const std::string directory = cubin_cache_directory();
  if (directory.empty()) return "";
  std::string reason = reason_not_private(options().cache_directory);
  if (reason.empty()) reason = reason_not_private(directory);
  if (reason.empty()) return directory;
  log_once(LogLevel::kWarning, "cubin cache not private " + directory,
           concat("jit: the cache of compiled kernels is not used (", reason,
                  "); kernels are compiled again by every process"));
  return "";
}

// Brings the cache below nine tenths of its limit, so that not every write has to evict.
void evict(const std::string& directory) {
  const int64_t limit_bytes = options().cubin_cache_megabytes << 20;
  std::vector<CachedFile> files = list_files(directory);
  int64_t total_bytes = 0;
  for (const CachedFile& file : files) total_bytes += file.bytes;
  if (total_bytes <= limit_bytes) return;
  std::sort(files.begin(), files.end(), [](const CachedFile& a, const CachedFile& b) { return a.used < b.used; });
  for (const CachedFile& file : files) {
    if (total_bytes <= limit_bytes / 10 * 9) break;
    std::error_code error;
    if (fs::remove(file.path, error)) total_bytes -= file.bytes;
  }
}

std::string file_name(const std::string& directory, const std::string& key, const std::string& nvrtc_version) {
  return concat(directory, "/", key, "-nvrtc", nvrtc_version, kSuffix);
}

// Reads and checks; a file that does not hold what its name promises is reported, and removed where it is ours.
std::optional<CubinFile> read_checked(const std::string& path, const std::string& entry, bool remove_bad) {
  std::string problem;
  const std::optional<std::string> bytes = read_whole_file(path, problem);
  std::optional<CubinFile> file;
  if (bytes) file = decode_cubin_file(*bytes, problem);
  if (file && file->entry != entry) {
    problem = concat("it holds ", file->entry);
    file.reset();
  }
  if (!file && !problem.empty()) {
    KP_LOG(kWarning, "jit: ignoring the compiled kernel ", path, ": ", problem,
           remove_bad ? "; it is compiled anew" : "");
    if (remove_bad) unlink(path.c_str());
  }
  return file;
}

}  // namespace

std::string content_key(const DeviceCode& code, const std::string& architecture) {
  const bool amd = is_amd(architecture);
  Fnv128 hash;
  hash.add_number(kCubinFormatVersion).add_part(amd ? hip_closure_of(code).closure.hash : closure_of(code).hash);
  hash.add_part(code.entry);
  for (const std::string& option : amd ? hip_compile_options(architecture) : compile_options(architecture)) {
    hash.add_part(option);
  }
  return hash.hex();
}

std::string cubin_cache_directory() {
  const Options& now = options();
  return now.cache_directory.empty() || now.cubin_cache_megabytes == 0 ? "" : now.cache_directory + "/cubins";
}

std::optional<CubinFile> load_cubin(const std::string& key, const std::string& nvrtc_version,
                                    const std::string& entry) {
  const std::string directory = private_directory();
  if (directory.empty()) return std::nullopt;
  std::string path = file_name(directory, key, nvrtc_version);
  if (nvrtc_version.empty()) {
    for (const CachedFile& file : list_files(directory)) {
      if (file.path.filename().string().starts_with(key)) path = file.path;
    }
  }
  std::optional<CubinFile> file = read_checked(path, entry, true);
  if (file) {
    std::error_code error;  // marks it as used; a read-only cache simply keeps its order
    fs::last_write_time(path, fs::file_time_type::clock::now(), error);
  }
  return file;
}

void store_cubin(const std::string& key, const std::string& nvrtc_version, const CubinFile& file) {
  const std::string directory = private_directory();
  if (directory.empty()) return;
  std::string problem;
  if (!prepare_directory(directory, problem) ||
      !write_file_atomically(file_name(directory, key, nvrtc_version), encode_cubin_file(file), problem)) {
    log_once(LogLevel::kWarning, "cubin cache " + directory,
             concat("jit: the cache of compiled kernels cannot be written (", problem,
                    "); kernels are compiled again by every process. KERNEL_PYTORCH_CACHE_DIR moves it"));
    return;
  }
  evict(directory);
}

std::optional<CubinFile> load_from_bundle(const std::string& key, const std::string& entry) {
  const std::string& directory = options().bundle_directory;
  if (directory.empty()) return std::nullopt;
  if (const std::string reason = reason_not_private(directory); !reason.empty()) {
    log_once(LogLevel::kWarning, "bundle not private " + directory,
             concat("jit: the bundle of compiled kernels is not used (", reason, ")"));
    return std::nullopt;
  }
  return read_checked(concat(directory, "/", key, kSuffix), entry, false);
}

CubinFile obtain_cubin(const DeviceCode& code, const std::string& architecture) {
  const std::string key = content_key(code, architecture);
  if (std::optional<CubinFile> file = load_from_bundle(key, code.entry)) return *std::move(file);
  const std::string nvrtc_version = is_amd(architecture) ? hiprtc_info().version : nvrtc_version_text();
  if (std::optional<CubinFile> file = load_cubin(key, nvrtc_version, code.entry)) return *std::move(file);
  const std::string directory = private_directory();
  std::string problem;
  const bool shared = !directory.empty() && prepare_directory(directory, problem);
  const auto lock_number = static_cast<int>(Fnv128().add(key).low64() % kLockFiles);
  const FileLock lock(shared ? concat(directory, "/lock-", lock_number) : "", kLockSeconds);
  if (lock.is_held()) {  // another process may have compiled it before we got the lock
    if (std::optional<CubinFile> file = load_cubin(key, nvrtc_version, code.entry)) return *std::move(file);
  }
  CompiledKernel compiled = compile(code, architecture);
  KP_LOG(kInfo, "jit: compiled ", code.entry, " for ", architecture, " in ", compiled.seconds, " s, ",
         compiled.registers, " registers, ", compiled.spill_bytes, " bytes spilled");
  if (!compiled.warnings.empty()) KP_LOG(kInfo, "jit: ", code.entry, ": ", compiled.warnings);
  CubinFile file{code.entry, std::move(compiled.lowered_name), std::move(compiled.cubin)};
  store_cubin(key, nvrtc_version, file);
  return file;
}

CubinCacheInfo cubin_cache_info() {
  CubinCacheInfo info;
  info.directory = cubin_cache_directory();
  if (private_directory().empty()) return info;
  std::string problem;
  info.writable = prepare_directory(info.directory, problem) && access(info.directory.c_str(), W_OK | X_OK) == 0;
  for (const CachedFile& file : list_files(info.directory)) {
    ++info.files;
    info.bytes += file.bytes;
  }
  return info;
}

int64_t clear_cubin_cache() {
  int64_t removed = 0;
  for (const CachedFile& file : list_files(private_directory())) {
    std::error_code error;
    if (fs::remove(file.path, error)) ++removed;
  }
  return removed;
}

std::vector<CubinCheck> verify_cubin_cache() {
  std::vector<CubinCheck> checks;
  for (const CachedFile& file : list_files(private_directory())) {
    CubinCheck check{file.path, ""};
    if (const std::optional<std::string> bytes = read_whole_file(file.path, check.problem)) {
      decode_cubin_file(*bytes, check.problem);
    }
    checks.push_back(std::move(check));
  }
  return checks;
}

}  // namespace kernel_pytorch::jit
