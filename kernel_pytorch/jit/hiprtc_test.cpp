#include <gtest/gtest.h>

#include "kernel_pytorch/jit/code_object.h"
#include "kernel_pytorch/jit/cubin_cache.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/jit/jit_fixture_test.h"
#include "kernel_pytorch/jit/program.h"
#include "kernel_pytorch/jit/sources.h"

namespace kernel_pytorch::jit {
namespace {

using testing::error_of;

DeviceCode generated(const std::string& text, const std::string& entry) {
  return {.source = "kernel_pytorch/jit/given_source.cuh", .entry = entry, .generated = text};
}

TEST(HipSources, StandUnderTheNamesOfTheirCounterparts) {
  const DeviceCode code = generated("#include \"kernel_pytorch/cuda/tile/vector.cuh\"\n", "f");
  const HipClosure sources = hip_closure_of(code);  // its texts are the code's
  EXPECT_EQ(sources.missing, "");
  bool has_words = false, has_memory = false;
  for (const EmbeddedSource& file : sources.closure.files) {
    has_words = has_words || file.path == kAmdWords;
    has_memory = has_memory || file.path == "kernel_pytorch/cuda/ptx/memory.cuh";
    if (file.path.starts_with("kernel_pytorch/cuda/ptx/")) {
      EXPECT_EQ(file.text.find("asm"), std::string_view::npos) << file.path << " holds PTX";
    }
  }
  EXPECT_TRUE(has_words && has_memory);
}

TEST(HipSources, WhatHasNoCounterpartIsRefusedWithItsName) {
  const DeviceCode code = generated("#include \"kernel_pytorch/cuda/ptx/wgmma.cuh\"\n", "f");
  EXPECT_EQ(obstacle(code, "gfx90a"), "hip/ptx has no wgmma.cuh");
  EXPECT_EQ(obstacle(code, "sm_80"), "");
  DeviceCode specific = generated("", "f");
  specific.minimum_capability = 90;
  EXPECT_NE(obstacle(specific, "gfx90a"), "");
  specific.architecture_specific = true;
  EXPECT_NE(obstacle(specific, "gfx90a"), "");
  EXPECT_NE(error_of([&] { compile(code, "gfx90a"); }).find("wgmma.cuh"), std::string::npos);
}

TEST(HipSources, CodeForOtherSizesOfSharedMemoryIsRefused) {
  DeviceCode code = generated("", "f");
  code.least_shared_kib = 99;
  EXPECT_EQ(obstacle(code, "gfx90a"), "blocks of gfx90a have 64 KiB of shared memory, and its tiles are larger");
  EXPECT_EQ(obstacle(code, "sm_120a"), "");
  EXPECT_EQ(obstacle(code, "sm_90a"), "");
  code.most_shared_kib = 99;
  EXPECT_EQ(obstacle(code, "sm_90a"), "blocks of sm_90a have 227 KiB of shared memory, and take larger tiles");
}

TEST(CodeObject, IsReadWithinItsBounds) {
  EXPECT_NE(error_of([] { summarize_code_object("", "f"); }), "");
  EXPECT_NE(error_of([] {
              summarize_code_object(
                  "\x7f"
                  "ELF",
                  "f");
            }),
            "");
  EXPECT_NE(error_of([] { summarize_code_object(std::string(200, '\x7f'), "f"); }), "");
}

// By its name left out under sanitizers: the library is not instrumented.
class HiprtcCompiles : public testing::CacheTest {
 protected:
  void SetUp() override {
    if (!hiprtc_info().found) GTEST_SKIP() << hiprtc_info().absence;
  }
};

TEST_F(HiprtcCompiles, AKernelOfOurPrimitives) {
  const CompiledKernel kernel = compile(generated(R"(
#include "kernel_pytorch/cuda/tile/reduce.cuh"
__global__ void __launch_bounds__(256) total(const float* from, float* to) {
  to[threadIdx.x] = kernel_pytorch::tile::sum_lanes<32>(from[threadIdx.x]);
})",
                                                  "total"),
                                        "gfx90a");
  EXPECT_GT(kernel.registers, 0);
  EXPECT_EQ(kernel.spill_bytes, 0);
  EXPECT_EQ(kernel.warnings, "");
  const CodeObjectSummary summary = summarize_code_object(kernel.cubin, "total");
  EXPECT_EQ(summary.wave_lanes, 64);
  // Cut anywhere it is refused or complete, and never read beyond its end.
  for (size_t bytes = 0; bytes < kernel.cubin.size(); bytes += 97) {
    const std::string cut = kernel.cubin.substr(0, bytes);
    error_of([&] { EXPECT_EQ(summarize_code_object(cut, "total").vector_registers, kernel.registers); });
  }
}

TEST_F(HiprtcCompiles, OnceForTheCacheAndForABundle) {
  const DeviceCode code = generated("__global__ void empty() {}", "empty");
  const CubinFile first = obtain_cubin(code, "gfx90a");
  const int64_t before = compile_count();
  EXPECT_EQ(obtain_cubin(code, "gfx90a").cubin, first.cubin);
  EXPECT_EQ(compile_count(), before);
  EXPECT_NE(content_key(code, "gfx90a"), content_key(code, "sm_90"));
  const testing::TemporaryDirectory bundle;
  write_bundle({code}, "gfx90a", bundle.path(), nullptr);
  clear_cubin_cache();
  change([&](Options& options) { options.bundle_directory = bundle.path(); });
  const int64_t after_bundle = compile_count();
  EXPECT_EQ(obtain_cubin(code, "gfx90a").lowered_name, first.lowered_name);
  EXPECT_EQ(compile_count(), after_bundle);
}

TEST_F(HiprtcCompiles, ForNoArchitectureThatItDoesNotKnow) {
  const std::string error = error_of([] { compile(generated("__global__ void empty() {}", "empty"), "gfx1"); });
  EXPECT_NE(error.find("does not know gfx1"), std::string::npos) << error;
}

TEST_F(HiprtcCompiles, AndSpillsAndPrivateMemoryAreSeen) {
  const CompiledKernel kernel = compile(generated(R"(
__global__ void __launch_bounds__(64) scatter(const int* from, int* to) {
  int places[64];
  for (int i = 0; i < 64; ++i) places[i] = from[i];
  places[from[threadIdx.x] & 63] = 7;
  to[threadIdx.x] = places[from[threadIdx.x + 1] & 63];
})",
                                                  "scatter"),
                                        "gfx90a");
  EXPECT_GE(kernel.private_bytes, 256);
}

TEST_F(HiprtcCompiles, NothingThatAnAmdGpuCannotDo) {
  const std::string error = error_of([] {
    compile(generated(R"(
#include "kernel_pytorch/cuda/ptx/named_barrier.cuh"
__global__ void wait() { kernel_pytorch::ptx::barrier_sync(1, 128); })",
                      "wait"),
            "gfx90a");
  });
  EXPECT_NE(error.find("no form for AMD GPUs: barriers of a part of a block"), std::string::npos) << error;
}

}  // namespace
}  // namespace kernel_pytorch::jit
