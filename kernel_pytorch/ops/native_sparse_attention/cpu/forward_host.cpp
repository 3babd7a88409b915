// The host side of the CPU forward: a task is one key head of a tile of tokens, with the group's heads together.
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/native_sparse_attention/cpu/work.h"

namespace kernel_pytorch::native_sparse_attention {
namespace {

// A task's memory, for one token at a time; rows of scores grow with what a token's branches see.
struct ForwardSpace {
  std::vector<float> query, output, gates, lse, scores, importance;
  std::vector<int32_t> rows, list;

  explicit ForwardSpace(const Work<Forward>& work)
      : query(floats(work.sizes.group * work.size)),
        output(floats(work.sizes.group * work.value_size)),
        gates(floats(work.sizes.group)),
        lse(floats(work.sizes.group)),
        importance(floats(padded(work.sizes.compressed))),
        list(static_cast<size_t>(work.sizes.list), -1) {}
};

void run_token(const Work<Forward>& work, const Tile& tile, int64_t query, ForwardSpace& space) {
  const Forward& problem = work.problem;
  const Sizes& sizes = work.sizes;
  const Sequence& sequence = tile.sequence;
  const int64_t token = sequence.query_begin + query, place = query + sequence.offset;
  const auto write_lse = [&](const TensorView& view) {
    for (int64_t h = 0; view.is_present() && h < sizes.group; ++h) {
      const int64_t head = tile.key_head * sizes.group + h;
      view.as<float>()[(sequence.batch * sizes.heads + head) * sizes.queries + token] = space.lse[h];
    }
  };
  const auto attend = [&](const BranchKernels& kernels, const KeyRows& keys, const TensorView& gate,
                          const TensorView& lse, float* importance) {
    if (gate.is_present()) work.load_gates(gate, sequence, token, tile.key_head, space.gates);
    if (const auto count = static_cast<size_t>(sizes.group * padded(keys.count)); space.scores.size() < count) {
      space.scores.resize(count + count / 2);
    }
    kernels.attend({{sizes.group, sizes.size, sizes.value_size, space.query.data(), space.gates.data()},
                    keys,
                    space.scores.data(),
                    importance,
                    gate.is_present() ? space.output.data() : nullptr,
                    space.lse.data()});
    if (gate.is_present()) write_lse(lse);
  };
  std::ranges::fill(space.output, 0.0f);
  std::ranges::fill(space.lse, kNothing);
  for (const TensorView* lse : {&problem.compressed_lse, &problem.selected_lse, &problem.window_lse}) write_lse(*lse);
  std::ranges::fill(space.list, -1);
  if (place >= 0) {
    work.load_heads(problem.query, sequence, token, tile.key_head, sizes.size, sizes.scale, space.query);
    const bool has_choice = chooses(problem);
    if (has_choice || problem.gate_compressed.is_present()) {
      std::ranges::fill(space.importance, 0.0f);
      attend(work.compressed_kernels(), work.compressed_rows(sequence, tile.key_head, place), problem.gate_compressed,
             problem.compressed_lse, has_choice ? space.importance.data() : nullptr);
    }
    if (has_choice) choose_blocks(sizes.numbers, space.importance.data(), place, space.list.data());
    if (problem.gate_selected.is_present()) {
      const int32_t* list = space.list.data();
      if (!has_choice) {
        list = problem.block_indices.as<const int32_t>() + work.list_at(sequence, token, tile.key_head);
      }
      work.list_rows(list, place, space.rows);
      attend(work.kernels,
             work.rows_from(sequence, tile.key_head, 0, space.rows.data(), static_cast<int64_t>(space.rows.size())),
             problem.gate_selected, problem.selected_lse, nullptr);
    }
    if (problem.gate_window.is_present()) {
      attend(work.kernels, work.window_rows(sequence, tile.key_head, place), problem.gate_window, problem.window_lse,
             nullptr);
    }
  }
  if (problem.selected.is_present()) {
    const int64_t blocks = sizes.numbers.blocks;
    int32_t* list = problem.selected.as<int32_t>() +
                    ((sequence.batch * sizes.queries + token) * sizes.key_heads + tile.key_head) * blocks;
    for (int64_t i = 0; i < blocks; ++i) list[i] = chooses(problem) ? space.list[i] : -1;
  }
  for (int64_t h = 0; h < sizes.group; ++h) {
    work.kernels.store(&space.output[h * work.value_size], sizes.value_size, 1,
                       at(problem.output, sequence.batch, token, tile.key_head * sizes.group + h));
  }
}

void run_forward_cpu(const Forward& problem, int, Context& context) {
  const Work<Forward> work(problem, context);
  const std::vector<Tile> tiles = work.tiles();
  const auto count = static_cast<int64_t>(tiles.size());
  parallel_for(context.threads, count, [&](int64_t task) {
    const Tile& tile = tiles[static_cast<size_t>(count - 1 - task)];  // the longest first
    ForwardSpace space(work);
    for (int64_t query = tile.begin; query < tile.end; ++query) run_token(work, tile, query, space);
  });
}

uint64_t forward_cpu_version() {
  return hash_text("native_sparse_attention cpu 1");
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardCpu{
    .name = "cpu", .supports = supports_cpu<Forward>, .run = run_forward_cpu, .source_hash = forward_cpu_version};

}  // namespace kernel_pytorch::native_sparse_attention
