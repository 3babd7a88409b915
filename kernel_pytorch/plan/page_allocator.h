// Who owns which pages of a cache of keys and values. A request is a row of tokens; its table names the page of each
// page_size of them. A page belongs to one request, or to several that share what it holds: forked ones, and those
// whose prompts begin alike (a page that is full is found again by its tokens and all tokens before them, also after
// its owner is gone, until its memory is needed). A shared page that would be written is copied first.
//
// Two requests never own a page with different contents: that is what the test's 10^6 random operations look for.
// Contents are compared token by token, never by a hash alone. Not for several threads at once.
#pragma once

#include <cstdint>
#include <list>
#include <span>
#include <unordered_map>
#include <vector>

#include "kernel_pytorch/base/export.h"

namespace kernel_pytorch::plan {

// Before anything else is written the first `rows` rows of page `from` must be copied to page `to`.
struct PageCopy {
  int32_t from = 0, to = 0, rows = 0;
};

class KP_EXPORT PageAllocator {
 public:
  PageAllocator(int64_t pages, int64_t page_size);

  struct Begun {
    int64_t request = 0;
    int64_t shared = 0;  // tokens at the front whose pages are there already
  };
  // A request without tokens of its own: it owns the full pages that begin as `prompt` does, but never all of the
  // prompt, since the last token's result is wanted.
  Begun begin(std::span<const int32_t> prompt);
  // Pages for that many tokens more, whatever they will be, and the copy to make first; no copy has rows 0. All or
  // nothing: with too few pages it throws Error{kDevice} and changes nothing.
  PageCopy reserve(int64_t request, int64_t tokens);
  // Reserves, adds the tokens and writes their slots (page * page_size + row).
  PageCopy extend(int64_t request, std::span<const int32_t> tokens, std::span<int64_t> slots);
  // Another request that owns all pages with tokens of this one.
  int64_t fork(int64_t request);
  void release(int64_t request);

  std::span<const int32_t> table(int64_t request) const;
  int64_t length(int64_t request) const;                     // in tokens
  int64_t pages_for(int64_t request, int64_t tokens) const;  // that reserve would take
  int64_t available() const { return static_cast<int64_t>(free_.size() + kept_.size()); }
  int64_t shared_tokens() const { return shared_tokens_; }  // by all calls of begin
  int64_t requests() const { return static_cast<int64_t>(requests_.size()); }

 private:
  struct Page {
    int32_t owners = 0;
    int64_t content = 0;                   // the number of a full page's content; 0: it can change
    uint64_t hash = 0;                     // of that content, in contents_
    int64_t parent = 0;                    // the content before it, 0 for the first page of a request
    std::vector<int32_t> tokens{};         // of that content
    std::list<int32_t>::iterator place{};  // in kept_, where nobody owns it
  };
  struct Request {
    std::vector<int32_t> table{};  // pages with tokens, then reserved ones
    std::vector<int32_t> last{};   // the tokens of the page that is not full
    int64_t parent = 0;            // the content before them
    int64_t length = 0;
  };

  // Of the next token; past the end of the table where none is reserved.
  size_t place_of_next(const Request& request) const { return static_cast<size_t>(request.length / page_size_); }
  bool must_copy(const Request& request) const {
    return !request.last.empty() && pages_[request.table[place_of_next(request)]].owners > 1;
  }
  Request& at(int64_t request);
  const Request& at(int64_t request) const;
  int32_t take();
  void drop(int32_t page);
  void forget(Page& page);
  int32_t find(int64_t parent, std::span<const int32_t> tokens, uint64_t hash) const;  // -1: none
  void seal(Request& request);

  int64_t page_size_;
  std::vector<Page> pages_;
  std::vector<int32_t> free_;
  std::list<int32_t> kept_;  // full pages without owners, longest unused first
  std::unordered_multimap<uint64_t, int32_t> contents_;
  std::unordered_map<int64_t, Request> requests_;
  int64_t next_request_ = 1, next_content_ = 1, shared_tokens_ = 0;
};

}  // namespace kernel_pytorch::plan
