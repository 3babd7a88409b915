#include "kernel_pytorch/tuning/store.h"

#include <gtest/gtest.h>
#include <sqlite3.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <random>

#include "kernel_pytorch/tuning/sqlite_database.h"
#include "kernel_pytorch/tuning/store_file.h"
#include "kernel_pytorch/tuning/temporary_store_test.h"

namespace kernel_pytorch::tuning {
namespace {

class Store : public TemporaryStore {
 protected:
  void write_file(const std::string& content) {
    std::filesystem::create_directories(root() + "/cache");
    std::ofstream(file(), std::ios::binary) << content;
  }
  std::string read_file() {
    std::ifstream in(file(), std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void fill(int rows) {
    std::vector<StoredMeasurement> measured;
    for (int i = 0; i < rows; ++i) measured.push_back({make_test_key(concat("n=", i)), make_test_measurement()});
    EXPECT_EQ(write_store([&](Database& database) { upsert_rows(database, measured); }), "");
    forget_memory();
  }
  int count_set_aside() {
    int count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(root() + "/cache")) {
      const std::string name = entry.path().filename();
      if (name.find(".damaged-") != std::string::npos && name.find("-wal") == std::string::npos) ++count;
    }
    return count;
  }
  // The file as it is now is damaged: the next call survives, sets it aside with one warning, and a new one works.
  void expect_set_aside() {
    EXPECT_FALSE(verify_store().empty());
    EXPECT_EQ(count_set_aside(), 0) << "verify changes nothing";
    forget_memory();
    said().clear();
    EXPECT_FALSE(anything_to_consult());
    EXPECT_EQ(count_set_aside(), 1);
    ASSERT_EQ(said().size(), 1u);
    EXPECT_NE(said()[0].find("set aside"), std::string::npos) << said()[0];
    remember(make_test_key("after"), make_test_measurement());
    forget_memory();
    EXPECT_TRUE(find_measured(make_test_key("after")).has_value());
    EXPECT_TRUE(verify_store().empty());
    EXPECT_EQ(said().size(), 1u);
    EXPECT_EQ(count_set_aside(), 1);
  }
};

TEST_F(Store, IsMadePrivateAndSound) {
  EXPECT_EQ(store_info().state, "ready");
  EXPECT_EQ(store_info().rows, 0);
  fill(3);
  struct stat facts {};
  ASSERT_EQ(stat((root() + "/cache").c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0700u);
  const StoreInfo info = store_info();
  EXPECT_EQ(info.path, file());
  EXPECT_EQ(info.state, "ready");
  EXPECT_EQ(info.schema_version, 1);
  EXPECT_EQ(info.rows, 3);
  EXPECT_EQ(list_store().size(), 3u);
  EXPECT_TRUE(verify_store().empty());
  EXPECT_TRUE(said().empty());
}

TEST_F(Store, ClearsOneOpOrAll) {
  fill(2);
  remember(make_test_key("n=1", "other"), make_test_measurement());
  EXPECT_EQ(clear_store("toy"), 2);
  EXPECT_FALSE(find_measured(make_test_key("n=0")).has_value());
  EXPECT_TRUE(find_measured(make_test_key("n=1", "other")).has_value());
  EXPECT_EQ(list_store().size(), 1u);
  EXPECT_EQ(clear_store(), 1);
  EXPECT_FALSE(anything_to_consult());
  EXPECT_EQ(clear_store(), 0);
}

TEST_F(Store, TheLaterMeasurementStays) {
  const Key key = make_test_key("n=1");
  Measurement newer = make_test_measurement("new"), older = make_test_measurement("old");
  newer.date = "2024-06-01T00:00:00Z";
  older.date = "2024-05-31T23:59:59Z";
  remember(key, newer);
  remember(key, older);
  forget_memory();
  EXPECT_EQ(find_measured(key)->measurement.kernel, "new");
}

TEST_F(Store, AnEmptyFileIsANewStore) {
  write_file("");
  EXPECT_FALSE(anything_to_consult());
  EXPECT_TRUE(verify_store().empty());
  fill(1);
  forget_memory();
  EXPECT_TRUE(find_measured(make_test_key("n=0")).has_value());
  EXPECT_TRUE(said().empty());
}

TEST_F(Store, RandomBytesAreSetAside) {
  std::mt19937 generator(1);
  std::string bytes(10000, '\0');
  for (char& c : bytes) c = static_cast<char>(generator());
  write_file(bytes);
  expect_set_aside();
}

TEST_F(Store, ATextFileIsSetAside) {
  write_file("not a database\n");
  expect_set_aside();
}

TEST_F(Store, ATruncatedFileIsSetAside) {
  fill(200);
  const std::string whole = read_file();
  ASSERT_GT(whole.size(), 12288u);
  std::filesystem::resize_file(file(), 8192 + 100);
  expect_set_aside();
}

TEST_F(Store, OverwrittenPagesAreSetAside) {
  fill(200);
  std::string bytes = read_file();
  for (size_t i = 4096; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 31);
  write_file(bytes);
  expect_set_aside();
}

TEST_F(Store, AnotherSchemaIsSetAside) {
  std::filesystem::create_directories(root() + "/cache");
  {
    Database database(file(), OpenMode::kCreate, 1000);
    database.execute("CREATE TABLE somebody_elses(a, b)");
  }
  expect_set_aside();
}

TEST_F(Store, TheRightVersionWithTheWrongColumnsIsSetAside) {
  std::filesystem::create_directories(root() + "/cache");
  {
    Database database(file(), OpenMode::kCreate, 1000);
    database.execute("CREATE TABLE measurements(device, op); PRAGMA user_version=1");
  }
  expect_set_aside();
}

TEST_F(Store, RowsOfWrongTypesAreMissesAndReported) {
  fill(1);
  {
    Database database(file(), OpenMode::kExisting, 1000);
    database.execute("INSERT INTO measurements VALUES(x'00ff','toy','s','p','k','c',1,1,'2024-01-01T00:00:00Z','1')");
    database.execute("INSERT INTO measurements VALUES('d','toy','s','p','k','c',-1,1,'2024-01-01T00:00:00Z','1')");
    database.execute("INSERT INTO measurements VALUES('d','toy','s','q','k','c','x',1,'2024-01-01T00:00:00Z','1')");
    database.execute("INSERT INTO measurements VALUES('d','toy','s','r','k','c',1,1,'yesterday','1')");
  }
  forget_memory();
  EXPECT_TRUE(find_measured(make_test_key("n=0")).has_value());
  EXPECT_EQ(list_store().size(), 1u);
  EXPECT_EQ(verify_store().size(), 4u);
}

TEST_F(Store, ADamagedFileIsReplacedTogetherWithItsLog) {
  write_file("not a database, though of some length");
  std::ofstream(file() + "-wal", std::ios::binary) << std::string(5000, 'w');
  std::ofstream(file() + "-shm", std::ios::binary) << std::string(32768, 's');
  expect_set_aside();
}

// Cases below look at what a process says once, so each is a process of its own.
void expect_child_passes(const std::string& test, const std::string& directory, const std::string& argument = "") {
  Child child = start_child(test, directory, argument);
  std::string output;
  char buffer[4096];
  for (ssize_t n; (n = read(child.output, buffer, sizeof(buffer))) > 0;) output.append(buffer, static_cast<size_t>(n));
  EXPECT_EQ(wait_for(child), 0) << output;
}

// Whatever is wrong with the directory: measurements work from memory, and it is said once.
void expect_memory_only() {
  static int warnings = 0;
  set_log_sink([](LogLevel level, std::string_view) { warnings += level <= LogLevel::kWarning; });
  for (int i = 0; i < 3; ++i) remember(make_test_key(concat("n=", i)), make_test_measurement());
  EXPECT_EQ(warnings, 1);
  EXPECT_TRUE(anything_to_consult());
  EXPECT_EQ(find_measured(make_test_key("n=1"))->tier, Tier::kMemory);
  EXPECT_EQ(list_store().size(), 3u) << "what is in memory";
  EXPECT_EQ(warnings, 1);
}

TEST(StoreChild, DISABLED_MemoryOnly) {
  expect_memory_only();
  EXPECT_EQ(store_info().state.find("memory only"), 0u) << store_info().state;
}

TEST(StoreChild, DISABLED_FullDisk) {
  signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{4096, 4096};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  expect_memory_only();
}

TEST(StoreChild, DISABLED_ReadOnlyDirectoryOfAnother) {
  if (getuid() == 0) {
    ASSERT_EQ(setuid(65534), 0);
  }
  static int warnings = 0;
  set_log_sink([](LogLevel level, std::string_view) { warnings += level <= LogLevel::kWarning; });
  ASSERT_TRUE(anything_to_consult()) << "a store on a read-only file system can still be read";
  EXPECT_EQ(find_measured(make_test_key("n=0"))->tier, Tier::kPersistent);
  EXPECT_EQ(warnings, 0);
  for (int i = 5; i < 8; ++i) remember(make_test_key(concat("n=", i)), make_test_measurement());
  EXPECT_EQ(warnings, 1);
  EXPECT_TRUE(find_measured(make_test_key("n=5")).has_value());
}

TEST_F(Store, APathUnderAFileMeansMemoryOnly) {
  std::ofstream(root() + "/plain") << "x";
  expect_child_passes("StoreChild.DISABLED_MemoryOnly", root() + "/plain/cache");
}

TEST_F(Store, AKernelFileSystemMeansMemoryOnly) {
  expect_child_passes("StoreChild.DISABLED_MemoryOnly", "/proc/kernel_pytorch");
}

TEST_F(Store, ANewerSchemaIsLeftAloneAndMeansMemoryOnly) {
  fill(2);
  {
    Database database(file(), OpenMode::kExisting, 1000);
    database.execute("PRAGMA user_version=2");
  }
  expect_child_passes("StoreChild.DISABLED_MemoryOnly", root() + "/cache");
  EXPECT_EQ(count_set_aside(), 0);
  Database database(file(), OpenMode::kExisting, 1000);
  EXPECT_EQ(database.query_number("PRAGMA user_version"), 2);
  EXPECT_EQ(database.query_number("SELECT count(*) FROM measurements"), 2);
}

TEST_F(Store, AFullDiskMeansMemoryOnly) {
  expect_child_passes("StoreChild.DISABLED_FullDisk", root() + "/cache");
}

TEST_F(Store, AReadOnlyDirectoryIsReadAndNotWritten) {
  fill(2);
  chmod(root().c_str(), 0755);
  chmod((root() + "/cache").c_str(), 0555);
  chmod(file().c_str(), 0444);
  expect_child_passes("StoreChild.DISABLED_ReadOnlyDirectoryOfAnother", root() + "/cache");
  chmod((root() + "/cache").c_str(), 0755);
  EXPECT_EQ(list_store().size(), 2u);
}

// What other users could have written is not used: one warning with the cure, and memory only.
class ForeignStore : public Store {
 protected:
  void expect_memory_only(const std::string& reason) {
    forget_memory();
    said().clear();
    const std::string before = read_file();
    EXPECT_FALSE(anything_to_consult());
    remember(make_test_key("new"), make_test_measurement());
    EXPECT_TRUE(find_measured(make_test_key("new")).has_value());
    EXPECT_NE(store_info().state.find("memory only: "), std::string::npos);
    EXPECT_NE(store_info().state.find(reason), std::string::npos) << store_info().state;
    EXPECT_FALSE(store_info().outlives_process());
    EXPECT_EQ(read_file(), before);
    for (const std::string& line : said()) EXPECT_NE(line.find(reason), std::string::npos) << line;
    EXPECT_LE(said().size(), 1u);
  }
};

TEST_F(ForeignStore, FileAndFolderAreThisUsersAlone) {
  const mode_t before = umask(0);
  fill(1);
  umask(before);
  struct stat facts {};
  ASSERT_EQ(stat(file().c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0600u);
  ASSERT_EQ(stat((root() + "/cache").c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0700u);
  EXPECT_TRUE(store_info().outlives_process());
}

TEST_F(ForeignStore, WritableByOthersIsNotUsed) {
  fill(1);
  for (const std::string& path : {file(), root() + "/cache"}) {
    ASSERT_EQ(chmod(path.c_str(), 0777), 0);
    expect_memory_only("other users may write to " + path);
    ASSERT_EQ(chmod(path.c_str(), 0700), 0);
  }
}

TEST_F(ForeignStore, OfAnotherUserIsNotUsed) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  fill(1);
  for (const std::string& path : {file(), root() + "/cache"}) {
    ASSERT_EQ(chown(path.c_str(), 1234, 1234), 0);
    expect_memory_only(path + " belongs to user 1234");
    ASSERT_EQ(chown(path.c_str(), 0, 0), 0);
  }
}

TEST_F(ForeignStore, LinkThatLeadsNowhereIsNotFollowed) {
  std::filesystem::create_directories(root() + "/cache");
  std::filesystem::create_symlink(root() + "/elsewhere", file());
  expect_memory_only("leads nowhere");
  EXPECT_FALSE(std::filesystem::exists(root() + "/elsewhere"));
}

}  // namespace
}  // namespace kernel_pytorch::tuning
