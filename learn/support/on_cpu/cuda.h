// CUDA kernels on a CPU, to see whether they compute the right thing: every thread of a block is a context of its own
// that runs until it meets a barrier or a warp-wide instruction. It says nothing about speed.
//
// Compile with -fno-pie -no-pie: shared memory is static, and its addresses must fit 32 bits as a GPU's do.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include <ucontext.h>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __restrict__

struct Index {
  int x = 0, y = 0, z = 0;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

namespace on_cpu {

inline constexpr int kWarp = 32, kStackBytes = 128 << 10;

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool ended = false;
};
// Everyone who comes waits until all have come.
struct Meeting {
  int arrived = 0;
  long round = 0;
};

inline std::vector<Thread> threads;
inline ucontext_t scheduler;
inline int running;
inline std::function<void()> body;
inline Meeting block_meeting;
inline std::vector<Meeting> warp_meetings;
inline uint64_t slots[1024][8];  // what the threads of a warp show each other

inline void enter() {
  body();
  threads[running].ended = true;
  swapcontext(&threads[running].context, &scheduler);
}
inline void let_others_run() {
  swapcontext(&threads[running].context, &scheduler);
}
inline void meet(Meeting& meeting, int members) {
  const long round = meeting.round;
  if (++meeting.arrived == members) {
    meeting.arrived = 0;
    ++meeting.round;
  }
  while (meeting.round == round) let_others_run();
}
inline void meet_warp() {
  meet(warp_meetings[threadIdx.x / kWarp], kWarp);
}

// kernel() for every thread of every block, block after block.
inline void launch(int blocks_x, int blocks_y, int block_threads, const std::function<void()>& kernel) {
  body = kernel;
  gridDim = {blocks_x, blocks_y, 1};
  blockDim = {block_threads, 1, 1};
  for (int block = 0; block < blocks_x * blocks_y; ++block) {
    blockIdx = {block % blocks_x, block / blocks_x, 0};
    threads.clear();
    threads.resize(block_threads);
    block_meeting = {};
    warp_meetings.assign((block_threads + kWarp - 1) / kWarp, {});
    for (Thread& thread : threads) {
      getcontext(&thread.context);
      thread.stack = std::make_unique<char[]>(kStackBytes);
      thread.context.uc_stack.ss_sp = thread.stack.get();
      thread.context.uc_stack.ss_size = kStackBytes;
      makecontext(&thread.context, enter, 0);
    }
    for (int left = block_threads; left > 0;) {
      for (running = 0; running < block_threads; ++running) {
        if (threads[running].ended) continue;
        threadIdx = {running, 0, 0};
        swapcontext(&scheduler, &threads[running].context);
        left -= threads[running].ended;
      }
    }
  }
}

template <class T>
inline T from_lane(T value, int lane) {
  static_assert(sizeof(T) <= 8);
  std::memcpy(slots[threadIdx.x], &value, sizeof value);
  meet_warp();
  T result;
  std::memcpy(&result, slots[threadIdx.x / kWarp * kWarp + lane % kWarp], sizeof result);
  meet_warp();
  return result;
}

}  // namespace on_cpu

inline void __syncthreads() {
  on_cpu::meet(on_cpu::block_meeting, blockDim.x);
}
inline void __syncwarp(unsigned = 0xffffffffu) {
  on_cpu::meet_warp();
}
template <class T>
inline T __shfl_xor_sync(unsigned, T value, int mask) {
  return on_cpu::from_lane(value, threadIdx.x % on_cpu::kWarp ^ mask);
}
template <class T>
inline T __shfl_sync(unsigned, T value, int lane) {
  return on_cpu::from_lane(value, lane);
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float rsqrtf(float x) {
  return 1 / std::sqrt(x);
}
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
