// Shapes that attention is tested on: small and odd ones, every option alone and some together, in every type. The
// reference computes each in milliseconds.
#pragma once

#include <string>
#include <vector>

#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::attention {

using registry::RequestOptions;

inline std::vector<registry::ProblemRequest> shapes() {
  registry::RequestList add;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    // Head sizes and odd lengths, full and causal.
    add({1, 2, 130, 64}, dtype, {});
    add({1, 2, 257, 128}, dtype, {{"causal", "1"}});
    add({2, 3, 65, 191, 64}, dtype, {{"causal", "1"}, {"layout", "bshd"}});
    add({1, 1, 200, 70, 128}, dtype, {{"causal", "1"}});  // the first queries see nothing
    add({1, 2, 40, 8}, dtype, {});
    add({1, 2, 96, 96}, dtype, {{"causal", "1"}, {"layout", "qkv"}});
    add({1, 2, 77, 140, 192}, dtype, {{"value_size", "128"}, {"causal", "1"}});
    add({1, 2, 129, 256}, dtype, {{"causal", "1"}});
    add({1, 1, 50, 512}, dtype, {{"causal", "1"}});
    add({1, 3, 60, 90, 20}, dtype, {{"value_size", "12"}});
    // Groups of heads; one query, as in decoding.
    add({2, 8, 90, 64}, dtype, {{"key_heads", "2"}, {"causal", "1"}});
    add({1, 6, 33, 129, 128}, dtype, {{"key_heads", "1"}, {"layout", "bshd"}});
    add({3, 8, 1, 300, 128}, dtype, {{"key_heads", "2"}, {"causal", "1"}, {"lengths", "1"}});
    add({1, 8, 1, 2100, 128}, dtype, {{"key_heads", "2"}, {"lengths", "1"}});  // split over keys
    add({1, 4, 3, 1500, 64}, dtype,
        {{"key_heads", "2"}, {"causal", "1"}, {"window_left", "900"}, {"batch_invariant", "1"}});
    // Every option alone.
    const RequestOptions alone[] = {{{"window_left", "20"}, {"window_right", "0"}},
                                    {{"window_left", "17"}, {"window_right", "9"}},
                                    {{"window_right", "5"}},
                                    {{"causal", "1"}, {"causal_offset", "0"}},
                                    {{"alibi", "1"}},
                                    {{"bias", "full"}},
                                    {{"bias", "batch"}, {"bias_dtype", dtype == DType::kFloat64 ? "fp64" : "fp32"}},
                                    {{"bias", "head"}},
                                    {{"bias", "query"}},
                                    {{"bias", "all"}, {"grad_bias", "0"}},
                                    {{"mask", "full"}},
                                    {{"mask", "query"}},
                                    {{"softcap", "1.5"}},
                                    {{"sinks", "1"}},
                                    {{"segments", "1"}},
                                    {{"lengths", "1"}},
                                    {{"sequences", "4"}},
                                    {{"blocks", "32"}},
                                    {{"dropout", "0.3"}},
                                    {{"grad_lse", "1"}},
                                    {{"scale", "-0.3"}},
                                    {{"deterministic", "1"}},
                                    {{"batch_invariant", "1"}},
                                    {{"lse", "0"}}};
    if (dtype == DType::kFloat16 || dtype == DType::kFloat64) {  // what differs by type is above; one of all options
      add({2, 4, 100, 131, 64}, dtype,
          {{"causal", "1"},
           {"window_left", "60"},
           {"softcap", "2"},
           {"alibi", "1"},
           {"bias", "batch"},
           {"sinks", "1"},
           {"segments", "1"},
           {"lengths", "1"},
           {"dropout", "0.1"},
           {"key_heads", "2"},
           {"grad_lse", "1"}});
      add({1, 2, 150, 190, 128}, dtype,
          {{"accumulate", "1"}, {"causal", "1"}, {"causal_offset", "0"}, {"first_query", "40"}});
      continue;
    }
    for (const RequestOptions& options : alone) {
      const bool is_packed = options[0].first == "sequences";
      add({is_packed ? 1 : 2, 2, 150, 130, 64}, dtype, options);
    }
    // Some together.
    const RequestOptions together[] = {
        {{"causal", "1"}, {"alibi", "1"}, {"key_heads", "2"}, {"deterministic", "1"}},
        {{"causal", "1"}, {"window_left", "50"}, {"softcap", "2"}, {"sinks", "1"}, {"key_heads", "1"}},
        {{"causal", "1"}, {"bias", "batch"}, {"softcap", "2"}, {"softcap_after_bias", "1"}, {"alibi", "1"}},
        {{"causal", "1"}, {"segments", "1"}, {"dropout", "0.1"}, {"layout", "bshd"}, {"grad_lse", "1"}},
        {{"lengths", "1"}, {"window_left", "20"}, {"window_right", "7"}},
        {{"lengths", "1"}, {"causal", "1"}, {"alibi", "1"}},
        {{"causal", "1"}, {"lengths", "1"}, {"sinks", "1"}, {"grad_lse", "1"}, {"key_heads", "2"}},
        {{"mask", "batch"}, {"bias", "query"}, {"alibi", "1"}, {"window_left", "70"}, {"window_right", "10"}},
        {{"blocks", "16"}, {"causal", "1"}, {"dropout", "0.5"}, {"softcap", "3"}},
        {{"dropout", "0.2"}, {"bias", "head"}, {"key_heads", "1"}, {"sinks", "1"}}};
    for (const RequestOptions& options : together) add({2, 4, 100, 131, 64}, dtype, options);
    const RequestOptions packed[] = {
        {{"sequences", "5"}, {"causal", "1"}, {"layout", "bshd"}, {"key_heads", "2"}},
        {{"sequences", "3"}, {"causal", "1"}, {"layout", "bshd"}, {"window_left", "24"}, {"sinks", "1"}},
        {{"sequences", "7"}, {"alibi", "1"}, {"softcap", "2"}, {"dropout", "0.25"}, {"deterministic", "1"}},
        {{"sequences", "4"}, {"bias", "full"}, {"lengths", "1"}, {"segments", "1"}, {"grad_lse", "1"}},
        {{"sequences", "4"}, {"causal", "1"}, {"lengths", "1"}, {"key_heads", "2"}}};
    for (const RequestOptions& options : packed) add({1, 4, 300, 270, 64}, dtype, options);
    // Lists of tiles and packed sequences, of which some are shorter than a list; of segments.
    const RequestOptions listed[] = {
        {{"sequences", "4"}, {"blocks", "32"}, {"key_heads", "2"}},
        {{"sequences", "3"}, {"blocks", "64"}, {"blocks_by_batch", "1"}, {"causal", "1"}, {"layout", "bshd"}},
        {{"sequences", "5"}, {"blocks", "16"}, {"lengths", "1"}, {"sinks", "1"}, {"grad_lse", "1"}},
        {{"blocks", "64"}, {"segments", "1"}, {"causal", "1"}, {"blocks_by_batch", "1"}}};
    for (const RequestOptions& options : listed) add({1, 4, 300, 270, 64}, dtype, options);
    add({1, 4, 1000, 1100, 128}, dtype, {{"sequences", "3"}, {"blocks", "128"}, {"causal", "1"}, {"key_heads", "2"}});
    add({1, 2, 900, 1000, 64}, dtype, {{"sequences", "4"}, {"blocks", "128"}, {"blocks_by_batch", "1"}});
    add({2, 4, 700, 600, 128}, dtype, {{"blocks", "128"}, {"blocks_by_batch", "1"}, {"key_heads", "2"}});
    // What needs most registers, at a head size that leaves few.
    for (const char* word : {"alibi", "dropout", "softcap"}) {
      add({1, 2, 150, 190, 128}, dtype, {{"causal", "1"}, {word, word[0] == 'd' ? "0.25" : "1"}});
    }
    // Programs: a relative bias that is learned, a softcap and a prefix; captured tensors of two kinds.
    const std::string capture = dtype == DType::kFloat64 ? "capture fp64 2\n" : "capture fp32 2\n";
    const std::string relative = "expression 1\n" + capture +
                                 "%0 = score\n%1 = head\n%2 = query\n%3 = key\n%4 = sub %2 %3\n%5 = int 31\n"
                                 "%6 = min %4 %5\n%7 = load 0 %1 %6\n%8 = add %0 %7\n%9 = float 3.0\n"
                                 "%10 = div %8 %9\n%11 = tanh %10\n%12 = mul %11 %9\nreturn %12\n";
    const std::string prefix = "expression 1\n" + capture +
                               "%0 = query\n%1 = key\n%2 = int 40\n%3 = lt %1 %2\n%4 = le %1 %0\n%5 = or %3 %4\n"
                               "return %5\n";
    add({2, 4, 100, 131, 64}, dtype, {{"score_mod", relative}, {"captured", "4x32"}, {"key_heads", "2"}});
    add({2, 4, 100, 131, 64}, dtype, {{"mask_mod", prefix}, {"captured", "4x32"}, {"blocks", "32"}});
    add({1, 4, 300, 270, 64}, dtype,
        {{"score_mod", relative}, {"mask_mod", prefix}, {"captured", "4x32"}, {"sequences", "3"}, {"sinks", "1"}});
    add({2, 2, 100, 131, 64}, dtype,
        {{"score_mod", relative}, {"captured", "4x32"}, {"deterministic", "1"}, {"bias", "full"}, {"causal", "1"}});
    // Parts of a whole, added to what other parts gave.
    add({2, 4, 100, 131, 64}, dtype, {{"results", dtype == DType::kFloat64 ? "fp64" : "fp32"}, {"causal", "1"}});
    const RequestOptions parts[] = {
        {{"key_heads", "2"}},
        {{"first_query", "64"}, {"first_key", "32"}, {"causal", "1"}, {"causal_offset", "0"}, {"alibi", "1"}},
        {{"first_query", "0"}, {"first_key", "300"}, {"causal", "1"}, {"causal_offset", "0"}},  // sees nothing
        {{"first_query", "48"}, {"first_key", "16"}, {"dropout", "0.3"}, {"bias", "full"}, {"sinks", "1"}},
        {{"first_query", "13"}, {"first_key", "35"}, {"dropout", "0.3"}, {"layout", "bshd"}, {"softcap", "2"}},
        {{"first_query", "40"}, {"first_key", "10"}, {"score_mod", relative}, {"captured", "4x32"}},
        {{"first_query", "40"}, {"first_key", "30"}, {"mask_mod", prefix}, {"captured", "4x32"}, {"segments", "1"}},
        {{"lengths", "1"}, {"mask", "full"}, {"blocks", "32"}},
        {{"window_left", "40"}, {"window_right", "9"}, {"causal_offset", "-20"}, {"first_query", "50"}}};
    for (RequestOptions options : parts) {
      options.push_back({"accumulate", "1"});
      add({2, 4, 100, 131, 64}, dtype, options);
    }
    add({1, 4, 300, 270, 64}, dtype, {{"sequences", "5"}, {"causal", "1"}, {"accumulate", "1"}});
    add({1, 1, 515, 640, 128}, dtype, {{"accumulate", "1"}, {"value_size", "96"}});
    add({1, 2, 50, 0, 64}, dtype, {{"accumulate", "1"}});
    add({1, 2, 130, 96, 256}, dtype, {{"accumulate", "1"}, {"causal", "1"}, {"causal_offset", "0"}, {"sinks", "1"}});
    add({1, 2, 130, 96, 192}, dtype,
        {{"accumulate", "1"}, {"value_size", "128"}, {"layout", "bshd"}, {"writes_keys", "1"}});
    add({1, 2, 90, 300, 128}, dtype,  // keys that no query sees
        {{"accumulate", "1"}, {"writes_keys", "1"}, {"causal", "1"}, {"causal_offset", "20"}});
    add({1, 2, 200, 96, 128}, dtype,  // tiles that see nothing, and a sink all the same
        {{"accumulate", "1"}, {"causal", "1"}, {"causal_offset", "-140"}, {"sinks", "1"}, {"key_heads", "1"}});
    // Scores that leave the range of a softmax without a maximum: such rows are done twice, and added once. (Of scores
    // this large fp32 itself keeps too little for what is asked of it.)
    if (dtype == DType::kBFloat16) add({1, 1, 200, 600, 64}, dtype, {{"scale", "20"}, {"accumulate", "1"}});
    if (dtype == DType::kFloat32) {
      add({1, 4, 150, 190, 64}, dtype, {{"allow_tf32", "1"}, {"causal", "1"}, {"key_heads", "2"}, {"grad_lse", "1"}});
      add({1, 2, 150, 190, 128}, dtype, {{"allow_tf32", "1"}, {"bias", "full"}, {"sinks", "1"}});
      add({1, 8, 1, 2100, 128}, dtype, {{"allow_tf32", "1"}, {"key_heads", "2"}});
    }
    // Long enough for several tiles of every kernel.
    add({1, 1, 515, 128}, dtype, {{"causal", "1"}});
    add({1, 1, 400, 640, 64}, dtype, {{"window_left", "100"}, {"window_right", "30"}});
    // Nothing at all, in every dimension.
    add({0, 2, 16, 64}, dtype, {});
    add({2, 0, 16, 64}, dtype, {});
    add({2, 2, 0, 16, 64}, dtype, {{"sinks", "1"}, {"bias", "full"}});
    add({2, 2, 16, 0, 64}, dtype, {{"sinks", "1"}, {"bias", "full"}, {"causal", "1"}});
    add({2, 2, 16, 0, 64}, dtype, {{"lengths", "1"}});
    add({1, 2, 0, 0, 64}, dtype, {{"sequences", "2"}});
    add({1, 1, 1, 8}, dtype, {});
  }
  return std::move(add.all);
}

}  // namespace kernel_pytorch::attention
