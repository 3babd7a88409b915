// Shapes that attention is tested on: small and odd ones, every option alone and some together, in every type. The
// reference computes each in milliseconds.
#pragma once

#include <string>
#include <vector>

#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::attention {

using registry::RequestOptions;

inline constexpr const char* kShapes = R"(
  # Head sizes and odd lengths, full and causal; of 200x70 the first queries see nothing.
  fp32 bf16 fp16 fp64: 1x2x130x64 1x2x40x8 1x1x1x8; 1x2x257x128 1x2x129x256 1x1x50x512 1x1x200x70x128 causal=1
    2x3x65x191x64 causal=1 layout=bshd; 1x2x96x96 causal=1 layout=qkv; 1x2x77x140x192 value_size=128 causal=1
    1x3x60x90x20 value_size=12
  # Groups of heads; one query, as in decoding, split over keys where there are many.
    2x8x90x64 key_heads=2 causal=1; 1x6x33x129x128 key_heads=1 layout=bshd
    3x8x1x300x128 key_heads=2 causal=1 lengths=1; 1x8x1x2100x128 key_heads=2 lengths=1
    1x4x3x1500x64 key_heads=2 causal=1 window_left=900 batch_invariant=1
  # Few queries, of which lengths leave fewer keys.
  fp32: 3x4x5x7x16 key_heads=2 lengths=1 causal=1; key_heads=2 lengths=1 window_left=2; 3x4x5x3x16 lengths=1 alibi=1
    3x4x5x90x16 key_heads=2 lengths=1 causal=1 sinks=1 layout=bshd; softcap=1 softcap_after_bias=1 alibi=1
  # What differs by type is above; of these types one request with many options.
  fp16 fp64: 1x2x150x190x128 accumulate=1 causal=1 causal_offset=0 first_query=40
    2x4x100x131x64 window_left=60 softcap+key_heads=2 causal+alibi+sinks+segments+lengths+grad_lse=1 bias=batch dropout=0.1
  # Every option alone.
  fp32 bf16: 2x2x150x130x64 window_left=20 window_right=0; window_left=17 window_right=9
    window_right=5; causal=1 causal_offset=0; alibi=1
    bias=full,head,query; bias=batch bias_dtype=fp32; bias=all grad_bias=0
    mask=full,query; softcap=1.5; sinks=1; segments=1
    lengths=1; 1x2x150x130x64 sequences=4; 2x2x150x130x64 blocks=32; dropout=0.3
    grad_lse=1; scale=-0.3; deterministic=1; lse=0; batch_invariant=1
  # Some together.
    2x4x100x131x64 causal=1 alibi=1 key_heads=2 deterministic=1; causal=1 window_left=50 softcap=2 sinks=1 key_heads=1
    causal=1 bias=batch softcap=2 softcap_after_bias=1 alibi=1; causal=1 segments=1 dropout=0.1 layout=bshd grad_lse=1
    lengths=1 window_left=20 window_right=7; lengths=1 causal=1 alibi=1
    causal=1 lengths=1 sinks=1 grad_lse=1 key_heads=2; mask=batch bias=query alibi=1 window_left=70 window_right=10
    blocks=16 causal=1 dropout=0.5 softcap=3; dropout=0.2 bias=head key_heads=1 sinks=1
    1x4x300x270x64 sequences=5 causal=1 layout=bshd key_heads=2; sequences=3 causal=1 layout=bshd window_left=24 sinks=1
    sequences=7 alibi=1 softcap=2 dropout=0.25 deterministic=1; sequences=4 bias=full lengths=1 segments=1 grad_lse=1
    sequences=4 causal=1 lengths=1 key_heads=2
  # Lists of tiles and packed sequences, of which some are shorter than a list; of segments.
    sequences=4 blocks=32 key_heads=2; sequences=3 blocks=64 blocks_by_batch=1 causal=1 layout=bshd
    sequences=5 blocks=16 lengths=1 sinks=1 grad_lse=1; blocks=64 segments=1 causal=1 blocks_by_batch=1
    1x4x1000x1100x128 sequences=3 blocks=128 causal=1 key_heads=2
    1x2x900x1000x64 sequences=4 blocks=128 blocks_by_batch=1; 2x4x700x600x128 blocks=128 blocks_by_batch=1 key_heads=2
  # What needs most registers, at a head size that leaves few.
    1x2x150x190x128 causal=1 alibi=1; causal=1 dropout=0.25; causal=1 softcap=1
    2x4x100x131x64 score_mod=$relative captured=4x32 key_heads=2; mask_mod=$prefix captured=4x32 blocks=32
    1x4x300x270x64 score_mod=$relative mask_mod=$prefix captured=4x32 sequences=3 sinks=1
    2x2x100x131x64 score_mod=$relative captured=4x32 deterministic=1 bias=full causal=1
  # Parts of a whole, added to what other parts gave; 300: sees nothing.
    2x4x100x131x64 results=fp32 causal=1; accumulate=1 key_heads=2
    accumulate=1 first_query=64 first_key=32 causal=1 causal_offset=0 alibi=1
    accumulate=1 first_query=0 first_key=300 causal=1 causal_offset=0
    accumulate=1 first_query=48 first_key=16 dropout=0.3 bias=full sinks=1
    accumulate=1 first_query=13 first_key=35 dropout=0.3 layout=bshd softcap=2
    accumulate=1 first_query=40 first_key=10 score_mod=$relative captured=4x32
    accumulate=1 first_query=40 first_key=30 mask_mod=$prefix captured=4x32 segments=1
    accumulate=1 lengths=1 mask=full blocks=32; 1x4x300x270x64 sequences=5 causal=1 accumulate=1
    2x4x100x131x64 accumulate=1 window_left=40 window_right=9 causal_offset=-20 first_query=50
    1x1x515x640x128 accumulate=1 value_size=96; 1x2x50x0x64 accumulate=1
    1x2x130x96x256 accumulate=1 causal=1 causal_offset=0 sinks=1
    1x2x130x96x192 accumulate=1 value_size=128 layout=bshd writes_keys=1
    1x2x90x300x128 accumulate=1 writes_keys=1 causal=1 causal_offset=20           # keys that no query sees
    1x2x200x96x128 accumulate=1 causal=1 causal_offset=-140 sinks=1 key_heads=1  # tiles that see nothing, and a sink
  # Long enough for several tiles of every kernel.
    1x1x515x128 causal=1; 1x1x400x640x64 window_left=100 window_right=30
  # Nothing at all, in every dimension.
    0x2x16x64 2x0x16x64; 2x2x0x16x64 sinks=1 bias=full; 2x2x16x0x64 sinks=1 bias=full causal=1
    lengths=1; 1x2x0x0x64 sequences=2
  # Scores that leave the range of a softmax without a maximum: such rows are done twice, and added once. (Of such
  # scores fp32 itself keeps too little for what is asked of it.)
  bf16: 1x1x200x600x64 scale=20 accumulate=1
  fp32: 1x4x150x190x64 allow_tf32=1 causal=1 key_heads=2 grad_lse=1; 1x8x1x2100x128 allow_tf32=1 key_heads=2
    1x2x150x190x128 allow_tf32=1 bias=full sinks=1
)";

inline std::vector<registry::ProblemRequest> shapes() {
  // A relative bias that is learned, and a softcap; a prefix. Captured tensors of two kinds.
  const std::string captured = "expression 1\ncapture fp32 2\n";
  const std::string relative = captured +
                               "%0 = score\n%1 = head\n%2 = query\n%3 = key\n%4 = sub %2 %3\n%5 = int 31\n"
                               "%6 = min %4 %5\n%7 = load 0 %1 %6\n%8 = add %0 %7\n%9 = float 3.0\n"
                               "%10 = div %8 %9\n%11 = tanh %10\n%12 = mul %11 %9\nreturn %12\n";
  const std::string prefix = captured +
                             "%0 = query\n%1 = key\n%2 = int 40\n%3 = lt %1 %2\n%4 = le %1 %0\n%5 = or %3 %4\n"
                             "return %5\n";
  return registry::requests_of(kShapes, {{"relative", relative}, {"prefix", prefix}});
}

}  // namespace kernel_pytorch::attention
