// The compiler path without a GPU: embedded source to cubin, cache, bundle; one compilation however many ask.
#include "kernel_pytorch/jit/jit.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "kernel_pytorch/jit/cubin_cache.h"
#include "kernel_pytorch/jit/jit_fixture_test.h"
#include "kernel_pytorch/jit/nvrtc.h"
#include "kernel_pytorch/jit/program.h"

namespace kernel_pytorch::jit {
namespace {

using testing::error_of;
using testing::kProbeSource;
using testing::scale_code;

TEST(Sources, AClosureHoldsTheSourceFirstThenItsIncludesByPath) {
  const SourceClosure& closure = closure_of(kProbeSource);
  std::vector<std::string_view> paths;
  for (const EmbeddedSource& file : closure.files) paths.push_back(file.path);
  EXPECT_EQ(paths, (std::vector<std::string_view>{kProbeSource, "kernel_pytorch/base/fixed_width.h",
                                                  "kernel_pytorch/jit/jit_probe_cuda.h"}));
  EXPECT_EQ(closure.hash.size(), 32u);
  EXPECT_EQ(source_hash(kProbeSource), closure.short_hash);
  EXPECT_NE(source_hash(kProbeSource), source_hash("kernel_pytorch/jit/jit_probe_cuda.h"));
  EXPECT_NE(error_of([] { closure_of("kernel_pytorch/none.cuh"); }).find("kernel_pytorch/none.cuh"), std::string::npos);
}

TEST(Sources, EveryEmbeddedIncludeIsEmbedded) {
  for (const EmbeddedSource& source : embedded_sources()) {
    EXPECT_FALSE(source.text.empty()) << source.path;
    if (!source.path.ends_with(".cuh")) continue;  // headers shared with the host may have host-only includes
    for (size_t at = 0; (at = source.text.find("\n#include", at)) != std::string_view::npos; ++at) {
      const std::string_view line = source.text.substr(at + 1, source.text.find('\n', at + 1) - at - 1);
      const std::string_view path = line.substr(10, line.rfind('"') - 10);
      bool found = path == kGeneratedPath;
      for (const EmbeddedSource& other : embedded_sources()) found |= other.path == path;
      EXPECT_TRUE(found) << source.path << ": " << line;
    }
  }
}

TEST(Architecture, NamesFollowTheCapability) {
  const DeviceCode generic = scale_code("float", 128, 0), specific = scale_code("float", 128, 0, 90, true);
  EXPECT_EQ(architecture_for(generic, 80), "sm_80");
  EXPECT_EQ(architecture_for(generic, 90), "sm_90");
  EXPECT_EQ(architecture_for(specific, 90), "sm_90a");
  EXPECT_EQ(architecture_for(specific, 100), "sm_100a");
  EXPECT_EQ(architecture_for(generic, 210), "sm_210");
  EXPECT_EQ(capability_of("sm_90a"), 90);
  EXPECT_EQ(capability_of("compute_120"), 120);
  for (const char* wrong : {"", "sm_", "90", "sm90", "sm_90b", "sm_90aa", "sm_x", "gfx_90", "_90", "sm_90 "}) {
    EXPECT_NE(error_of([&] { capability_of(wrong); }), "") << wrong;
  }
}

TEST(ContentKey, DependsOnEntryAndArchitecture) {
  const std::string key = content_key(scale_code("float", 128, 0), "sm_90");
  EXPECT_EQ(key, content_key(scale_code("float", 128, 0), "sm_90"));
  EXPECT_NE(key, content_key(scale_code("float", 128, 1), "sm_90"));
  EXPECT_NE(key, content_key(scale_code("float", 128, 0), "sm_90a"));
  DeviceCode other_source = scale_code("float", 128, 0);
  other_source.source = "kernel_pytorch/jit/jit_probe_cuda.h";
  EXPECT_NE(key, content_key(other_source, "sm_90"));
}

// With an NVRTC; on a machine without one these tests are skipped with the reason.
class Jit : public testing::CacheTest {
 protected:
  void SetUp() override {
    const NvrtcInfo& info = nvrtc_info(true);
    if (!info.found) GTEST_SKIP() << info.absence;
  }
  void hide_nvrtc() {
    change([](Options& options) { options.nvrtc_library = "/nowhere/libnvrtc.so.13"; });
  }
};

TEST_F(Jit, CompilesATemplateWithAConfigValue) {
  for (const char* architecture : {"sm_80", "sm_90", "sm_90a", "sm_100a"}) {
    const DeviceCode code = scale_code("float", 256, 3);
    const CompiledKernel kernel = compile(code, architecture);
    EXPECT_EQ(kernel.entry, code.entry);
    EXPECT_NE(kernel.lowered_name.find("scale"), std::string::npos);
    EXPECT_NE(kernel.lowered_name.find("256"), std::string::npos) << "the Config is part of the name";
    EXPECT_EQ(kernel.cubin.substr(0, 4),
              "\x7f"
              "ELF");
    EXPECT_NE(kernel.cubin.find(kernel.lowered_name), std::string::npos);
    EXPECT_GT(kernel.registers, 4);
    EXPECT_LT(kernel.registers, 100);
    EXPECT_EQ(kernel.spill_bytes, 0);
    EXPECT_EQ(kernel.warnings, "") << kernel.log;
    EXPECT_GT(kernel.seconds, 0);
  }
}

TEST_F(Jit, TwoConfigsAreTwoKernels) {
  const CompiledKernel first = compile(scale_code("float", 128, 0), "sm_90");
  const CompiledKernel second = compile(scale_code("double", 128, 0), "sm_90");
  EXPECT_NE(first.lowered_name, second.lowered_name);
  EXPECT_NE(first.cubin, second.cubin);
}

TEST_F(Jit, ADeviceNewerThanNvrtcGetsPtxForTheDriver) {
  const CompiledKernel kernel = compile(scale_code("float", 128, 0), "sm_999");
  EXPECT_NE(kernel.cubin.find(".target sm_"), std::string::npos);
  EXPECT_EQ(kernel.cubin.back(), '\0') << "the driver reads PTX up to its end mark";
  const std::string message = error_of([] { compile(scale_code("float", 128, 0, 90, true), "sm_999a"); });
  EXPECT_NE(message.find("does not know sm_999a"), std::string::npos) << message;
}

TEST_F(Jit, ErrorsNameTheEntryTheArchitectureAndTheLine) {
  DeviceCode wrong = scale_code("float", 128, 0);
  wrong.entry = "kernel_pytorch::jit_probe::no_such_kernel<3>";
  const std::string message = error_of([&] { compile(wrong, "sm_90"); });
  EXPECT_NE(message.find(wrong.entry), std::string::npos) << message;
  EXPECT_NE(message.find("sm_90"), std::string::npos) << message;
  EXPECT_NE(message.find("has no member \"no_such_kernel\""), std::string::npos) << message;
  const std::string too_old = error_of([] { compile(scale_code("float", 128, 0, 90), "sm_80"); });
  EXPECT_NE(too_old.find("needs sm_90"), std::string::npos) << too_old;
}

DeviceCode change_code(const std::string& value) {
  return {.source = "kernel_pytorch/jit/jit_generated_probe.cuh",
          .entry = "kernel_pytorch::jit_probe::change_each",
          .generated = concat("#include \"kernel_pytorch/cuda/ptx/math.cuh\"\nnamespace kernel_pytorch::generated {\n",
                              "__device__ float change(float x) { return ", value, "; }\n}\n")};
}

TEST(ContentKey, DependsOnTheGeneratedText) {
  EXPECT_EQ(content_key(change_code("x + x"), "sm_90"), content_key(change_code("x + x"), "sm_90"));
  EXPECT_NE(content_key(change_code("x + x"), "sm_90"), content_key(change_code("x * x"), "sm_90"));
  DeviceCode unread = scale_code("float", 64, 7);
  unread.generated = "int unread;";
  EXPECT_NE(error_of([&] { content_key(unread, "sm_90"); }).find("does not include"), std::string::npos);
}

TEST_F(Jit, AGeneratedTextIsCompiledWithTheSourceThatIncludesIt) {
  const DeviceCode code = change_code("ptx::ex2_approx_ftz_f32(x)");  // reached through the text's own include
  const CompiledKernel kernel = compile(code, "sm_90");
  EXPECT_NE(kernel.cubin, compile(change_code("x"), "sm_90").cubin);
  const int64_t before = compile_count();
  const std::string cubin = obtain_cubin(code, "sm_90").cubin;
  EXPECT_EQ(obtain_cubin(code, "sm_90").cubin, cubin);
  EXPECT_NE(obtain_cubin(change_code("x - 1"), "sm_90").cubin, cubin);
  EXPECT_EQ(compile_count() - before, 2);
  const std::string message = error_of([] { compile(change_code("y"), "sm_90"); });
  EXPECT_NE(message.find("kernel_pytorch/generated.cuh(3)"), std::string::npos) << message;
}

TEST_F(Jit, ACachedKernelIsNotCompiledAgain) {
  const DeviceCode code = scale_code("float", 64, 7);
  int64_t before = compile_count();
  const CubinFile first = obtain_cubin(code, "sm_90");
  EXPECT_EQ(compile_count() - before, 1);
  const CubinFile second = obtain_cubin(code, "sm_90");
  EXPECT_EQ(compile_count() - before, 1);
  EXPECT_EQ(first.cubin, second.cubin);
  EXPECT_EQ(first.lowered_name, second.lowered_name);
  hide_nvrtc();
  EXPECT_EQ(obtain_cubin(code, "sm_90").cubin, first.cubin) << "a cached kernel needs no NVRTC";
  const std::string message = error_of([] { obtain_cubin(scale_code("float", 64, 8), "sm_90"); });
  EXPECT_NE(message.find("/nowhere/libnvrtc.so.13"), std::string::npos) << message;
  EXPECT_NE(message.find("KERNEL_PYTORCH_NVRTC"), std::string::npos) << message;
}

TEST_F(Jit, ADamagedFileIsCompiledAnewWithOneWarning) {
  const DeviceCode code = scale_code("float", 64, 9);
  const CubinFile good = obtain_cubin(code, "sm_90");
  const std::string path = files_ending(".cubin").at(0);
  std::string problem;
  const std::string bytes = *read_whole_file(path, problem);
  for (const std::string& damaged : {bytes.substr(0, bytes.size() / 2), std::string(), std::string(5000, '\x5a')}) {
    testing::overwrite(path, damaged);
    const testing::WarningRecord warnings;
    EXPECT_EQ(obtain_cubin(code, "sm_90").lowered_name, good.lowered_name);
    EXPECT_EQ(warnings.lines().size(), 1u);
    EXPECT_EQ(verify_cubin_cache().at(0).problem, "");
  }
}

TEST_F(Jit, WorksWithoutAPlaceToWrite) {
  change([](Options& options) { options.cache_directory = "/proc/no_such_directory"; });
  const testing::WarningRecord warnings;
  for (int i = 0; i < 2; ++i) EXPECT_FALSE(obtain_cubin(scale_code("float", 64, 10), "sm_90").cubin.empty());
  EXPECT_EQ(warnings.lines().size(), 1u);
}

TEST_F(Jit, ManyThreadsCompileOnce) {
  const DeviceCode code = scale_code("float", 96, 11);
  const int64_t before = compile_count();
  std::vector<std::string> cubins(8);
  std::vector<std::thread> threads;
  for (std::string& cubin : cubins) {
    threads.emplace_back([&] { cubin = obtain_cubin(code, "sm_90").cubin; });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(compile_count() - before, 1);
  for (const std::string& cubin : cubins) EXPECT_EQ(cubin, cubins[0]);
}

TEST_F(Jit, ManyProcessesCompileOnce) {
  const DeviceCode code = scale_code("float", 96, 12);
  std::vector<pid_t> children;
  for (int i = 0; i < 6; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      const int64_t before = compile_count();
      _exit(obtain_cubin(code, "sm_90").cubin.empty() ? 100 : static_cast<int>(compile_count() - before));
    }
    children.push_back(child);
  }
  int compilations = 0;
  for (pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    ASSERT_TRUE(WIFEXITED(status));
    compilations += WEXITSTATUS(status);
  }
  EXPECT_EQ(compilations, 1);
}

TEST_F(Jit, ABundleServesAMachineWithoutNvrtc) {
  const testing::TemporaryDirectory bundle;
  std::vector<DeviceCode> codes;
  for (int addend = 0; addend < 4; ++addend) codes.push_back(scale_code("float", 64, addend));
  codes.push_back(codes[0]);                                // asked for twice, compiled once
  codes.push_back(scale_code("float", 64, 20, 90, true));   // sm_90a and nothing else
  codes.push_back(scale_code("float", 64, 21, 100));        // too new
  codes.push_back(scale_code("float", 64, 22, 100, true));  // another architecture's own
  static std::atomic<int> reports;
  reports = 0;
  const auto progress = [](const CompiledKernel& kernel, int done, int total) {
    EXPECT_EQ(done, ++reports);
    EXPECT_EQ(total, 5);
    EXPECT_GT(kernel.registers, 0);
  };
  const std::vector<CompiledKernel> compiled = write_bundle(codes, "sm_90a", bundle.path(), progress);
  ASSERT_EQ(compiled.size(), 5u);
  EXPECT_EQ(reports, 5);
  EXPECT_EQ(write_bundle(codes, "sm_90", bundle.path(), nullptr).size(), 4u) << "sm_90 cannot run sm_90a code";

  hide_nvrtc();
  const auto obtain_all = [&] {
    for (int i : {0, 1, 2, 3, 5}) {
      const CubinFile file = obtain_cubin(codes[i], architecture_for(codes[i], 90));
      EXPECT_EQ(file.entry, codes[i].entry);
      EXPECT_EQ(file.cubin, compiled[i == 5 ? 4 : i].cubin);
    }
  };
  EXPECT_NE(error_of(obtain_all), "");
  change([&](Options& options) { options.bundle_directory = bundle.path(); });
  const int64_t before = compile_count();
  EXPECT_EQ(error_of(obtain_all), "");
  EXPECT_EQ(compile_count(), before);

  std::ifstream index(bundle.path() + "/index-sm_90a.tsv");
  std::string line;
  int lines = 0;
  for (; std::getline(index, line); ++lines) {
    if (lines == 0) continue;
    EXPECT_TRUE(std::filesystem::exists(bundle.path() + "/" + line.substr(0, line.find('\t')))) << line;
  }
  EXPECT_EQ(lines, 6);
}

TEST_F(Jit, ADamagedBundleIsLeftAloneAndCompiledAround) {
  const testing::TemporaryDirectory bundle;
  const DeviceCode code = scale_code("float", 64, 30);
  write_bundle({code}, "sm_90", bundle.path(), nullptr);
  const std::string path = bundle.path() + "/" + content_key(code, "sm_90") + ".cubin";
  testing::overwrite(path, "not a kernel");
  change([&](Options& options) { options.bundle_directory = bundle.path(); });
  const testing::WarningRecord warnings;
  EXPECT_FALSE(obtain_cubin(code, "sm_90").cubin.empty());
  EXPECT_EQ(warnings.lines().size(), 1u);
  EXPECT_TRUE(std::filesystem::exists(path));
}

TEST_F(Jit, ABundleWithoutAPlaceToGoSaysSo) {
  const std::string message =
      error_of([] { write_bundle({scale_code("float", 64, 31)}, "sm_90", "/proc/no_such_directory", nullptr); });
  EXPECT_NE(message.find("/proc/no_such_directory"), std::string::npos) << message;
}

}  // namespace
}  // namespace kernel_pytorch::jit
