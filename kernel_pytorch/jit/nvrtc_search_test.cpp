#include "kernel_pytorch/jit/nvrtc_search.h"

#include <gtest/gtest.h>

#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/jit/jit_fixture_test.h"

namespace kernel_pytorch::jit {
namespace {

namespace fs = std::filesystem;

class NvrtcSearch : public testing::CacheTest {
 protected:
  NvrtcSearch() {
    change([](Options& options) { options.nvrtc_library = ""; });
  }
  ~NvrtcSearch() override { set_nvrtc_search_path(saved_path_); }
  void touch(const std::string& file) const {
    fs::create_directories((fs::path(folder_.path()) / file).parent_path());
    testing::overwrite(folder_.path() + "/" + file, "");
  }
  std::string folder(const std::string& name) const { return folder_.path() + "/" + name; }
  static std::vector<NvrtcCandidate> from_search_path() {
    std::vector<NvrtcCandidate> found;
    for (const NvrtcCandidate& candidate : nvrtc_candidates()) {
      if (candidate.how == "set_nvrtc_search_path") found.push_back(candidate);
    }
    return found;
  }

 private:
  const std::string saved_path_ = nvrtc_search_path();
  testing::TemporaryDirectory folder_;
};

TEST_F(NvrtcSearch, ReadsTheVersionFromTheBuiltinsBesideIt) {
  touch("a/libnvrtc.so.13");
  touch("a/libnvrtc.alt.so.13");
  touch("a/libnvrtc-builtins.so.13.0");
  touch("a/libnvrtc-builtins.alt.so.13.1");
  set_nvrtc_search_path(folder("a"));
  const auto found = from_search_path();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].path, folder("a") + "/libnvrtc.so.13");
  EXPECT_EQ(found[0].builtins, folder("a") + "/libnvrtc-builtins.so.13.0");
  EXPECT_EQ(found[0].major, 13);
  EXPECT_EQ(found[0].minor, 0);
}

TEST_F(NvrtcSearch, ReadsTheVersionFromTheTargetOfALink) {
  touch("b/libnvrtc.so.12.8.93");
  touch("b/libnvrtc-builtins.so.12.4");
  touch("b/libnvrtc-builtins.so.12.8");
  fs::create_symlink("libnvrtc.so.12.8.93", folder("b/libnvrtc.so.12"));
  touch("c/libnvrtc.so.13");
  set_nvrtc_search_path(folder("none") + "::" + folder("b") + ":" + folder("c"));
  const auto found = from_search_path();
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].major, 12);
  EXPECT_EQ(found[0].minor, 8);
  EXPECT_EQ(found[0].builtins, folder("b") + "/libnvrtc-builtins.so.12.8");
  EXPECT_EQ(found[1].major, 0) << "no file name tells: it has to be loaded";
  EXPECT_EQ(found[1].builtins, "");
}

TEST_F(NvrtcSearch, ANamedLibraryIsTheOnlyOne) {
  const std::string nowhere = folder("nowhere/libnvrtc.so.13");
  change([&](Options& options) { options.nvrtc_library = nowhere; });
  ASSERT_EQ(nvrtc_candidates().size(), 1u);
  EXPECT_EQ(nvrtc_candidates()[0].path, nowhere);
  for (bool load : {false, true}) {
    const NvrtcInfo& info = nvrtc_info(load);
    EXPECT_FALSE(info.found);
    EXPECT_NE(info.absence.find(nowhere), std::string::npos) << info.absence;
    EXPECT_NE(info.absence.find("pip install nvidia-cuda-nvrtc"), std::string::npos) << info.absence;
  }
}

TEST_F(NvrtcSearch, AFileThatIsNoLibraryIsPassedOverWithTheLoadersWords) {
  touch("d/libnvrtc.so.13");
  change([&](Options& options) { options.nvrtc_library = folder("d/libnvrtc.so.13"); });
  const NvrtcInfo& info = nvrtc_info(true);
  EXPECT_FALSE(info.found);
  EXPECT_NE(info.absence.find("too short"), std::string::npos) << info.absence;
}

TEST_F(NvrtcSearch, AnOldVersionIsRefused) {
  touch("e/libnvrtc.so.11");
  touch("e/libnvrtc-builtins.so.11.8");
  change([&](Options& options) { options.nvrtc_library = folder("e/libnvrtc.so.11"); });
  EXPECT_NE(nvrtc_info().absence.find("version 11.8 is older than 12.0"), std::string::npos) << nvrtc_info().absence;
}

}  // namespace
}  // namespace kernel_pytorch::jit
