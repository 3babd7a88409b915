// The causal convolution on the lanes of the CPU: lanes are channels, a window of inputs (backward: of gradients of
// sums) moves over the tokens in registers. Built once per instruction level.
#include "kernel_pytorch/ops/causal_conv1d/cpu/conv.h"

#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/vec_math.h"

namespace kernel_pytorch::causal_conv1d::KP_ISA_NAMESPACE {
namespace {

using cpu::kLanes;
using cpu::Vec;

// Up to kLanes neighbouring channels, `at` behind the part's first.
template <class T, int kWidth>
struct Lanes {
  const Part& part;
  int64_t at, count;
  Vec weight[kWidth], bias{};

  [[gnu::always_inline]] Lanes(const Part& of, int64_t first) : part(of), at(first), count(of.channels - first) {
    if (count > kLanes) count = kLanes;
    alignas(64) float taps[kWidth][kLanes] = {};
    const T* from = static_cast<const T*>(part.weight) + at * kWidth;
    for (int64_t c = 0; c < count; ++c) {
      for (int i = 0; i < kWidth; ++i) taps[i][c] = to_float(from[c * kWidth + i]);
    }
    for (int i = 0; i < kWidth; ++i) weight[i] = cpu::load(taps[i]);
    if (part.bias != nullptr) bias = cpu::load_partial(static_cast<const T*>(part.bias) + at, count);
  }
  [[gnu::always_inline]] Vec read(const void* from, int64_t place) const {
    const T* row = static_cast<const T*>(from) + place + at;
    return count == kLanes ? cpu::load(row) : cpu::load_partial(row, count);
  }
  [[gnu::always_inline]] void write(void* to, int64_t place, Vec value) const {
    T* row = static_cast<T*>(to) + place + at;
    count == kLanes ? cpu::store(row, value) : cpu::store_partial(row, value, count);
  }
  // The input of a token, which may stand in front of the sequence.
  [[gnu::always_inline]] Vec input(int64_t token) const {
    if (token >= part.begin) return read(part.x, token * part.x_stride);
    if (part.initial == nullptr) return Vec{};
    return read(part.initial, (token - part.begin + kWidth - 1) * part.state_stride);
  }
  [[gnu::always_inline]] Vec sum(const Vec (&window)[kWidth]) const {
    Vec sum = bias;
    for (int i = 0; i < kWidth; ++i) sum += weight[i] * window[i];
    return sum;
  }
  // The window in front of a token, and its move onto the token.
  [[gnu::always_inline]] void fill(int64_t token, Vec (&window)[kWidth]) const {
    window[0] = Vec{};
    for (int i = 1; i < kWidth; ++i) window[i] = input(token - kWidth + i);
  }
  [[gnu::always_inline]] void move(int64_t token, Vec (&window)[kWidth]) const {
    for (int i = 0; i + 1 < kWidth; ++i) window[i] = window[i + 1];
    window[kWidth - 1] = input(token);
  }
  // The gradient of a token's sum, whose inputs are in the window.
  [[gnu::always_inline]] Vec grad_sum(int64_t token, const Vec (&window)[kWidth]) const {
    const Vec gradient = read(part.grad_output, token * part.grad_stride);
    if (!part.silu) return gradient;
    const Vec value = sum(window), sigmoid = cpu::sigmoid(value);
    return gradient * sigmoid * (1.0f + value * (1.0f - sigmoid));
  }
  // What final_state's gradient gives to the input of a token.
  [[gnu::always_inline]] Vec grad_kept(int64_t token) const {
    const int64_t kept = token - part.end + kWidth - 1;
    return kept >= 0 && part.grad_final != nullptr ? read(part.grad_final, kept * part.state_stride) : Vec{};
  }
};

template <class T, int kWidth>
void forward_of(const Part& part) {
  for (int64_t at = 0; at < part.channels; at += kLanes) {
    const Lanes<T, kWidth> lanes(part, at);
    Vec window[kWidth];
    lanes.fill(part.first, window);
    for (int64_t token = part.first; token < part.last; ++token) {
      lanes.move(token, window);
      const Vec sum = lanes.sum(window);
      lanes.write(part.output, token * part.output_stride, part.silu ? sum * cpu::sigmoid(sum) : sum);
    }
  }
}

// Gradients of inputs of the part's tokens need those of sums up to width - 1 tokens behind it.
template <class T, int kWidth>
void backward_of(const Part& part) {
  for (int64_t at = 0; at < part.channels; at += kLanes) {
    const Lanes<T, kWidth> lanes(part, at);
    Vec window[kWidth], sums[kWidth] = {}, grad_weight[kWidth] = {}, grad_bias{};
    lanes.fill(part.first, window);
    // Inputs of initial_state belong to the sequence's first part.
    const bool takes_initial = part.first == part.begin && part.grad_initial != nullptr;
    for (int64_t token = part.first; token < part.last + kWidth - 1; ++token) {
      for (int i = 0; i + 1 < kWidth; ++i) sums[i] = sums[i + 1];
      sums[kWidth - 1] = Vec{};
      if (token < part.end) {
        lanes.move(token, window);
        const Vec gradient = lanes.grad_sum(token, window);
        sums[kWidth - 1] = gradient;
        if (token < part.last) {
          grad_bias += gradient;
          for (int i = 0; i < kWidth; ++i) grad_weight[i] += gradient * window[i];
        }
      }
      // sums[i] is of token - width + 1 + i: all that the input of the first of these has part in.
      const int64_t input = token - kWidth + 1;
      if (input < part.first && !takes_initial) continue;
      Vec gradient = lanes.grad_kept(input);
      for (int i = 0; i < kWidth; ++i) gradient += lanes.weight[kWidth - 1 - i] * sums[i];
      if (input >= part.first) {
        lanes.write(part.output, input * part.output_stride, gradient);
      } else {
        lanes.write(part.grad_initial, (input - part.begin + kWidth - 1) * part.state_stride, gradient);
      }
    }
    for (int i = 0; i < kWidth; ++i) cpu::store(part.grad_weight + i * kBlockChannels + at, grad_weight[i]);
    cpu::store(part.grad_bias + at, grad_bias);
  }
}

template <class T>
void forward(const Part& part) {
  part.width == 2 ? forward_of<T, 2>(part) : part.width == 3 ? forward_of<T, 3>(part) : forward_of<T, 4>(part);
}
template <class T>
void backward(const Part& part) {
  part.width == 2 ? backward_of<T, 2>(part) : part.width == 3 ? backward_of<T, 3>(part) : backward_of<T, 4>(part);
}

}  // namespace

extern const ConvKernels kConvKernels[3] = {
    {forward<float>, backward<float>}, {forward<BFloat16>, backward<BFloat16>}, {forward<Float16>, backward<Float16>}};

}  // namespace kernel_pytorch::causal_conv1d::KP_ISA_NAMESPACE
