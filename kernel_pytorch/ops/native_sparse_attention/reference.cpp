// The references: the contract in double, one query after another, every branch by its list of keys.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/native_sparse_attention/choose_blocks.h"
#include "kernel_pytorch/ops/native_sparse_attention/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::native_sparse_attention {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();
using Numbers64 = std::vector<double>;

// A tensor [batch, tokens, heads, size] in double; one that is absent has no elements.
struct Rows64 {
  int64_t tokens = 0, heads = 0, size = 0;
  Numbers64 values;

  Rows64() = default;
  Rows64(int64_t batch, int64_t of_tokens, int64_t of_heads, int64_t of_size)
      : tokens(of_tokens),
        heads(of_heads),
        size(of_size),
        values(static_cast<size_t>(batch * of_tokens * of_heads * of_size)) {}
  explicit Rows64(const TensorView& x) : Rows64(x.sizes[0], x.sizes[1], x.sizes[2], x.rank == 4 ? x.sizes[3] : 1) {
    for (int64_t b = 0; b < x.sizes[0]; ++b) {
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t i = 0; i < size; ++i) {
            const int64_t offset = b * x.strides[0] + t * x.strides[1] + h * x.strides[2] + i * x.strides[3];
            at(b, t, h)[i] = load_element(x.data, x.dtype, offset);
          }
        }
      }
    }
  }
  double* at(int64_t b, int64_t t, int64_t h) { return values.data() + ((b * tokens + t) * heads + h) * size; }
  const double* at(int64_t b, int64_t t, int64_t h) const {
    return values.data() + ((b * tokens + t) * heads + h) * size;
  }
  void store(const TensorView& view) const {
    for (size_t i = 0; view.is_present() && i < values.size(); ++i) {
      store_element(view.data, view.dtype, static_cast<int64_t>(i), values[i]);
    }
  }
};

double dot(const double* a, const double* b, int64_t size) {
  double sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

// Means of blocks, in the rows where each sequence has its own.
template <class Problem>
Rows64 compress(const Problem& problem, const Sizes& sizes, const Rows64& x) {
  Rows64 means(sizes.batch, sizes.compressed, sizes.key_heads, x.size);
  for (int64_t s = 0; s < sizes.sequences; ++s) {
    const Sequence sequence = sequence_of(problem, sizes, s);
    for (int64_t c = 0; c < sizes.numbers.compressed(sequence.keys); ++c) {
      for (int64_t h = 0; h < sizes.key_heads; ++h) {
        for (int64_t i = 0; i < sizes.numbers.compress_block; ++i) {
          const int64_t token = sequence.key_begin + c * sizes.numbers.compress_stride + i;
          for (int64_t k = 0; k < x.size; ++k) {
            means.at(sequence.batch, sequence.compressed_begin + c, h)[k] +=
                x.at(sequence.batch, token, h)[k] / static_cast<double>(sizes.numbers.compress_block);
          }
        }
      }
    }
  }
  return means;
}
// Hands on what reached the means.
template <class Problem>
void spread(const Problem& problem, const Sizes& sizes, const Rows64& means, Rows64& x) {
  for (int64_t s = 0; s < sizes.sequences; ++s) {
    const Sequence sequence = sequence_of(problem, sizes, s);
    for (int64_t c = 0; c < sizes.numbers.compressed(sequence.keys); ++c) {
      for (int64_t h = 0; h < sizes.key_heads; ++h) {
        for (int64_t i = 0; i < sizes.numbers.compress_block; ++i) {
          const int64_t token = sequence.key_begin + c * sizes.numbers.compress_stride + i;
          for (int64_t k = 0; k < x.size; ++k) {
            x.at(sequence.batch, token, h)[k] += means.at(sequence.batch, sequence.compressed_begin + c, h)[k] /
                                                 static_cast<double>(sizes.numbers.compress_block);
          }
        }
      }
    }
  }
}

// The tensors that both directions read.
template <class Problem>
struct Inputs {
  const Problem& problem;
  const Sizes sizes;
  const Rows64 query, key, value, compressed_key, compressed_value;

  explicit Inputs(const Problem& of)
      : problem(of),
        sizes(of),
        query(of.query),
        key(of.key),
        value(of.value),
        compressed_key(of.compressed_key.is_present() ? Rows64(of.compressed_key) : compress(of, sizes, key)),
        compressed_value(of.compressed_value.is_present() ? Rows64(of.compressed_value) : compress(of, sizes, value)) {}
};

// One branch of one query head: rows of keys and values, and the probabilities.
struct Branch {
  const Rows64 &keys, &values;
  int64_t batch, head;
  std::vector<int64_t> rows{};
  Numbers64 probabilities{};
  double lse = kNothing;

  void score(const double* query, double scale) {
    probabilities.clear();
    for (int64_t row : rows) probabilities.push_back(scale * dot(query, keys.at(batch, row, head), keys.size));
  }
  void attend(const double* query, double scale) {
    score(query, scale);
    double most = kNothing, sum = 0;
    for (double score : probabilities) most = std::fmax(most, score);
    for (double score : probabilities) sum += std::exp(score - most);
    if (!rows.empty()) lse = most + std::log(sum);
    for (double& score : probabilities) score = std::exp(score - lse);
  }
};

std::vector<int64_t> range_of(int64_t begin, int64_t end) {
  std::vector<int64_t> rows;
  for (int64_t row = begin; row < end; ++row) rows.push_back(row);
  return rows;
}
std::vector<int64_t> rows_of_list(const int32_t* list, const Sizes& sizes, const Sequence& sequence, int64_t place) {
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < sizes.list; ++i) {
    const int64_t begin = list[i] * sizes.numbers.block_size;
    for (int64_t key = begin; list[i] >= 0 && key <= place && key < begin + sizes.numbers.block_size; ++key) {
      rows.push_back(sequence.key_begin + key);
    }
  }
  return rows;
}

template <class Problem>
Branch compressed_branch(const Inputs<Problem>& in, const Sequence& sequence, int64_t head, int64_t place) {
  const int64_t begin = sequence.compressed_begin;
  return {in.compressed_key, in.compressed_value, sequence.batch, head,
          range_of(begin, begin + in.sizes.numbers.compressed(place + 1))};
}
template <class Problem>
Branch window_branch(const Inputs<Problem>& in, const Sequence& sequence, int64_t head, int64_t place) {
  const int64_t begin = std::max<int64_t>(place - in.sizes.numbers.window + 1, 0);
  return {in.key, in.value, sequence.batch, head, range_of(sequence.key_begin + begin, sequence.key_begin + place + 1)};
}

double gate_at(const TensorView& gate, int64_t b, int64_t t, int64_t h) {
  return load_element(gate.data, gate.dtype, b * gate.strides[0] + t * gate.strides[1] + h * gate.strides[2]);
}

// fn(sequence, token of the query, its place among the sequence's keys) for every query that sees a key.
template <class Problem, class Function>
void for_each_query(const Problem& problem, const Sizes& sizes, const Function& fn) {
  for (int64_t s = 0; s < sizes.sequences; ++s) {
    const Sequence sequence = sequence_of(problem, sizes, s);
    for (int64_t i = std::max<int64_t>(0, -sequence.offset); i < sequence.queries; ++i) {
      fn(sequence, sequence.query_begin + i, i + sequence.offset);
    }
  }
}

void fill(const TensorView& view, double value) {
  for (int64_t i = 0; view.is_present() && i < view.element_count(); ++i) {
    store_element(view.data, view.dtype, i, value);
  }
}

void run_forward(const Forward& problem, int, Context&) {
  const Inputs<Forward> in(problem);
  const Sizes& sizes = in.sizes;
  Rows64 output(sizes.batch, sizes.queries, sizes.heads, sizes.value_size);
  for (const TensorView* lse : {&problem.compressed_lse, &problem.selected_lse, &problem.window_lse}) {
    fill(*lse, kNothing);
  }
  fill(problem.selected, -1);
  const auto add = [&](Branch& branch, const TensorView& gate, const TensorView& lse, int64_t token, int64_t head) {
    const int64_t b = branch.batch;
    branch.attend(in.query.at(b, token, head), sizes.scale);
    if (!gate.is_present()) return;
    const double weight = gate_at(gate, b, token, head);
    for (size_t i = 0; i < branch.rows.size(); ++i) {
      for (int64_t k = 0; k < sizes.value_size; ++k) {
        output.at(b, token, head)[k] +=
            weight * branch.probabilities[i] * branch.values.at(b, branch.rows[i], branch.head)[k];
      }
    }
    if (lse.is_present())
      store_element(lse.data, lse.dtype, (b * sizes.heads + head) * sizes.queries + token, branch.lse);
  };
  std::vector<int32_t> list(static_cast<size_t>(sizes.list));
  for_each_query(problem, sizes, [&](const Sequence& sequence, int64_t token, int64_t place) {
    for (int64_t key_head = 0; key_head < sizes.key_heads; ++key_head) {
      Numbers64 importance(static_cast<size_t>(sizes.numbers.compressed(place + 1)), 0.0);
      for (int64_t head = key_head * sizes.group; head < (key_head + 1) * sizes.group; ++head) {
        Branch branch = compressed_branch(in, sequence, key_head, place);
        add(branch, problem.gate_compressed, problem.compressed_lse, token, head);
        for (size_t c = 0; c < importance.size(); ++c) importance[c] += branch.probabilities[c];
      }
      const int64_t at = (sequence.batch * sizes.queries + token) * sizes.key_heads + key_head;
      if (chooses(problem)) {
        choose_blocks(sizes.numbers, importance.data(), place, list.data());
        if (problem.selected.is_present()) std::ranges::copy(list, problem.selected.as<int32_t>() + at * sizes.list);
      } else if (problem.gate_selected.is_present()) {
        std::copy_n(problem.block_indices.as<const int32_t>() + at * sizes.list, sizes.list, list.begin());
      }
      for (int64_t head = key_head * sizes.group; head < (key_head + 1) * sizes.group; ++head) {
        if (problem.gate_selected.is_present()) {
          Branch branch{in.key, in.value, sequence.batch, key_head, rows_of_list(list.data(), sizes, sequence, place)};
          add(branch, problem.gate_selected, problem.selected_lse, token, head);
        }
        Branch branch = window_branch(in, sequence, key_head, place);
        add(branch, problem.gate_window, problem.window_lse, token, head);
      }
    }
  });
  output.store(problem.output);
}

void run_backward(const Backward& problem, int, Context&) {
  const Inputs<Backward> in(problem);
  const Sizes& sizes = in.sizes;
  const Rows64 grad_output(problem.grad_output);
  Rows64 grad_query(sizes.batch, sizes.queries, sizes.heads, sizes.size);
  Rows64 grad_key(sizes.batch, sizes.keys, sizes.key_heads, sizes.size);
  Rows64 grad_value(sizes.batch, sizes.keys, sizes.key_heads, sizes.value_size);
  Rows64 grad_compressed_key(sizes.batch, sizes.compressed, sizes.key_heads, sizes.size);
  Rows64 grad_compressed_value(sizes.batch, sizes.compressed, sizes.key_heads, sizes.value_size);
  for (const TensorView* gate :
       {&problem.grad_gate_compressed, &problem.grad_gate_selected, &problem.grad_gate_window}) {
    fill(*gate, 0);
  }
  const auto add = [&](Branch branch, const TensorView& gate, const TensorView& grad_gate, const TensorView& lse,
                       int64_t token, int64_t head, Rows64& to_keys, Rows64& to_values) {
    const int64_t b = branch.batch;
    const double* query = in.query.at(b, token, head);
    const double* gradient = grad_output.at(b, token, head);
    branch.score(query, sizes.scale);
    const double given = load_element(lse.data, lse.dtype, (b * sizes.heads + head) * sizes.queries + token);
    for (double& score : branch.probabilities) score = std::exp(score - given);
    const double weight = gate_at(gate, b, token, head);
    Numbers64 differences;
    double delta = 0;
    for (size_t i = 0; i < branch.rows.size(); ++i) {
      differences.push_back(dot(gradient, branch.values.at(b, branch.rows[i], branch.head), sizes.value_size));
      delta += branch.probabilities[i] * differences[i];
    }
    if (grad_gate.is_present()) {
      store_element(grad_gate.data, grad_gate.dtype, (b * sizes.queries + token) * sizes.heads + head, delta);
    }
    for (size_t i = 0; i < branch.rows.size(); ++i) {
      const double share = weight * branch.probabilities[i];
      const double score = sizes.scale * share * (differences[i] - delta);
      for (int64_t k = 0; k < sizes.size; ++k) {
        grad_query.at(b, token, head)[k] += score * branch.keys.at(b, branch.rows[i], branch.head)[k];
        to_keys.at(b, branch.rows[i], branch.head)[k] += score * query[k];
      }
      for (int64_t k = 0; k < sizes.value_size; ++k) {
        to_values.at(b, branch.rows[i], branch.head)[k] += share * gradient[k];
      }
    }
  };
  for_each_query(problem, sizes, [&](const Sequence& sequence, int64_t token, int64_t place) {
    for (int64_t head = 0; head < sizes.heads; ++head) {
      const int64_t key_head = head / sizes.group;
      if (problem.gate_compressed.is_present()) {
        add(compressed_branch(in, sequence, key_head, place), problem.gate_compressed, problem.grad_gate_compressed,
            problem.compressed_lse, token, head, grad_compressed_key, grad_compressed_value);
      }
      if (problem.gate_selected.is_present()) {
        const int64_t at = (sequence.batch * sizes.queries + token) * sizes.key_heads + key_head;
        const int32_t* list = lists_of(problem).as<const int32_t>() + at * sizes.list;
        add({in.key, in.value, sequence.batch, key_head, rows_of_list(list, sizes, sequence, place)},
            problem.gate_selected, problem.grad_gate_selected, problem.selected_lse, token, head, grad_key, grad_value);
      }
      if (problem.gate_window.is_present()) {
        add(window_branch(in, sequence, key_head, place), problem.gate_window, problem.grad_gate_window,
            problem.window_lse, token, head, grad_key, grad_value);
      }
    }
  });
  if (!problem.compressed_key.is_present()) {
    spread(problem, sizes, grad_compressed_key, grad_key);
    spread(problem, sizes, grad_compressed_value, grad_value);
  }
  grad_query.store(problem.grad_query);
  grad_key.store(problem.grad_key);
  grad_value.store(problem.grad_value);
  grad_compressed_key.store(problem.grad_compressed_key);
  grad_compressed_value.store(problem.grad_compressed_value);
}

uint64_t code_version() {
  return hash_text("native_sparse_attention reference 1");
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardReference{
    .name = "reference", .supports = supports_on_cpu<Forward>, .run = run_forward, .source_hash = code_version};
constinit const registry::Kernel<Backward> kBackwardReference{
    .name = "reference", .supports = supports_on_cpu<Backward>, .run = run_backward, .source_hash = code_version};

}  // namespace kernel_pytorch::native_sparse_attention
