#include "kernel_pytorch/jit/ptxas_log.h"

#include <gtest/gtest.h>

namespace kernel_pytorch::jit {
namespace {

TEST(PtxasLog, ReadsRegistersAndSpillsOfEveryFunction) {
  const PtxasSummary summary = summarize_ptxas_log(
      "ptxas info    : 0 bytes gmem\n"
      "ptxas info    : Compiling entry function '_Z1fv' for 'sm_90a'\n"
      "ptxas info    : Function properties for _Z1fv\n"
      "ptxas         .     48 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads\n"
      "ptxas info    : Used 168 registers, used 16 barriers\n"
      "ptxas info    : Function properties for _Z1gv\n"
      "    0 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads\n");
  EXPECT_EQ(summary.registers, 168);
  EXPECT_EQ(summary.spill_bytes, 24);
  EXPECT_EQ(summary.warnings, "");
}

TEST(PtxasLog, KeepsWarningsAndSerialisationButNotTheInjectedArrive) {
  const std::string serialised =
      "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...\n";
  const std::string warning = "kernel_pytorch/x.cuh(3): warning #177-D: variable \"a\" was declared but never used\n";
  const std::string injected = "ptxas info    : (C7519) Potential Performance Loss: 'warpgroup.arrive' is injected\n";
  EXPECT_EQ(summarize_ptxas_log(serialised + injected + warning).warnings, serialised + warning);
}

TEST(PtxasLog, AcceptsAnyText) {
  for (const char* text : {"", "\n\n", "Used", "Used registers", " bytes spill stores", "no newline at the end"}) {
    const PtxasSummary summary = summarize_ptxas_log(text);
    EXPECT_EQ(summary.registers, 0) << text;
    EXPECT_EQ(summary.spill_bytes, 0) << text;
  }
}

}  // namespace
}  // namespace kernel_pytorch::jit
