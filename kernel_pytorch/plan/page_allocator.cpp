#include "kernel_pytorch/plan/page_allocator.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

constexpr int64_t kMostPages = int64_t{1} << 31;

uint64_t hash_of(int64_t parent, std::span<const int32_t> tokens) {
  uint64_t hash = static_cast<uint64_t>(parent) * 0x9e3779b97f4a7c15;
  for (const int32_t token : tokens) {
    hash = (hash ^ static_cast<uint32_t>(token)) * 0xd6e8feb86659fd93;
    hash ^= hash >> 32;
  }
  return hash;
}

}  // namespace

PageAllocator::PageAllocator(int64_t pages, int64_t page_size) : page_size_(page_size) {
  KP_CHECK(pages > 0 && pages < kMostPages, "pages: ", pages, " pages; give at least one and fewer than 2^31");
  KP_CHECK(page_size > 0 && page_size <= 4096, "pages: page_size is ", page_size, "; it must be 1 to 4096");
  pages_.resize(static_cast<size_t>(pages));
  free_.reserve(pages_.size());
  for (int64_t page = pages - 1; page >= 0; --page) free_.push_back(static_cast<int32_t>(page));
}

PageAllocator::Request& PageAllocator::at(int64_t request) {
  const auto found = requests_.find(request);
  KP_CHECK(found != requests_.end(), "pages: there is no request ", request, "; it was released or never begun");
  return found->second;
}
const PageAllocator::Request& PageAllocator::at(int64_t request) const {
  return const_cast<PageAllocator*>(this)->at(request);
}

int32_t PageAllocator::take() {
  if (free_.empty()) {
    const int32_t oldest = kept_.front();
    kept_.pop_front();
    forget(pages_[oldest]);
    free_.push_back(oldest);
  }
  const int32_t page = free_.back();
  free_.pop_back();
  pages_[page].owners = 1;
  return page;
}

void PageAllocator::drop(int32_t page) {
  Page& dropped = pages_[page];
  if (--dropped.owners > 0) return;
  if (dropped.content == 0) {
    free_.push_back(page);
  } else {
    dropped.place = kept_.insert(kept_.end(), page);
  }
}

void PageAllocator::forget(Page& page) {
  const auto [first, last] = contents_.equal_range(page.hash);
  for (auto entry = first; entry != last; ++entry) {
    if (&pages_[entry->second] == &page) {
      contents_.erase(entry);
      break;
    }
  }
  page.content = page.parent = 0;
  page.hash = 0;
  page.tokens.clear();
}

int32_t PageAllocator::find(int64_t parent, std::span<const int32_t> tokens, uint64_t hash) const {
  const auto [first, last] = contents_.equal_range(hash);
  for (auto entry = first; entry != last; ++entry) {
    const Page& page = pages_[entry->second];
    if (page.parent == parent && std::ranges::equal(page.tokens, tokens)) return entry->second;
  }
  return -1;
}

PageAllocator::Begun PageAllocator::begin(std::span<const int32_t> prompt) {
  Request request;
  const auto count = static_cast<int64_t>(prompt.size());
  while (request.length + page_size_ < count) {
    const auto tokens = prompt.subspan(static_cast<size_t>(request.length), static_cast<size_t>(page_size_));
    const int32_t page = find(request.parent, tokens, hash_of(request.parent, tokens));
    if (page < 0) break;
    if (pages_[page].owners++ == 0) kept_.erase(pages_[page].place);
    request.table.push_back(page);
    request.parent = pages_[page].content;
    request.length += page_size_;
  }
  shared_tokens_ += request.length;
  const int64_t number = next_request_++;
  const int64_t shared = request.length;
  requests_.emplace(number, std::move(request));
  return {number, shared};
}

int64_t PageAllocator::pages_for(int64_t request, int64_t tokens) const {
  const Request& owner = at(request);
  if (tokens <= 0) return 0;
  const int64_t before = static_cast<int64_t>(owner.table.size());
  const int64_t after = (owner.length + tokens + page_size_ - 1) / page_size_;
  return std::max<int64_t>(after - before, 0) + must_copy(owner);
}

// The last page is full: whoever begins with the same tokens may share it. One of several equal pages is found.
void PageAllocator::seal(Request& request) {
  const uint64_t hash = hash_of(request.parent, request.last);
  const int32_t known = find(request.parent, request.last, hash);
  if (known >= 0) {
    request.parent = pages_[known].content;
  } else {
    const int32_t number = request.table[static_cast<size_t>((request.length - 1) / page_size_)];
    Page& page = pages_[number];
    page.content = next_content_++;
    page.hash = hash;
    page.parent = request.parent;
    page.tokens = request.last;
    contents_.emplace(hash, number);
    request.parent = page.content;
  }
  request.last.clear();
}

PageCopy PageAllocator::reserve(int64_t request, int64_t tokens) {
  Request& owner = at(request);
  const int64_t needed = pages_for(request, tokens);
  if (needed > available()) {
    fail(ErrorCode::kDevice, "pages: request ", request, " needs ", needed, " more pages, ", available(),
         " are free; release a request or make the cache larger");
  }
  PageCopy copy;
  if (tokens <= 0) return copy;
  if (must_copy(owner)) {
    int32_t& page = owner.table[place_of_next(owner)];
    copy = {.from = page, .to = take(), .rows = static_cast<int32_t>(owner.last.size())};
    drop(copy.from);
    page = copy.to;
  }
  while (static_cast<int64_t>(owner.table.size()) * page_size_ < owner.length + tokens) owner.table.push_back(take());
  return copy;
}

PageCopy PageAllocator::extend(int64_t request, std::span<const int32_t> tokens, std::span<int64_t> slots) {
  Request& owner = at(request);
  KP_CHECK(slots.size() == tokens.size(), "pages: ", tokens.size(), " tokens, ", slots.size(),
           " slots; give as many slots as tokens");
  const PageCopy copy = reserve(request, static_cast<int64_t>(tokens.size()));
  for (size_t i = 0; i < tokens.size(); ++i) {
    slots[i] = int64_t{owner.table[place_of_next(owner)]} * page_size_ + static_cast<int64_t>(owner.last.size());
    owner.last.push_back(tokens[i]);
    ++owner.length;
    if (static_cast<int64_t>(owner.last.size()) == page_size_) seal(owner);
  }
  return copy;
}

int64_t PageAllocator::fork(int64_t request) {
  Request copy = at(request);
  copy.table.resize(static_cast<size_t>((copy.length + page_size_ - 1) / page_size_));
  for (const int32_t page : copy.table) ++pages_[page].owners;
  const int64_t number = next_request_++;
  requests_.emplace(number, std::move(copy));
  return number;
}

// From the last page to the first: where memory is needed, the ends of prompts go before their beginnings.
void PageAllocator::release(int64_t request) {
  Request& owner = at(request);
  for (auto page = owner.table.rbegin(); page != owner.table.rend(); ++page) drop(*page);
  requests_.erase(request);
}

std::span<const int32_t> PageAllocator::table(int64_t request) const {
  return at(request).table;
}

int64_t PageAllocator::length(int64_t request) const {
  return at(request).length;
}

}  // namespace kernel_pytorch::plan
