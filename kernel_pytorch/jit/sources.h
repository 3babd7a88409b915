// The device sources inside the library. embedded_sources() is written by cmake/embed_sources.cmake at build time.
#pragma once

#include <span>
#include <string_view>

namespace kernel_pytorch::jit {

struct EmbeddedSource {
  std::string_view path;  // "kernel_pytorch/cuda/tile/reduce.cuh": what an #include says
  std::string_view text;
};

std::span<const EmbeddedSource> embedded_sources();

}  // namespace kernel_pytorch::jit
