// Options and the log, and the small things that everything stands on: errors and hashes.
#include "kernel_pytorch/base/options.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/base/log.h"

namespace kernel_pytorch {
namespace {

// Sets variables for one test and puts back what was there.
class Environment {
 public:
  explicit Environment(std::initializer_list<std::pair<const char*, const char*>> variables) {
    for (const auto& [name, value] : variables) {
      before_[name] = environment(name);
      setenv(name, value, 1);
    }
  }
  ~Environment() {
    for (const auto& [name, value] : before_)
      value.empty() ? unsetenv(name.c_str()) : setenv(name.c_str(), value.c_str(), 1);
  }
  Environment(const Environment&) = delete;

 private:
  std::map<std::string, std::string> before_;
};

TEST(Options, ReadsEveryVariable) {
  const Environment set{{"KERNEL_PYTORCH_CACHE_DIR", "/somewhere"},
                        {"KERNEL_PYTORCH_LOG", "debug"},
                        {"KERNEL_PYTORCH_CPU_ISA", "v3"},
                        {"KERNEL_PYTORCH_NVRTC", "/lib/libnvrtc.so"},
                        {"KERNEL_PYTORCH_BUNDLE", "/bundle"},
                        {"KERNEL_PYTORCH_CUBIN_CACHE_MB", "77"},
                        {"KERNEL_PYTORCH_THREADS", "5"},
                        {"KERNEL_PYTORCH_AUTOTUNE", "1"},
                        {"KERNEL_PYTORCH_DISABLE_CUDA", "true"},
                        {"KERNEL_PYTORCH_AMD", "1"},
                        {"KERNEL_PYTORCH_CHECK", "1"},
                        {"NO_COLOR", "x"}};
  const Options read = read_environment();
  EXPECT_EQ(read.cache_directory, "/somewhere");
  EXPECT_EQ(read.log_level, "debug");
  EXPECT_EQ(read.cpu_isa, "v3");
  EXPECT_EQ(read.nvrtc_library, "/lib/libnvrtc.so");
  EXPECT_EQ(read.bundle_directory, "/bundle");
  EXPECT_EQ(read.cubin_cache_megabytes, 77);
  EXPECT_EQ(read.threads, 5);
  EXPECT_TRUE(read.autotune);
  EXPECT_TRUE(read.disable_cuda);
  EXPECT_TRUE(read.amd);
  EXPECT_TRUE(read.check_values);
  EXPECT_TRUE(read.no_color);
}

TEST(Options, EmptyMeansDefault) {
  const Environment set{{"KERNEL_PYTORCH_CACHE_DIR", ""},
                        {"XDG_CACHE_HOME", "/xdg"},
                        {"KERNEL_PYTORCH_LOG", ""},
                        {"KERNEL_PYTORCH_CPU_ISA", ""},
                        {"KERNEL_PYTORCH_CUBIN_CACHE_MB", ""},
                        {"KERNEL_PYTORCH_THREADS", ""},
                        {"KERNEL_PYTORCH_AUTOTUNE", ""},
                        {"NO_COLOR", ""}};
  const Options read = read_environment();
  EXPECT_EQ(read.cache_directory, "/xdg/kernel_pytorch");
  EXPECT_EQ(read.log_level, "warning");
  EXPECT_EQ(read.cpu_isa, "");
  EXPECT_EQ(read.cubin_cache_megabytes, 1024);
  EXPECT_EQ(read.threads, 0);
  EXPECT_FALSE(read.autotune);
  EXPECT_FALSE(read.no_color);
  const Environment without_xdg{{"XDG_CACHE_HOME", ""}, {"HOME", "/home/somebody"}};
  EXPECT_EQ(read_environment().cache_directory, "/home/somebody/.cache/kernel_pytorch");
  const Environment without_home{{"HOME", ""}};
  EXPECT_EQ(read_environment().cache_directory, "");
}

TEST(Options, NonsenseIsReportedAndIgnored) {
  struct Case {
    const char* variable;
    const char* value;
  };
  for (const Case& wrong :
       {Case{"KERNEL_PYTORCH_THREADS", "-1"}, Case{"KERNEL_PYTORCH_THREADS", "4x"},
        Case{"KERNEL_PYTORCH_THREADS", "99999"}, Case{"KERNEL_PYTORCH_THREADS", "99999999999999999999"},
        Case{"KERNEL_PYTORCH_CUBIN_CACHE_MB", "1e3"}, Case{"KERNEL_PYTORCH_LOG", "loud"},
        Case{"KERNEL_PYTORCH_CPU_ISA", "avx512"}, Case{"KERNEL_PYTORCH_AUTOTUNE", "yes please"}}) {
    // Which a run of the tests may have set.
    const Environment unset{{"KERNEL_PYTORCH_CPU_ISA", ""}, {"KERNEL_PYTORCH_THREADS", ""}};
    const Environment set{{wrong.variable, wrong.value}};
    testing::internal::CaptureStderr();
    const Options read = read_environment();
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_NE(said.find(std::string("ignoring ") + wrong.variable + "=" + wrong.value), std::string::npos) << said;
    EXPECT_EQ(read.threads, 0);
    EXPECT_EQ(read.cubin_cache_megabytes, 1024);
    EXPECT_EQ(read.log_level, "warning");
    EXPECT_EQ(read.cpu_isa, "");
    EXPECT_FALSE(read.autotune);
  }
}

TEST(Options, ReplacementHoldsAndOldReferencesStayValid) {
  const Options before = options();
  const Options& old = options();
  Options changed = before;
  changed.cache_directory = "/replaced";
  set_options_for_process(changed);
  EXPECT_EQ(options().cache_directory, "/replaced");
  EXPECT_EQ(old.cache_directory, before.cache_directory);
  set_options_for_process(before);
  EXPECT_EQ(options().cache_directory, before.cache_directory);
}

TEST(Options, DescriptionNamesEachVariableOnceWithItsValue) {
  const Environment set{{"KERNEL_PYTORCH_THREADS", "3"}};
  std::set<std::string_view> seen;
  for (const OptionDescription& row : describe_options()) {
    EXPECT_TRUE(seen.insert(row.variable).second) << row.variable;
    EXPECT_FALSE(row.meaning.empty());
    if (row.variable == "KERNEL_PYTORCH_THREADS") {
      EXPECT_TRUE(row.from_environment);
    }
  }
  EXPECT_EQ(seen.size(), 14u);
}

std::mutex heard_mutex;
std::vector<std::string> heard;
void hear(LogLevel, std::string_view line) {
  const std::lock_guard lock(heard_mutex);
  heard.emplace_back(line);
}

class LogTest : public testing::Test {
 protected:
  void SetUp() override {
    before_ = options();
    heard.clear();
    set_log_sink(hear);
  }
  void TearDown() override {
    set_log_sink(nullptr);
    set_options_for_process(before_);
  }
  void set_level(const std::string& level) {
    Options changed = before_;
    changed.log_level = level;
    set_options_for_process(changed);
  }

 private:
  Options before_;
};

TEST_F(LogTest, LevelsLetThroughTheirOwnAndTheGraver) {
  const char* names[] = {"error", "warning", "info", "debug"};
  for (int wanted = 0; wanted < 4; ++wanted) {
    set_level(names[wanted]);
    for (int level = 0; level < 4; ++level) EXPECT_EQ(log_enabled(static_cast<LogLevel>(level)), level <= wanted);
  }
}

TEST_F(LogTest, ArgumentsOfASilentLevelAreNotEvaluated) {
  set_level("warning");
  int evaluated = 0;
  const auto count = [&] { return ++evaluated; };
  KP_LOG(kDebug, "never ", count());
  EXPECT_EQ(evaluated, 0);
  KP_LOG(kWarning, "said ", count(), " time");
  EXPECT_EQ(heard, std::vector<std::string>{"said 1 time"});
}

TEST_F(LogTest, OnceMeansOncePerKeyAlsoWithManyThreads) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([] {
      for (int j = 0; j < 100; ++j) log_once(LogLevel::kError, "options_test", "said once");
    });
  }
  for (std::thread& thread : threads) thread.join();
  log_once(LogLevel::kError, "options_test other", "said too");
  EXPECT_EQ(heard, (std::vector<std::string>{"said once", "said too"}));
}

TEST_F(LogTest, LinesGoToStderrWithTheirLevel) {
  set_log_sink(nullptr);
  testing::internal::CaptureStderr();
  log_line(LogLevel::kWarning, "something");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "kernel_pytorch: warning: something\n");
}

TEST(ErrorTest, CheckCarriesCodeAndMessage) {
  const int rank = 0;
  try {
    KP_CHECK(rank > 0, "op: x has ", rank, " dimensions; it needs at least one");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_STREQ(error.what(), "op: x has 0 dimensions; it needs at least one");
  }
  EXPECT_THROW(KP_INTERNAL_CHECK(false, "a bug"), Error);
  EXPECT_NO_THROW(KP_CHECK(true, "fine"));
}

TEST(HashTest, Fnv128IsThePublishedFunction) {
  EXPECT_EQ(Fnv128().hex(), "6c62272e07bb014262b821756295c58d");  // the offset basis
  EXPECT_EQ(Fnv128().add("a").hex(), "d228cb696f1a8caf78912b704e4a8964");
  EXPECT_EQ(Fnv128().add("foobar").hex(), "343e1662793c64bf6f0d3597ba446f18");
}

TEST(HashTest, PartsAndOrderMatter) {
  EXPECT_EQ(Fnv128().add("ab").add("c").hex(), Fnv128().add("a").add("bc").hex());
  EXPECT_NE(Fnv128().add_part("ab").add_part("c").hex(), Fnv128().add_part("a").add_part("bc").hex());
  HashMixer first, second;
  first.add(1), first.add(2);
  second.add(2), second.add(1);
  EXPECT_NE(first.value(), second.value());
  std::set<uint64_t> values;
  for (uint64_t i = 0; i < 10000; ++i) {
    HashMixer mixer;
    mixer.add(i);
    values.insert(mixer.value());
  }
  EXPECT_EQ(values.size(), 10000u);
}

}  // namespace
}  // namespace kernel_pytorch
