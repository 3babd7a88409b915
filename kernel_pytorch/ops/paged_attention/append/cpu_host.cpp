// The host side of append on the CPU: a task is some tokens; a token's cos and sin are read once for all its heads.
#include <cstring>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/paged_attention/append/rows.h"
#include "kernel_pytorch/ops/paged_attention/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::paged_attention {
namespace {

constexpr int64_t kTaskTokens = 16;

char* address_in(const TensorView& view, int64_t offset) {
  return static_cast<char*>(view.data) + offset * size_of(view.dtype);
}

class Appender {
 public:
  Appender(const Append& problem, const AppendKernels* kernels)
      : problem_(problem),
        kernels_(kernels),
        rotation_(rotation_of(problem)),
        cos_(static_cast<size_t>(rotation_.pairs)),
        sin_(static_cast<size_t>(rotation_.pairs)),
        space_(static_cast<size_t>(problem.cos.is_present() ? problem.key.sizes[2] : 0)) {}

  void append(int64_t token) {
    const int64_t slot = checked_slot(problem_, token);
    if (slot < 0) return;
    if (problem_.cos.is_present()) {
      const int64_t row = checked_row(problem_, token);
      read(problem_.cos, row, cos_);
      read(problem_.sin, row, sin_);
    }
    for (int64_t head = 0; head < problem_.key_cache.sizes[2]; ++head) {
      write(problem_.key, token, problem_.key_cache, problem_.key_scale, slot, head, problem_.cos.is_present());
      write(problem_.value, token, problem_.value_cache, problem_.value_scale, slot, head, false);
    }
  }

 private:
  void read(const TensorView& table, int64_t row, std::vector<float>& values) const {
    const int64_t place = row * table.strides[0], step = rotation_.step * table.strides[1];
    if (step == 1) {
      kernels_[cpu_type_index(table.dtype)].widen(address_in(table, place), values.data(),
                                                  static_cast<int64_t>(values.size()));
      return;
    }
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<float>(load_element(table.data, table.dtype, place + static_cast<int64_t>(i) * step));
    }
  }

  void write(const TensorView& rows, int64_t token, const TensorView& cache, const TensorView& scale, int64_t slot,
             int64_t head, bool is_turned) {
    const int64_t page = slot / cache.sizes[1], row = slot % cache.sizes[1];
    const char* from = address_in(rows, token * rows.strides[0] + head * rows.strides[1]);
    char* to = address_in(cache, page * cache.strides[0] + row * cache.strides[1] + head * cache.strides[2]);
    if (!is_turned && cache.dtype == rows.dtype) {
      std::memcpy(to, from, static_cast<size_t>(cache.sizes[3] * size_of(rows.dtype)));
      return;
    }
    const int code = cache.dtype == rows.dtype ? 0 : cache.dtype == DType::kFloat8E4M3 ? 1 : 2;
    kernels_[cpu_type_index(rows.dtype)].write[code]({.from = from,
                                                      .to = to,
                                                      .size = cache.sizes[3],
                                                      .divisor = scale_at(scale, page, row, head),
                                                      .cos = is_turned ? cos_.data() : nullptr,
                                                      .sin = is_turned ? sin_.data() : nullptr,
                                                      .pairs = rotation_.pairs,
                                                      .interleaved = problem_.interleaved,
                                                      .space = space_.data()});
  }

  const Append& problem_;
  const AppendKernels* kernels_;
  Rotation rotation_;
  std::vector<float> cos_, sin_, space_;
};

registry::Support supports_append(const Append&, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(device));
}

void run_append_cpu(const Append& problem, int, Context& context) {
  const AppendKernels* kernels = KP_AT_CPU_LEVEL(context.info->cpu.isa, kAppendKernels);
  const int64_t tokens = problem.key.sizes[0];
  parallel_for(context.threads, (tokens + kTaskTokens - 1) / kTaskTokens, [&](int64_t task) {
    Appender appender(problem, kernels);
    for (int64_t token = task * kTaskTokens; token < std::min(tokens, (task + 1) * kTaskTokens); ++token) {
      appender.append(token);
    }
  });
}

uint64_t append_version() {
  return hash_text("append_kv cpu 2");
}

}  // namespace

constinit const registry::Kernel<Append> kAppendCpu{
    .name = "cpu", .supports = supports_append, .run = run_append_cpu, .source_hash = append_version};

}  // namespace kernel_pytorch::paged_attention
