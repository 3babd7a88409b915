#include "kernel_pytorch/jit/cubin_cache.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/base/private_files.h"
#include "kernel_pytorch/jit/file_lock.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/jit/jit_fixture_test.h"

namespace kernel_pytorch::jit {
namespace {

namespace fs = std::filesystem;
using testing::WarningRecord;

constexpr const char* kKey = "0123456789abcdef0123456789abcdef";

class CubinCache : public testing::CacheTest {
 protected:
  static CubinFile make_file(const std::string& entry, size_t bytes = 100) {
    return {entry, "_Z" + entry, std::string(bytes, 'c')};
  }
  static std::string key(int number) { return concat("key", number); }
};

TEST_F(CubinCache, GivesBackWhatWasStoredForThisVersionAndEntryOnly) {
  EXPECT_FALSE(load_cubin(kKey, "13.0", "f"));
  store_cubin(kKey, "13.0", make_file("f"));
  ASSERT_TRUE(load_cubin(kKey, "13.0", "f"));
  EXPECT_EQ(load_cubin(kKey, "13.0", "f")->cubin, make_file("f").cubin);
  EXPECT_FALSE(load_cubin(kKey, "12.8", "f"));
  EXPECT_TRUE(load_cubin(kKey, "", "f")) << "without an NVRTC, one of any version serves";
  struct stat status {};
  ASSERT_EQ(stat(cubins().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0700u);
  const WarningRecord warnings;
  EXPECT_FALSE(load_cubin(kKey, "13.0", "g")) << "a file that holds another entry";
  EXPECT_EQ(warnings.lines().size(), 1u);
}

TEST_F(CubinCache, DamagedFilesAreAMissWithOneWarning) {
  store_cubin(kKey, "13.0", make_file("f", 1000));
  const std::string path = files_ending(".cubin").at(0);
  std::string problem;
  const std::string good = *read_whole_file(path, problem);
  std::string flipped = good;
  flipped[500] ^= 1;
  std::string noise(1000, 'x');
  std::string wrong_checksum = good;
  wrong_checksum[40] = wrong_checksum[40] == '0' ? '1' : '0';
  for (const std::string& damaged : {good.substr(0, 700), std::string(), noise, flipped, wrong_checksum, good + "x"}) {
    testing::overwrite(path, damaged);
    ASSERT_EQ(verify_cubin_cache().size(), 1u);
    EXPECT_NE(verify_cubin_cache()[0].problem, "");
    const WarningRecord warnings;
    EXPECT_FALSE(load_cubin(kKey, "13.0", "f"));
    EXPECT_EQ(warnings.lines().size(), 1u);
    EXPECT_FALSE(fs::exists(path));
    EXPECT_FALSE(load_cubin(kKey, "13.0", "f"));
    EXPECT_EQ(warnings.lines().size(), 1u) << "the second miss is a plain one";
  }
  store_cubin(kKey, "13.0", make_file("f", 1000));
  EXPECT_EQ(verify_cubin_cache()[0].problem, "");
}

TEST_F(CubinCache, EvictsTheLeastRecentlyUsed) {
  change([](Options& options) { options.cubin_cache_megabytes = 1; });
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(15)); };
  for (int i = 0; i < 3; ++i) {
    store_cubin(key(i), "13.0", make_file("f", 300'000));
    pause();
  }
  ASSERT_TRUE(load_cubin(key(0), "13.0", "f"));  // used: number 1 is now the oldest
  pause();
  store_cubin(key(3), "13.0", make_file("f", 300'000));
  EXPECT_TRUE(load_cubin(key(0), "13.0", "f"));
  EXPECT_FALSE(load_cubin(key(1), "13.0", "f"));
  EXPECT_TRUE(load_cubin(key(3), "13.0", "f"));
  EXPECT_LE(cubin_cache_info().bytes, 1 << 20);
  store_cubin(key(4), "13.0", make_file("f", 2 << 20));
  EXPECT_LE(cubin_cache_info().bytes, 1 << 20) << "a file above the limit does not stay either";
}

TEST_F(CubinCache, CountsAndClears) {
  EXPECT_EQ(cubin_cache_info().files, 0);
  for (int i = 0; i < 5; ++i) store_cubin(key(i), "13.0", make_file("f"));
  const CubinCacheInfo info = cubin_cache_info();
  EXPECT_EQ(info.directory, cubins());
  EXPECT_TRUE(info.writable);
  EXPECT_EQ(info.files, 5);
  EXPECT_EQ(info.bytes, static_cast<int64_t>(5 * encode_cubin_file(make_file("f")).size()));
  EXPECT_EQ(clear_cubin_cache(), 5);
  EXPECT_EQ(cubin_cache_info().files, 0);
}

TEST_F(CubinCache, RemovesWhatKilledWritersLeft) {
  store_cubin(kKey, "13.0", make_file("f"));
  const std::string old_file = cubins() + "/.writing-1-1", fresh_file = cubins() + "/.writing-1-2";
  testing::overwrite(old_file, "half");
  testing::overwrite(fresh_file, "half");
  fs::last_write_time(old_file, fs::file_time_type::clock::now() - std::chrono::hours(1));
  store_cubin(key(1), "13.0", make_file("f"));
  EXPECT_FALSE(fs::exists(old_file));
  EXPECT_TRUE(fs::exists(fresh_file)) << "another process may be writing it";
}

TEST_F(CubinCache, CanBeSwitchedOff) {
  change([](Options& options) { options.cubin_cache_megabytes = 0; });
  store_cubin(kKey, "13.0", make_file("f"));
  EXPECT_FALSE(load_cubin(kKey, "13.0", "f"));
  EXPECT_FALSE(fs::exists(cubins()));
  EXPECT_EQ(cubin_cache_info().directory, "");
}

TEST_F(CubinCache, SaysOnceThatItCannotWrite) {
  const std::string blocked = cubins() + "_blocked";
  testing::overwrite(blocked, "a file where a directory should be");
  change([&](Options& options) { options.cache_directory = blocked; });
  const WarningRecord warnings;
  for (int i = 0; i < 3; ++i) store_cubin(key(i), "13.0", make_file("f"));
  ASSERT_EQ(warnings.lines().size(), 1u);
  EXPECT_NE(warnings.lines()[0].find("cannot be written"), std::string::npos);
  EXPECT_NE(warnings.lines()[0].find("KERNEL_PYTORCH_CACHE_DIR"), std::string::npos);
  EXPECT_FALSE(load_cubin(key(0), "13.0", "f"));
  EXPECT_FALSE(cubin_cache_info().writable);
}

// As a user without rights, since root may write everywhere.
TEST_F(CubinCache, ReadsFromAReadOnlyDirectory) {
  store_cubin(kKey, "13.0", make_file("f"));
  for (const std::string& file : files_ending(".cubin")) fs::permissions(file, fs::perms(0444));
  fs::permissions(cubins(), fs::perms(0555));
  fs::permissions(fs::path(cubins()).parent_path(), fs::perms(0755));
  const int result = testing::run_in_child([&] {
    if (geteuid() == 0 && setuid(65534) != 0) return 100;
    const WarningRecord warnings;
    if (!load_cubin(kKey, "13.0", "f")) return 1;
    if (!warnings.lines().empty()) return 2;
    for (int i = 0; i < 3; ++i) store_cubin(key(i), "13.0", make_file("f"));
    if (warnings.lines().size() != 1) return 3;
    if (cubin_cache_info().writable) return 4;
    return load_cubin(kKey, "13.0", "f") ? 0 : 5;
  });
  fs::permissions(cubins(), fs::perms(0700));
  if (result == 100) GTEST_SKIP() << "this machine does not let root become another user";
  EXPECT_EQ(result, 0);
}

// Nothing that another user could have written is run: neither a file nor a folder, nor as root.
TEST_F(CubinCache, ForeignFilesAndFoldersAreNotUsed) {
  store_cubin(kKey, "13.0", make_file("f"));
  const std::string file = cubins() + "/" + kKey + "-nvrtc13.0.cubin", cache = fs::path(cubins()).parent_path();
  struct stat facts {};
  ASSERT_EQ(stat(file.c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0600u);
  for (const std::string& folder : {cubins(), cache}) {
    ASSERT_EQ(chmod(folder.c_str(), 0777), 0);
    EXPECT_FALSE(load_cubin(kKey, "13.0", "f")) << folder;
    store_cubin(key(1), "13.0", make_file("g"));
    EXPECT_FALSE(fs::exists(cubins() + "/" + key(1) + "-nvrtc13.0.cubin"));
    EXPECT_FALSE(cubin_cache_info().writable);
    ASSERT_EQ(chmod(folder.c_str(), 0700), 0);
    EXPECT_TRUE(load_cubin(kKey, "13.0", "f"));
  }
  if (geteuid() == 0) {
    for (const std::string& folder : {cubins(), cache}) {
      ASSERT_EQ(chown(folder.c_str(), 1234, 1234), 0);
      EXPECT_FALSE(load_cubin(kKey, "13.0", "f")) << folder;
      ASSERT_EQ(chown(folder.c_str(), 0, 0), 0);
    }
    ASSERT_EQ(chown(file.c_str(), 1234, 1234), 0);
    const WarningRecord warnings;
    EXPECT_FALSE(load_cubin(kKey, "13.0", "f"));
    ASSERT_EQ(warnings.lines().size(), 1u);
    EXPECT_NE(warnings.lines()[0].find("belongs to user 1234"), std::string::npos) << warnings.lines()[0];
    store_cubin(kKey, "13.0", make_file("f"));
  }
  ASSERT_EQ(chmod(file.c_str(), 0666), 0);
  EXPECT_FALSE(load_cubin(kKey, "13.0", "f"));
}

TEST_F(CubinCache, ForeignBundlesAreNotUsed) {
  Options changed = options();
  changed.bundle_directory = cubins();
  set_options_for_process(changed);
  make_private_folders(cubins());
  std::string problem;
  ASSERT_TRUE(write_file_atomically(cubins() + "/" + kKey + ".cubin", encode_cubin_file(make_file("f")), problem));
  EXPECT_TRUE(load_from_bundle(kKey, "f"));
  ASSERT_EQ(chmod(cubins().c_str(), 0777), 0);
  EXPECT_FALSE(load_from_bundle(kKey, "f"));
  ASSERT_EQ(chmod(cubins().c_str(), 0700), 0);
}

TEST_F(CubinCache, ManyProcessesStoreAtOnce) {
  std::vector<pid_t> children;
  for (int process = 0; process < 8; ++process) {
    const pid_t child = fork();
    if (child == 0) {
      for (int i = 0; i < 20; ++i) store_cubin(key(i), "13.0", make_file("f", 10'000));
      _exit(0);
    }
    children.push_back(child);
  }
  for (pid_t child : children) waitpid(child, nullptr, 0);
  EXPECT_EQ(cubin_cache_info().files, 20);
  for (const CubinCheck& check : verify_cubin_cache()) EXPECT_EQ(check.problem, "") << check.file;
}

TEST(FileLock, WaitsNoLongerThanItsLimitAndGoesWithItsHolder) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory.path() + "/lock";
  {
    const FileLock first(path, 1);
    ASSERT_TRUE(first.is_held());
    const auto start = std::chrono::steady_clock::now();
    const FileLock second(path, 0.1);
    const double waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    EXPECT_FALSE(second.is_held());
    EXPECT_GE(waited, 0.1);
    EXPECT_LT(waited, 5);
  }
  EXPECT_TRUE(FileLock(path, 0).is_held());
  // A holder that dies without cleaning up does not keep the lock.
  testing::run_in_child([&]() -> int {
    new FileLock(path, 1);
    return 0;
  });
  EXPECT_TRUE(FileLock(path, 0).is_held());
  EXPECT_FALSE(FileLock("/proc/no_such_directory/lock", 0).is_held());
}

}  // namespace
}  // namespace kernel_pytorch::jit
