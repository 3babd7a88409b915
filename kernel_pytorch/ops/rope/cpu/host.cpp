// The host side of the CPU kernel: tokens are shared out among threads, each brings its cos and sin to float once and
// turns all heads with them.
#include <algorithm>
#include <cmath>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/rope/cpu/rows.h"
#include "kernel_pytorch/ops/rope/operation.h"
#include "kernel_pytorch/ops/rope/table.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::rope {
namespace {

constexpr int64_t kTaskElements = 32 << 10;  // long enough to hide the atomic, short enough to balance

RowKernels kernels_for(const Context& context, DType dtype) {
  return KP_AT_CPU_LEVEL(context.info->cpu.isa, row_kernels)(cpu_type_index(dtype));
}

registry::Support supports(const Problem& problem, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(problem.query.dtype, device, {&problem.query, &problem.key}));
}

std::vector<std::string> configs(const Problem&, const DeviceInfo&) {
  return store_configs();
}
int heuristic(const Problem& problem, const DeviceInfo&) {
  if (problem.in_place) return kCachedStores;
  const int64_t bytes = problem.query.byte_count() + problem.key.byte_count();
  return bytes >= kStreamFromBytes ? kStreamStores : kCachedStores;
}

// Every place that a streamed pair of vectors is written to begins a line.
bool lines_are_whole(const TensorView& output, const Problem& problem) {
  return !output.is_present() ||
         (has_aligned_rows(output, kLineBytes) && problem.pairs() * size_of(output.dtype) % kLineBytes == 0);
}

// One token's cos and sin as floats.
class TokenTable {
 public:
  TokenTable(const Problem& problem, const RowKernels& kernels)
      : problem_(problem), kernels_(kernels), cos_(static_cast<size_t>(problem.pairs())), sin_(cos_.size()) {}

  void fill(int64_t batch, int64_t place) {
    const int64_t position = position_of(problem_, batch, place);
    if (problem_.cos.is_present()) {
      read(problem_.cos, batch, position, cos_);
      read(problem_.sin, batch, position, sin_);
    } else {
      compute(position);
    }
    if (problem_.inverse) {
      for (float& sine : sin_) sine = -sine;
    }
  }
  const float* cosines() const { return cos_.data(); }
  const float* sines() const { return sin_.data(); }

 private:
  void read(const TensorView& table, int64_t batch, int64_t position, std::vector<float>& values) const {
    const int64_t start = batch * table.strides[0] + position * table.strides[1];
    const int64_t step = problem_.table_step() * table.strides[2];
    if (step == 1 && table.dtype == DType::kFloat32) {
      std::copy_n(table.as<float>() + start, values.size(), values.begin());
    } else if (step == 1) {
      kernels_.widen(static_cast<char*>(table.data) + start * size_of(table.dtype), values.data(),
                     static_cast<int64_t>(values.size()));
    } else {
      for (size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<float>(load_element(table.data, table.dtype, start + static_cast<int64_t>(i) * step));
      }
    }
  }
  void compute(int64_t position) {
    const float* frequencies = problem_.inverse_frequencies.as<float>();
    for (size_t i = 0; i < cos_.size(); ++i) {
      const double angle = static_cast<double>(position) * static_cast<double>(frequencies[i]);
      cos_[i] = static_cast<float>(std::cos(angle) * problem_.scale);
      sin_[i] = static_cast<float>(std::sin(angle) * problem_.scale);
    }
  }

  const Problem& problem_;
  const RowKernels& kernels_;
  std::vector<float> cos_, sin_;
};

void rotate_heads(const Problem& problem, const TensorView& input, const TensorView& output, int64_t batch,
                  int64_t place, const TokenTable& table, bool stream, const RowKernels& kernels) {
  if (!input.is_present() || input.sizes[2] == 0) return;
  const auto token = [&](const TensorView& view) {
    return static_cast<char*>(view.data) + (batch * view.strides[0] + place * view.strides[1]) * size_of(view.dtype);
  };
  kernels.rotate({.input = token(input),
                  .output = token(output),
                  .input_stride_elements = input.strides[2],
                  .output_stride_elements = output.strides[2],
                  .heads = input.sizes[2],
                  .head_dim = problem.head_dim(),
                  .pairs = problem.pairs(),
                  .cos = table.cosines(),
                  .sin = table.sines(),
                  .interleaved = problem.interleaved,
                  .copies_rest = !problem.in_place && problem.rotary_dim < problem.head_dim(),
                  .stream_stores = stream});
}

void run(const Problem& problem, int config, Context& context) {
  const int64_t tokens = problem.batch() * problem.sequence();
  if (tokens == 0 || problem.head_dim() == 0) return;
  check_positions_in_table(problem);
  const RowKernels kernels = kernels_for(context, problem.query.dtype);
  const bool wants_stream = config == kStreamStores && !problem.in_place;
  const bool stream_query = wants_stream && lines_are_whole(problem.query_output, problem);
  const bool stream_key = wants_stream && lines_are_whole(problem.key_output, problem);
  const int64_t heads = problem.query.sizes[2] + (problem.key.is_present() ? problem.key.sizes[2] : 0);
  const int64_t per_token = std::max<int64_t>(heads * problem.head_dim(), 1);
  const int64_t tokens_per_task = std::clamp<int64_t>(kTaskElements / per_token, 1, tokens);
  parallel_for(context.threads, (tokens + tokens_per_task - 1) / tokens_per_task, [&](int64_t task) {
    TokenTable table(problem, kernels);
    const int64_t end = std::min(tokens, (task + 1) * tokens_per_task);
    for (int64_t token = task * tokens_per_task; token < end; ++token) {
      const int64_t batch = token / problem.sequence(), place = token % problem.sequence();
      table.fill(batch, place);
      rotate_heads(problem, problem.query, problem.output_of_query(), batch, place, table, stream_query, kernels);
      rotate_heads(problem, problem.key, problem.output_of_key(), batch, place, table, stream_key, kernels);
    }
    if (stream_query || stream_key) kernels.fence();
  });
}

uint64_t code_version() {
  return hash_text("rope cpu 1");
}

}  // namespace

constinit const registry::Kernel<Problem> kCpu{.name = "cpu",
                                               .origin = registry::Origin::kOurs,
                                               .supports = supports,
                                               .configs = configs,
                                               .heuristic = heuristic,
                                               .run = run,
                                               .source_hash = code_version};

}  // namespace kernel_pytorch::rope
