#include "kernel_pytorch/jit/cubin_file.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <chrono>
#include <random>
#include <thread>

#include "kernel_pytorch/jit/jit_fixture_test.h"

namespace kernel_pytorch::jit {
namespace {

using testing::TemporaryDirectory;

std::string random_bytes(size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::string bytes(count, '\0');
  for (char& byte : bytes) byte = static_cast<char>(generator());
  return bytes;
}

CubinFile make_file(size_t cubin_bytes, unsigned seed = 1) {
  return {concat("space::entry<", seed, ">"), concat("_Z", seed), random_bytes(cubin_bytes, seed)};
}

TEST(CubinFile, RoundTrips) {
  for (size_t bytes : {size_t{0}, size_t{1}, size_t{63}, size_t{4096}, size_t{1} << 20}) {
    const CubinFile file = make_file(bytes, static_cast<unsigned>(bytes));
    std::string problem;
    const auto back = decode_cubin_file(encode_cubin_file(file), problem);
    ASSERT_TRUE(back) << problem;
    EXPECT_EQ(back->entry, file.entry);
    EXPECT_EQ(back->lowered_name, file.lowered_name);
    EXPECT_EQ(back->cubin, file.cubin);
  }
}

TEST(CubinFile, RefusesEveryTruncationAndEveryChangedByte) {
  const std::string bytes = encode_cubin_file(make_file(100));
  std::string problem;
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(decode_cubin_file(bytes.substr(0, length), problem)) << length;
    EXPECT_FALSE(problem.empty());
  }
  EXPECT_FALSE(decode_cubin_file(bytes + '\0', problem));
  for (size_t at = 0; at < bytes.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = bytes;
      changed[at] = static_cast<char>(changed[at] ^ (1 << bit));
      EXPECT_FALSE(decode_cubin_file(changed, problem)) << "byte " << at << " bit " << bit;
    }
  }
}

TEST(CubinFile, RefusesRandomBytesBehindAGoodBeginning) {
  const std::string good = encode_cubin_file(make_file(64));
  std::string problem;
  for (unsigned seed = 0; seed < 500; ++seed) {
    const std::string noise = random_bytes(seed, seed);
    EXPECT_FALSE(decode_cubin_file(noise, problem));
    EXPECT_FALSE(decode_cubin_file(good.substr(0, 12) + noise, problem));  // magic and format, then any lengths
  }
}

TEST(CubinFile, WritingSaysWhyItCannotAndLeavesNothing) {
  std::string problem;
  EXPECT_FALSE(write_file_atomically("/proc/no_such_directory/file", "x", problem));
  EXPECT_NE(problem.find("creating"), std::string::npos) << problem;

  // A full disk: the write fails after some bytes.
  const TemporaryDirectory directory;
  rlimit saved{};
  getrlimit(RLIMIT_FSIZE, &saved);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  const rlimit small{100, saved.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const bool written = write_file_atomically(directory.path() + "/file", random_bytes(1000, 1), problem);
  setrlimit(RLIMIT_FSIZE, &saved);
  signal(SIGXFSZ, handler);
  EXPECT_FALSE(written);
  EXPECT_NE(problem.find("writing"), std::string::npos) << problem;
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(CubinFile, ReadingTellsAbsentFromUnreadable) {
  const TemporaryDirectory directory;
  std::string problem = "old";
  EXPECT_FALSE(read_whole_file(directory.path() + "/absent", problem));
  EXPECT_EQ(problem, "");
  EXPECT_FALSE(read_whole_file(directory.path(), problem));
  EXPECT_NE(problem, "");
}

// A writer that is killed at any moment leaves the old file or the whole new one.
TEST(CubinFile, SurvivesKillsInTheMiddleOfWriting) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/kernel.cubin";
  const CubinFile first = make_file(200'000, 1), second = make_file(150'000, 2);
  const std::string versions[] = {encode_cubin_file(first), encode_cubin_file(second)};
  std::mt19937 generator(7);
  for (int round = 0; round < 50; ++round) {
    int started[2];
    ASSERT_EQ(pipe(started), 0);
    const pid_t child = fork();
    if (child == 0) {
      std::string problem;
      write_file_atomically(path, versions[0], problem);
      if (write(started[1], "x", 1) != 1) _exit(1);
      for (int i = 1;; ++i) write_file_atomically(path, versions[i % 2], problem);
    }
    char byte = 0;
    ASSERT_EQ(read(started[0], &byte, 1), 1);
    std::this_thread::sleep_for(std::chrono::microseconds(generator() % 5000));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    close(started[0]);
    close(started[1]);
    std::string problem;
    const auto bytes = read_whole_file(path, problem);
    ASSERT_TRUE(bytes) << "round " << round << ": " << problem;
    const auto file = decode_cubin_file(*bytes, problem);
    ASSERT_TRUE(file) << "round " << round << ": " << problem;
    EXPECT_TRUE(file->cubin == first.cubin || file->cubin == second.cubin);
  }
  int interrupted = 0;
  for (const auto& item : std::filesystem::directory_iterator(directory.path())) {
    if (is_temporary_name(item.path().filename().string())) ++interrupted;
  }
  EXPECT_GT(interrupted, 0) << "no kill came in the middle of a write: this test has seen nothing";
}

}  // namespace
}  // namespace kernel_pytorch::jit
