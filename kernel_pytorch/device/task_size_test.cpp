#include "kernel_pytorch/device/task_size.h"

#include <gtest/gtest.h>

namespace kernel_pytorch {
namespace {

class Workers final : public Threads {
 public:
  explicit Workers(int count) : count_(count) {}
  int count() const override { return count_; }
  void run(int, void (*)(void*, int), void*) override {}

 private:
  int count_;
};

TEST(TaskSize, LongWhereThreadsAreFewAndShortWhereTheyAreMany) {
  const Workers two(2), many(64);
  constexpr int64_t kRow = 16 << 10;
  EXPECT_EQ(rows_per_task(1024, kRow, &two), 32);  // 512 KiB
  EXPECT_EQ(rows_per_task(256, kRow, &two), 16);   // eight tasks each
  EXPECT_EQ(rows_per_task(1024, kRow, &many), 8);  // 128 KiB at least
  EXPECT_EQ(rows_per_task(1 << 20, kRow, &many), 32);
  EXPECT_EQ(rows_per_task(1024, kRow, nullptr), 32);
}

TEST(TaskSize, AtLeastOneRowAndNoMoreThanThereAre) {
  const Workers two(2);
  EXPECT_EQ(rows_per_task(4, 16 << 20, &two), 1);
  EXPECT_EQ(rows_per_task(3, 64, &two), 3);
  EXPECT_EQ(rows_per_task(3, 0, &two), 3);
  EXPECT_EQ(rows_per_task(0, 64, &two), 1);
}

}  // namespace
}  // namespace kernel_pytorch
