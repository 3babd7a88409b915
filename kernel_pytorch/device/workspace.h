// Scratch memory that a caller gives along with a call, and how much of it a call takes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch {

// Both classes below cut the same pieces, so that what one counts is enough for the other.
inline constexpr size_t kWorkspaceAlignment = 256;
inline size_t workspace_piece(size_t bytes) {
  return (std::max<size_t>(bytes, 1) + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

// Counts, and gives out addresses without memory: for a rehearsal (device/cuda/rehearsal.h).
class CountingScratch final : public Scratch {
 public:
  void* allocate(size_t bytes) override {
    void* address = reinterpret_cast<void*>(kNowhere + bytes_);
    bytes_ += workspace_piece(bytes);
    return address;
  }
  // For memory that begins anywhere.
  size_t bytes() const { return bytes_ == 0 ? 0 : bytes_ + kWorkspaceAlignment - 1; }

 private:
  static constexpr uintptr_t kNowhere = uintptr_t{1} << 46;
  size_t bytes_ = 0;
};

// The caller's memory, from its first multiple of 256 bytes on. Where it is too small, the rest is the context's own
// scratch; but not while its stream captures: a graph would keep writing into memory that the next call has by then.
// That rest is allocated for this capture alone and never freed.
class KP_EXPORT WorkspaceScratch final : public Scratch {
 public:
  WorkspaceScratch(void* memory, size_t bytes, Context& context);
  void* allocate(size_t bytes) override;
  void enter_call() override { own_->enter_call(); }
  void leave_call() noexcept override { own_->leave_call(); }

 private:
  char* memory_;
  size_t bytes_, used_ = 0;
  Scratch* own_;
  Device device_;
  void* stream_;
};

}  // namespace kernel_pytorch
