#include "kernel_pytorch/c/pages.h"

#include <algorithm>

#include "kernel_pytorch/c/border.h"
#include "kernel_pytorch/plan/page_allocator.h"

using kernel_pytorch::c_interface::guarded;

struct kp_pages {
  kernel_pytorch::plan::PageAllocator allocator;
};

namespace {

const kp_pages& present(const kp_pages* pages, const char* function) {
  KP_CHECK(pages != nullptr, function, ": pages is NULL");
  return *pages;
}
kp_pages& present(kp_pages* pages, const char* function) {
  KP_CHECK(pages != nullptr, function, ": pages is NULL");
  return *pages;
}
template <class... Pointer>
void check_outputs(const char* function, const Pointer*... outputs) {
  KP_CHECK(((outputs != nullptr) && ...), function, ": a pointer for a result is NULL");
}
std::span<const int32_t> tokens_of(const char* function, const int32_t* tokens, size_t count) {
  KP_CHECK(tokens != nullptr || count == 0, function, ": ", count, " tokens at NULL");
  return {tokens, count};
}
void report(const kernel_pytorch::plan::PageCopy& made, int32_t copy[3]) {
  copy[0] = made.from;
  copy[1] = made.to;
  copy[2] = made.rows;
}

}  // namespace

kp_status kp_pages_create(int64_t pages, int64_t page_size, kp_pages** result) {
  if (result != nullptr) *result = nullptr;
  return guarded([&] {
    check_outputs("kp_pages_create", result);
    *result = new kp_pages{kernel_pytorch::plan::PageAllocator(pages, page_size)};
  });
}

void kp_pages_destroy(kp_pages* pages) {
  delete pages;
}

kp_status kp_pages_begin(kp_pages* pages, const int32_t* prompt, size_t count, int64_t* request, int64_t* shared) {
  return guarded([&] {
    check_outputs("kp_pages_begin", request, shared);
    const auto begun = present(pages, "kp_pages_begin").allocator.begin(tokens_of("kp_pages_begin", prompt, count));
    *request = begun.request;
    *shared = begun.shared;
  });
}

kp_status kp_pages_reserve(kp_pages* pages, int64_t request, int64_t tokens, int32_t copy[3]) {
  return guarded([&] {
    check_outputs("kp_pages_reserve", copy);
    report(present(pages, "kp_pages_reserve").allocator.reserve(request, tokens), copy);
  });
}

kp_status kp_pages_extend(kp_pages* pages, int64_t request, const int32_t* tokens, size_t count, int64_t* slots,
                          int32_t copy[3]) {
  return guarded([&] {
    check_outputs("kp_pages_extend", copy);
    KP_CHECK(slots != nullptr || count == 0, "kp_pages_extend: ", count, " slots at NULL");
    report(present(pages, "kp_pages_extend")
               .allocator.extend(request, tokens_of("kp_pages_extend", tokens, count), {slots, count}),
           copy);
  });
}

kp_status kp_pages_fork(kp_pages* pages, int64_t request, int64_t* forked) {
  return guarded([&] {
    check_outputs("kp_pages_fork", forked);
    *forked = present(pages, "kp_pages_fork").allocator.fork(request);
  });
}

kp_status kp_pages_release(kp_pages* pages, int64_t request) {
  return guarded([&] { present(pages, "kp_pages_release").allocator.release(request); });
}

kp_status kp_pages_table(const kp_pages* pages, int64_t request, int32_t* table, size_t room, int64_t* count) {
  return guarded([&] {
    check_outputs("kp_pages_table", count);
    const auto owned = present(pages, "kp_pages_table").allocator.table(request);
    KP_CHECK(table != nullptr || room == 0, "kp_pages_table: a table of ", room, " pages at NULL");
    const size_t copied = std::min(room, owned.size());
    std::copy_n(owned.begin(), copied, table);
    std::fill(table + copied, table + room, -1);
    *count = static_cast<int64_t>(owned.size());
  });
}

kp_status kp_pages_counts(const kp_pages* pages, int64_t request, int64_t tokens, int64_t counts[4]) {
  return guarded([&] {
    check_outputs("kp_pages_counts", counts);
    const auto& allocator = present(pages, "kp_pages_counts").allocator;
    counts[0] = allocator.available();
    counts[1] = request == 0 ? 0 : allocator.pages_for(request, tokens);
    counts[2] = allocator.shared_tokens();
    counts[3] = allocator.requests();
  });
}
