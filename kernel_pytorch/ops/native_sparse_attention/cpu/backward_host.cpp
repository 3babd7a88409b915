// The host side of the CPU backward: gradients of keys gather in floats, of each key head in as many copies as there
// are tasks for it, which are added in a fixed order at the end.
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/native_sparse_attention/cpu/work.h"

namespace kernel_pytorch::native_sparse_attention {
namespace {

constexpr int64_t kTileKeys = 256;
constexpr int64_t kMostParts = 8;  // copies of a key head's gradients

// Gradients of the rows of one key head in floats, `parts` copies.
struct Sums {
  int64_t rows = 0, columns = 0, parts = 0;
  std::vector<float> values;

  Sums(int64_t heads, int64_t of_parts, int64_t of_rows, int64_t of_columns)
      : rows(of_rows), columns(of_columns), parts(of_parts), values(floats(heads * of_parts * of_rows * of_columns)) {}
  float* row(int64_t head, int64_t part, int64_t row) {
    return values.data() + ((head * parts + part) * rows + row) * columns;
  }
  // The copies' sum, in the first of them.
  float* gather(const BranchKernels& kernels, int64_t head, int64_t at) {
    for (int64_t part = 1; part < parts; ++part) kernels.add(row(head, part, at), columns, 1, row(head, 0, at));
    return row(head, 0, at);
  }
};
struct Gradients {
  Sums keys, values, compressed_keys, compressed_values;
};

struct BackwardSpace {
  std::vector<float> query, grad_output, grad_query, gates, grad_gates, lse, scores, differences;
  std::vector<int32_t> rows;

  explicit BackwardSpace(const Work<Backward>& work)
      : query(floats(work.sizes.group * work.size)),
        grad_output(floats(work.sizes.group * work.value_size)),
        grad_query(query.size()),
        gates(floats(work.sizes.group)),
        grad_gates(gates.size()),
        lse(gates.size()) {}
};

void differentiate_token(const Work<Backward>& work, const Tile& tile, int64_t query, int64_t part,
                         Gradients& gradients, BackwardSpace& space) {
  const Backward& problem = work.problem;
  const Sizes& sizes = work.sizes;
  const Sequence& sequence = tile.sequence;
  const int64_t token = sequence.query_begin + query, place = query + sequence.offset;
  const int64_t head = sequence.batch * sizes.key_heads + tile.key_head;
  const auto differentiate = [&](const BranchKernels& kernels, const KeyRows& keys, const TensorView& gate,
                                 const TensorView& lse, float* grad_keys, float* grad_values) {
    work.load_gates(gate, sequence, token, tile.key_head, space.gates);
    for (int64_t h = 0; h < sizes.group; ++h) {
      const int64_t row = sequence.batch * sizes.heads + tile.key_head * sizes.group + h;
      space.lse[h] = lse.as<const float>()[row * sizes.queries + token];
    }
    if (const auto count = static_cast<size_t>(sizes.group * padded(keys.count)); space.scores.size() < count) {
      space.scores.resize(count + count / 2);
      space.differences.resize(count + count / 2);
    }
    kernels.differentiate({{sizes.group, sizes.size, sizes.value_size, space.query.data(), space.gates.data()},
                           keys,
                           space.grad_output.data(),
                           space.lse.data(),
                           space.scores.data(),
                           space.differences.data(),
                           space.grad_query.data(),
                           grad_keys,
                           grad_values,
                           space.grad_gates.data()});
  };
  const auto write_gates = [&](const TensorView& gradient) {
    for (int64_t h = 0; gradient.is_present() && h < sizes.group; ++h) {
      store_element(gradient.data, gradient.dtype, work.row_at(sequence, token, tile.key_head * sizes.group + h),
                    space.grad_gates[h]);
    }
  };
  std::ranges::fill(space.grad_query, 0.0f);
  std::ranges::fill(space.grad_gates, 0.0f);
  if (place < 0) {
    for (const TensorView* gradient :
         {&problem.grad_gate_compressed, &problem.grad_gate_selected, &problem.grad_gate_window}) {
      write_gates(*gradient);
    }
  } else {
    work.load_heads(problem.query, sequence, token, tile.key_head, sizes.size, sizes.scale, space.query);
    work.load_heads(problem.grad_output, sequence, token, tile.key_head, sizes.value_size, 1, space.grad_output);
    const int64_t begin = sequence.key_begin, first = begin + work.window_begin(place);
    if (problem.gate_compressed.is_present()) {
      differentiate(work.compressed_kernels(), work.compressed_rows(sequence, tile.key_head, place),
                    problem.gate_compressed, problem.compressed_lse,
                    gradients.compressed_keys.row(head, part, sequence.compressed_begin),
                    gradients.compressed_values.row(head, part, sequence.compressed_begin));
      write_gates(problem.grad_gate_compressed);
    }
    if (problem.gate_selected.is_present()) {
      work.list_rows(lists_of(problem).as<const int32_t>() + work.list_at(sequence, token, tile.key_head), place,
                     space.rows);
      differentiate(
          work.kernels,
          work.rows_from(sequence, tile.key_head, 0, space.rows.data(), static_cast<int64_t>(space.rows.size())),
          problem.gate_selected, problem.selected_lse, gradients.keys.row(head, part, begin),
          gradients.values.row(head, part, begin));
      write_gates(problem.grad_gate_selected);
    }
    if (problem.gate_window.is_present()) {
      differentiate(work.kernels, work.window_rows(sequence, tile.key_head, place), problem.gate_window,
                    problem.window_lse, gradients.keys.row(head, part, first), gradients.values.row(head, part, first));
      write_gates(problem.grad_gate_window);
    }
  }
  for (int64_t h = 0; h < sizes.group; ++h) {
    work.kernels.store(&space.grad_query[h * work.size], sizes.size, static_cast<float>(sizes.scale),
                       at(problem.grad_query, sequence.batch, token, tile.key_head * sizes.group + h));
  }
}

// What reached the means goes on to their keys, in the first copies.
void spread(const Work<Backward>& work, Sums& means, Sums& rows) {
  const Sizes& sizes = work.sizes;
  const float share = 1.0f / static_cast<float>(sizes.numbers.compress_block);
  parallel_for(work.context.threads, sizes.batch * sizes.key_heads, [&](int64_t head) {
    for (int64_t s = 0; s < sizes.sequences; ++s) {
      const Sequence sequence = sequence_of(work.problem, sizes, s);
      if (sequence.batch != head / sizes.key_heads) continue;
      for (int64_t c = 0; c < sizes.numbers.compressed(sequence.keys); ++c) {
        const float* mean = means.gather(work.kernels, head, sequence.compressed_begin + c);
        const int64_t first = sequence.key_begin + c * sizes.numbers.compress_stride;
        for (int64_t i = 0; i < sizes.numbers.compress_block; ++i) {
          work.kernels.add(mean, rows.columns, share, rows.row(head, 0, first + i));
        }
      }
    }
  });
}

// The sums of all copies, as the tensor's rows.
void write(const Work<Backward>& work, Sums& sums, const TensorView& gradient, int64_t columns) {
  if (!gradient.is_present()) return;
  const int64_t tiles = (sums.rows + kTileKeys - 1) / kTileKeys;
  parallel_for(work.context.threads, work.sizes.batch * work.sizes.key_heads * tiles, [&](int64_t task) {
    const int64_t head = task / tiles, begin = task % tiles * kTileKeys;
    for (int64_t row = begin; row < std::min(begin + kTileKeys, sums.rows); ++row) {
      work.kernels.store(sums.gather(work.kernels, head, row), columns, 1,
                         at(gradient, head / work.sizes.key_heads, row, head % work.sizes.key_heads));
    }
  });
}

void run_backward_cpu(const Backward& problem, int, Context& context) {
  const Work<Backward> work(problem, context);
  const Sizes& sizes = work.sizes;
  const int64_t heads = sizes.batch * sizes.key_heads,
                threads = context.threads == nullptr ? 1 : context.threads->count();
  const int64_t parts =
      heads == 0 || threads == 1 ? 1 : std::clamp<int64_t>((2 * threads + heads - 1) / heads, 1, kMostParts);
  const int64_t compressed = problem.gate_compressed.is_present() ? sizes.compressed : 0;
  Gradients gradients{{heads, parts, sizes.keys, work.size},
                      {heads, parts, sizes.keys, work.value_size},
                      {heads, parts, compressed, work.size},
                      {heads, parts, compressed, work.value_size}};
  std::vector<std::vector<const Tile*>> tasks(static_cast<size_t>(heads * parts));
  const std::vector<Tile> tiles = work.tiles();
  for (const Tile& tile : tiles) {
    const int64_t head = tile.sequence.batch * sizes.key_heads + tile.key_head;
    tasks[static_cast<size_t>(head * parts + tile.begin / kTileTokens % parts)].push_back(&tile);
  }
  parallel_for(context.threads, heads * parts, [&](int64_t task) {
    BackwardSpace space(work);
    for (const Tile* tile : tasks[static_cast<size_t>(task)]) {
      for (int64_t query = tile->begin; query < tile->end; ++query) {
        differentiate_token(work, *tile, query, task % parts, gradients, space);
      }
    }
  });
  if (work.needs_means) {
    spread(work, gradients.compressed_keys, gradients.keys);
    spread(work, gradients.compressed_values, gradients.values);
  } else if (compressed > 0) {
    write(work, gradients.compressed_keys, problem.grad_compressed_key, sizes.size);
    write(work, gradients.compressed_values, problem.grad_compressed_value, sizes.value_size);
  } else {
    for (const TensorView* gradient : {&problem.grad_compressed_key, &problem.grad_compressed_value}) {
      if (gradient->is_present()) std::fill_n(gradient->as<char>(), gradient->byte_count(), 0);
    }
  }
  write(work, gradients.keys, problem.grad_key, sizes.size);
  write(work, gradients.values, problem.grad_value, sizes.value_size);
}

uint64_t backward_cpu_version() {
  return hash_text("native_sparse_attention cpu 1");
}

}  // namespace

constinit const registry::Kernel<Backward> kBackwardCpu{
    .name = "cpu", .supports = supports_cpu<Backward>, .run = run_backward_cpu, .source_hash = backward_cpu_version};

}  // namespace kernel_pytorch::native_sparse_attention
