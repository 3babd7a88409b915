// Random operations against a model: the memory that the slots name, and the tokens that each request should find in
// it.
#include "kernel_pytorch/plan/page_allocator.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "kernel_pytorch/base/emulation_test.h"
#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

class Model {
 public:
  Model(int64_t pages, int64_t page_size)
      : allocator(pages, page_size),
        memory_(static_cast<size_t>(pages * page_size), -1),
        pages_(pages),
        page_size_(page_size) {}

  int64_t begin(const std::vector<int32_t>& prompt) {
    const auto [request, shared] = allocator.begin(prompt);
    EXPECT_TRUE(shared == 0 || shared < static_cast<int64_t>(prompt.size()));
    EXPECT_EQ(shared % page_size_, 0);
    requests[request].assign(prompt.begin(), prompt.begin() + shared);
    check(request);
    return request;
  }
  void extend(int64_t request, const std::vector<int32_t>& tokens) {
    std::vector<int64_t> slots(tokens.size());
    const int64_t needed = allocator.pages_for(request, static_cast<int64_t>(tokens.size()));
    const int64_t before = allocator.available();
    if (needed > before) {
      EXPECT_THROW(allocator.extend(request, tokens, slots), Error);
      EXPECT_EQ(allocator.available(), before);
      check(request);
      return;
    }
    copy(allocator.extend(request, tokens, slots));
    for (size_t i = 0; i < tokens.size(); ++i) memory_[static_cast<size_t>(slots[i])] = tokens[i];
    auto& owned = requests[request];
    owned.insert(owned.end(), tokens.begin(), tokens.end());
    check(request);
  }
  void reserve(int64_t request, int64_t tokens) {
    if (allocator.pages_for(request, tokens) > allocator.available()) return;
    copy(allocator.reserve(request, tokens));
    check(request);
  }
  void copy(const PageCopy& copy) {
    for (int32_t row = 0; row < copy.rows; ++row) {
      memory_[static_cast<size_t>(copy.to * page_size_ + row)] =
          memory_[static_cast<size_t>(copy.from * page_size_ + row)];
    }
  }
  void fork(int64_t request) {
    const int64_t forked = allocator.fork(request);
    requests[forked] = requests[request];
    check(forked);
  }
  void release(int64_t request) {
    allocator.release(request);
    requests.erase(request);
  }

  // The pages of a request hold its tokens.
  void check(int64_t request) {
    const auto& tokens = requests[request];
    const auto table = allocator.table(request);
    ASSERT_EQ(allocator.length(request), static_cast<int64_t>(tokens.size()));
    ASSERT_GE(static_cast<int64_t>(table.size()), (allocator.length(request) + page_size_ - 1) / page_size_);
    for (size_t i = 0; i < tokens.size(); ++i) {
      const int32_t page = table[i / static_cast<size_t>(page_size_)];
      ASSERT_EQ(memory_[static_cast<size_t>(page * page_size_) + i % static_cast<size_t>(page_size_)], tokens[i]);
    }
  }
  // No page is free and owned, none is lost.
  void check_all() {
    std::map<int32_t, int> owned;
    for (const auto& [request, tokens] : requests) {
      check(request);
      for (const int32_t page : allocator.table(request)) ++owned[page];
    }
    ASSERT_EQ(static_cast<int64_t>(owned.size()) + allocator.available(), pages_);
  }

  PageAllocator allocator;
  std::map<int64_t, std::vector<int32_t>> requests;

 private:
  std::vector<int32_t> memory_;
  int64_t pages_, page_size_;
};

TEST(PageAllocator, MillionRandomOperationsKeepEveryRequestsTokens) {
  const int steps = unless_emulated(334'000, 50'000);
  std::mt19937 random(1);
  const auto below = [&](int limit) { return static_cast<int>(random() % static_cast<unsigned>(limit)); };
  int64_t operations = 0;
  for (const int page_size : {1, 4, 16}) {
    Model model(48, page_size);
    std::vector<std::vector<int32_t>> prompts(6);  // with common beginnings
    for (size_t i = 0; i < prompts.size(); ++i) {
      if (i % 2 == 1) prompts[i].assign(prompts[i - 1].begin(), prompts[i - 1].begin() + 3 * page_size);
      while (static_cast<int>(prompts[i].size()) < 7 * page_size) prompts[i].push_back(below(3));
    }
    for (int step = 0; step < steps && !testing::Test::HasFatalFailure(); ++step, ++operations) {
      const auto any = [&] {
        return std::next(model.requests.begin(), below(static_cast<int>(model.requests.size())))->first;
      };
      const int kind = below(10);
      if (model.requests.empty() || (kind < 2 && model.requests.size() < 12)) {
        const auto& prompt = prompts[static_cast<size_t>(below(6))];
        const std::vector<int32_t> part(prompt.begin(), prompt.begin() + 1 + below(static_cast<int>(prompt.size())));
        const int64_t request = model.begin(part);
        const auto shared = static_cast<size_t>(model.allocator.length(request));
        model.extend(request, {part.begin() + static_cast<ptrdiff_t>(shared), part.end()});
      } else if (kind == 2) {
        model.reserve(any(), below(2 * page_size + 2));
      } else if (kind < 7) {
        std::vector<int32_t> tokens(static_cast<size_t>(below(page_size + 2)));
        for (int32_t& token : tokens) token = below(3);
        model.extend(any(), tokens);
      } else if (kind == 7 && model.requests.size() < 12) {
        model.fork(any());
      } else {
        model.release(any());
      }
      if (step % 97 == 0) model.check_all();
    }
    while (!model.requests.empty()) model.release(model.requests.begin()->first);
    EXPECT_EQ(model.allocator.available(), 48);
    EXPECT_GT(model.allocator.shared_tokens(), unless_emulated(1000, 150));
  }
  EXPECT_GE(operations, 3 * steps);
}

TEST(PageAllocator, SharesFullPagesOfEqualPromptsAlsoAfterRelease) {
  PageAllocator pages(8, 2);
  const std::vector<int32_t> prompt{1, 2, 3, 4, 5};
  std::vector<int64_t> slots(5);
  const auto first = pages.begin(prompt);
  EXPECT_EQ(first.shared, 0);
  pages.extend(first.request, prompt, slots);
  const auto second = pages.begin(prompt);
  EXPECT_EQ(second.shared, 4);
  EXPECT_EQ(pages.table(second.request)[1], pages.table(first.request)[1]);
  pages.release(first.request);
  pages.release(second.request);
  EXPECT_EQ(pages.begin(prompt).shared, 4);
  EXPECT_EQ(pages.begin(std::vector<int32_t>{1, 2, 3, 4}).shared, 2);  // the last token is always computed
  EXPECT_EQ(pages.begin(std::vector<int32_t>{3, 4, 3, 4}).shared, 0);  // the same tokens after others
}

TEST(PageAllocator, ForkCopiesOnWrite) {
  PageAllocator pages(4, 4);
  std::vector<int64_t> slots(3);
  const auto [request, shared] = pages.begin(std::vector<int32_t>{7});
  pages.extend(request, std::vector<int32_t>{7, 8, 9}, slots);
  const int64_t forked = pages.fork(request);
  slots.resize(1);
  const PageCopy copy = pages.extend(forked, std::vector<int32_t>{1}, slots);
  EXPECT_EQ(copy.rows, 3);
  EXPECT_EQ(copy.from, pages.table(request)[0]);
  EXPECT_EQ(slots[0], copy.to * 4 + 3);
  EXPECT_EQ(pages.extend(request, std::vector<int32_t>{2}, slots).rows, 0);  // now alone
}

TEST(PageAllocator, RefusesWithASentence) {
  EXPECT_THROW(PageAllocator(0, 16), Error);
  EXPECT_THROW(PageAllocator(4, 0), Error);
  PageAllocator pages(1, 2);
  EXPECT_THROW(pages.release(5), Error);
  const auto request = pages.begin(std::vector<int32_t>{1, 2, 3}).request;
  std::vector<int64_t> slots(3);
  try {
    pages.extend(request, std::vector<int32_t>{1, 2, 3}, slots);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDevice);
    EXPECT_NE(error.message().find("needs 2 more pages, 1 are free"), std::string::npos);
  }
}

}  // namespace
}  // namespace kernel_pytorch::plan
