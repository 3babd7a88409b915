// The sequences of a problem in host memory: entries of the batch, or stretches of the packed rows.
#pragma once

#include <vector>

#include "kernel_pytorch/ops/attention/operation.h"

namespace kernel_pytorch::attention {

struct Sequence {
  int64_t index = 0;                     // as scores, bias, lengths and dropout count it
  int64_t batch = 0;                     // of the tensors
  int64_t first_query = 0, queries = 0;  // of the tensors' rows
  int64_t first_key = 0, keys = 0;       // keys: those within key_lengths
  int64_t key_rows = 0;                  // with those behind the key length
  int64_t offset = 0;                    // the place of query 0 among the keys
};

// Reads offsets and lengths; whatever they hold, rows are the tensors' own.
std::vector<Sequence> sequences_of(const Sizes& sizes, const Scoring& scoring);

}  // namespace kernel_pytorch::attention
