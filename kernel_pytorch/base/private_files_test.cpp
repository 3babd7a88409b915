#include "kernel_pytorch/base/private_files.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace kernel_pytorch {
namespace {

namespace fs = std::filesystem;

class PrivateFiles : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/kernel_pytorch_private_XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    root_ = name;
  }
  void TearDown() override { fs::remove_all(root_); }
  static unsigned mode_of(const std::string& path) {
    struct stat facts {};
    return stat(path.c_str(), &facts) == 0 ? facts.st_mode & 0777 : 0;
  }
  std::string root_;
};

TEST_F(PrivateFiles, AreMadeForTheirOwnerAlone) {
  const mode_t before = umask(0);
  make_private_folders(root_ + "/a/b");
  make_private_file(root_ + "/a/b/file");
  umask(before);
  EXPECT_EQ(mode_of(root_ + "/a"), 0700u);
  EXPECT_EQ(mode_of(root_ + "/a/b"), 0700u);
  EXPECT_EQ(mode_of(root_ + "/a/b/file"), 0600u);
  ASSERT_EQ(chmod((root_ + "/a/b/file").c_str(), 0644), 0);
  make_private_file(root_ + "/a/b/file");
  EXPECT_EQ(mode_of(root_ + "/a/b/file"), 0600u) << "one that an older version made";
}

TEST_F(PrivateFiles, MayBeUsedByTheirOwnerOrWhereThereAreNone) {
  EXPECT_EQ(reason_not_private(root_), "");
  EXPECT_EQ(reason_not_private(root_ + "/none"), "");
  ASSERT_EQ(chmod(root_.c_str(), 0755), 0);
  EXPECT_EQ(reason_not_private(root_), "") << "others may read";
  fs::create_directory_symlink(root_, root_ + "/link");
  EXPECT_EQ(reason_not_private(root_ + "/link"), "");
}

TEST_F(PrivateFiles, MustNotBeUsedWhereOthersMayWrite) {
  for (const mode_t mode : {0720, 0702, 0777}) {
    ASSERT_EQ(chmod(root_.c_str(), mode), 0);
    const std::string reason = reason_not_private(root_);
    EXPECT_NE(reason.find("other users may write to " + root_), std::string::npos) << reason;
    EXPECT_NE(reason.find("chmod go-w " + root_), std::string::npos) << reason;
    EXPECT_NE(reason.find("KERNEL_PYTORCH_CACHE_DIR"), std::string::npos) << reason;
  }
  ASSERT_EQ(chmod(root_.c_str(), 0700), 0);
}

TEST_F(PrivateFiles, LinksThatLeadNowhereMustNotBeUsedNorFollowed) {
  const std::string link = root_ + "/link", target = root_ + "/target";
  fs::create_symlink(target, link);
  EXPECT_NE(reason_not_private(link).find("leads nowhere"), std::string::npos);
  make_private_file(link);
  EXPECT_FALSE(fs::exists(target));
}

TEST_F(PrivateFiles, OfAnotherUserMustNotBeUsedEvenByRoot) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  const std::string file = root_ + "/file", link = root_ + "/link";
  std::ofstream(file) << "x";
  fs::create_symlink(file, link);
  ASSERT_EQ(chown(file.c_str(), 1234, 1234), 0);
  for (const std::string& path : {file, link}) {
    const std::string reason = reason_not_private(path);
    EXPECT_NE(reason.find("belongs to user 1234, this process runs as user 0"), std::string::npos) << reason;
  }
  ASSERT_EQ(chown(file.c_str(), 0, 0), 0);
  ASSERT_EQ(lchown(link.c_str(), 1234, 1234), 0);
  EXPECT_NE(reason_not_private(link), "") << "the link itself";
}

}  // namespace
}  // namespace kernel_pytorch
