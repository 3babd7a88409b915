#include "kernel_pytorch/registry/copy_roof.h"

#include <algorithm>
#include <cstring>

#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/device/parallel.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace kernel_pytorch::registry {
namespace {

constexpr size_t kChunkBytes = 128 << 10;

// Past the cache: a line that is written whole need not be read first. Both sides are 256-byte aligned.
void copy_streaming(char* target, const char* source, size_t bytes) {
#ifdef __SSE2__
  const size_t whole = bytes / 64 * 64;
  for (size_t i = 0; i < whole; i += 64) {
    const auto* from = reinterpret_cast<const __m128i*>(source + i);
    auto* to = reinterpret_cast<__m128i*>(target + i);
    const __m128i a = _mm_load_si128(from), b = _mm_load_si128(from + 1);
    const __m128i c = _mm_load_si128(from + 2), d = _mm_load_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  _mm_sfence();
  std::memcpy(target + whole, source + whole, bytes - whole);
#else
  std::memcpy(target, source, bytes);
#endif
}

}  // namespace

CopyRoof::CopyRoof(int64_t bytes_moved, int rotations, const Context& context)
    : context_(context), bytes_(static_cast<size_t>(std::max<int64_t>(bytes_moved / 2, 1))) {
  for (int i = 0; i < rotations; ++i) {
    sources_.emplace_back(context.device(), bytes_);
    targets_.emplace_back(context.device(), bytes_);
    sources_.back().fill(1, context.stream);
    targets_.back().fill(2, context.stream);
  }
}

std::vector<tuning::Candidate> CopyRoof::candidates() const {
  std::vector<tuning::Candidate> found;
  found.push_back({"copy", "", [this](int rotation) { copy(rotation, false); }, {}});
  if (context_.info->is_cpu())
    found.push_back({"copy", "streaming", [this](int rotation) { copy(rotation, true); }, {}});
  return found;
}

void CopyRoof::copy(int rotation, bool streaming) const {
  const size_t set = static_cast<size_t>(rotation);
  if (context_.info->is_cuda()) {
    cuda_device::copy_on_device(context_.device().index, targets_[set].data(), sources_[set].data(), bytes_,
                                context_.stream);
    return;
  }
  char* target = static_cast<char*>(targets_[set].data());
  const char* source = static_cast<const char*>(sources_[set].data());
  parallel_for(context_.threads, static_cast<int64_t>((bytes_ + kChunkBytes - 1) / kChunkBytes), [&](int64_t chunk) {
    const size_t begin = static_cast<size_t>(chunk) * kChunkBytes;
    const size_t bytes = std::min(kChunkBytes, bytes_ - begin);
    if (streaming) {
      copy_streaming(target + begin, source + begin, bytes);
    } else {
      std::memcpy(target + begin, source + begin, bytes);
    }
  });
}

}  // namespace kernel_pytorch::registry
