// Every op, kernel and config on every compute capability and on an AMD GPU, on paper: a kernel that says yes launches
// code that the capability has instructions for, within its shared memory and clusters; and where every capability has
// a kernel for an op, it says yes to the op's own shapes.
#include "kernel_pytorch/device/cuda/capability.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "kernel_pytorch/base/emulation_test.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/paper.h"
#include "kernel_pytorch/device/workspace.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/operations.h"
#include "kernel_pytorch/registry/any_problem.h"

namespace kernel_pytorch {
namespace {

using cuda_device::PaperLaunch;
using cuda_device::PaperLaunches;
using registry::AnyOperation;
using registry::AnyProblem;
using registry::ProblemRequest;

constexpr const char* kAmd = "gfx90a";

bool is_amd(const CudaCapability& capability) {
  return &capability == &kAmdGpu;
}

std::vector<const CudaCapability*> rows() {
  std::vector<const CudaCapability*> all{&kAmdGpu};
  for (const CudaCapability& row : kCudaCapabilities) all.push_back(&row);
  return all;
}

DeviceInfo gpu_of(const CudaCapability& capability) {
  DeviceInfo info;
  const int number = is_amd(capability) ? 0 : capability.number;
  info.device = {DeviceKind::kCuda, static_cast<int16_t>(cuda_device::kPaperDevice + number)};
  info.name = concat("paper ", is_amd(capability) ? kAmd : std::to_string(number));
  info.memory_bytes = int64_t{80} << 30;
  info.cuda = {.compute_major = number / 10,
               .compute_minor = number % 10,
               .multiprocessors = 84,
               .l2_bytes = 40 << 20,
               .shared_bytes_per_block = int64_t{capability.shared_kib_per_block} << 10,
               .shared_bytes_per_multiprocessor = int64_t{capability.shared_kib_per_multiprocessor} << 10,
               .clock_khz = 1500000,
               .memory_clock_khz = 1500000,
               .memory_bus_bits = 384,
               .driver_version = 13000,
               .gfx = is_amd(capability) ? kAmd : ""};
  info.fingerprint = info.name;
  return info;
}

// Bound to addresses at which nothing is.
std::unique_ptr<AnyProblem> on_paper(const AnyProblem& problem, const DeviceInfo& device) {
  std::vector<void*> memory;
  uintptr_t next = uintptr_t{1} << 45;
  for (const registry::ProblemTensor& tensor : problem.tensors()) {
    memory.push_back(reinterpret_cast<void*>(next));
    next += (static_cast<uintptr_t>(tensor.view.byte_count()) / 256 + 2) * 256;
  }
  return problem.with_memory(device, memory);
}

std::vector<std::string> flaws_of(const PaperLaunch& launch, const CudaCapability& capability) {
  std::vector<std::string> flaws;
  const auto note = [&](const auto&... words) { flaws.push_back(concat(words...)); };
  if (launch.code.minimum_capability > capability.number) note("needs sm_", launch.code.minimum_capability);
  if (launch.code.architecture_specific && !capability.wgmma && !capability.tensor_memory) {
    note("is written for one architecture");
  }
  if (is_amd(capability)) {
    if (const std::string reason = jit::obstacle(launch.code, kAmd); !reason.empty()) note("has no form: ", reason);
  }
  if (launch.shape.shared_bytes > static_cast<unsigned>(capability.shared_kib_per_block) << 10) {
    note("asks for ", launch.shape.shared_bytes, " bytes of shared memory");
  }
  if (launch.shape.cluster_x > static_cast<unsigned>(capability.cluster_blocks)) {
    note("asks for a cluster of ", launch.shape.cluster_x);
  }
  if (launch.shape.cluster_x > 1 && launch.shape.grid_x % launch.shape.cluster_x != 0) {
    note("has ", launch.shape.grid_x, " blocks in clusters of ", launch.shape.cluster_x);
  }
  if (launch.shape.programmatic_dependent && !capability.hopper) note("is launched programmatically dependent");
  if (launch.shape.block_x < 1 || launch.shape.block_x > 1024) note("has blocks of ", launch.shape.block_x, " threads");
  if (launch.shape.grid_x < 1 || launch.shape.grid_y < 1 || launch.shape.grid_z < 1) note("has an empty grid");
  if (launch.shape.grid_y > 65535 || launch.shape.grid_z > 65535) note("has a grid beyond 65535");
  return flaws;
}

TEST(Capabilities, EveryKernelThatSaysYesFits) {
  int64_t runs = 0, shapes = 0;
  const int64_t every = unless_emulated(1, 9);
  for (const CudaCapability* row : rows()) {
    const CudaCapability& capability = *row;
    if (capability.number < 80) continue;
    const DeviceInfo device = gpu_of(capability);
    for (const AnyOperation& operation : operations()) {
      for (ProblemRequest& request : operation.shapes()) {
        if (shapes++ % every != 0) continue;
        request.device = device.device;
        const auto made = operation.make_on(request, device);
        const auto problem = on_paper(*made, device);
        for (int kernel = 0; kernel < problem->kernel_count(); ++kernel) {
          if (!problem->supports(kernel)) continue;
          const std::vector<std::string> configs = problem->configs(kernel);
          for (size_t config = 0; config < configs.size(); ++config) {
            CountingScratch scratch;
            Context context{
                .info = &device, .stream = nullptr, .threads = nullptr, .scratch = &scratch, .kernel_override = {}};
            PaperLaunches paper;
            const std::string place = concat(operation.name, "/", problem->kernel_name(kernel), " ", configs[config],
                                             " ", shape_text(request.shape), " on ", device.name);
            ASSERT_NO_THROW(problem->run(kernel, static_cast<int>(config), context)) << place;
            ++runs;
            for (const PaperLaunch& launch : paper.launches()) {
              for (const std::string& flaw : flaws_of(launch, capability)) {
                ADD_FAILURE() << place << ": " << launch.code.entry << " " << flaw;
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(runs, 10000 / every);
}

bool says(const ProblemRequest& request, std::string_view name, std::string_view value) {
  return std::any_of(request.options.begin(), request.options.end(), [&](const auto& option) {
    return option.first == name && (value.empty() ? option.second != "0" : option.second == value);
  });
}
bool names_float8(const ProblemRequest& request) {
  const auto is_float8 = [](std::string_view word) { return word == "e4m3" || word == "e5m2"; };
  return is_float8(name_of(request.dtype)) || std::any_of(request.options.begin(), request.options.end(),
                                                          [&](const auto& option) { return is_float8(option.second); });
}

// What some capabilities have no kernel for, and why. fp64, which on a GPU the host computes, is not asked for.
struct Exception {
  const char* why;
  bool (*holds)(const CudaCapability&, std::string_view op, const ProblemRequest&);
};
constexpr Exception kExceptions[] = {
    {"before 8.9 nothing converts FP8",
     [](const CudaCapability& row, std::string_view op, const ProblemRequest& request) {
       const bool is_float8 = op == "quantize" || op == "scaled_matmul" || op == "attention_fp8_forward";
       return !row.float8 && (is_float8 || names_float8(request));
     }},
    {"groups of FP8 matrices are by wgmma alone, to bf16: elsewhere scaled_matmul group by group",
     [](const CudaCapability&, std::string_view op, const ProblemRequest&) { return op == "scaled_grouped_matmul"; }},
    {"two matrices read as one are for wgmma; linear packs them, or calls two products",
     [](const CudaCapability& row, std::string_view op, const ProblemRequest& request) {
       return !row.wgmma && op == "matmul" && says(request, "form", "gated_twice");
     }},
    {"dropout of a part of a sequence draws by positions that only the CPU's kernels know",
     [](const CudaCapability&, std::string_view op, const ProblemRequest& request) {
       return op.starts_with("attention_") && says(request, "first_query", "") && says(request, "dropout", "");
     }},
    {"fp32 gradients of heads above 256 columns need more than 99 KiB for 16 rows",
     [](const CudaCapability& row, std::string_view op, const ProblemRequest& request) {
       return row.shared_kib_per_block <= 99 && op == "attention_backward" && request.dtype == DType::kFloat32 &&
              request.shape.back() > 256;
     }},
    {"AMD: attention's backward of 512 columns, and fp32 from 256 on, need more than 64 KiB",
     [](const CudaCapability& row, std::string_view op, const ProblemRequest& request) {
       const int64_t least = request.dtype == DType::kFloat32 ? 256 : 512;
       return is_amd(row) && op.starts_with("attention_") && request.shape.back() >= least;
     }},
    {"AMD: 1000 experts, or 16 heads of a group with 128 columns, need more than 64 KiB",
     [](const CudaCapability& row, std::string_view op, const ProblemRequest& request) {
       const bool has_many = request.shape.back() == 1000 || says(request, "num_experts", "1024");
       return is_amd(row) && ((op.starts_with("moe_") && has_many) ||
                              (op == "native_sparse_attention_backward" && request.shape.back() == 128));
     }},
};

TEST(Capabilities, EveryOpHasAKernelForItsShapes) {
  std::set<std::string> missing;
  std::set<const char*> used;
  for (const CudaCapability* row : rows()) {
    const CudaCapability& capability = *row;
    const DeviceInfo device = gpu_of(capability);
    for (const AnyOperation& operation : operations()) {
      for (ProblemRequest& request : operation.shapes()) {
        request.device = device.device;
        if (request.dtype == DType::kFloat64) continue;
        const auto problem = operation.make_on(request, device);
        bool any = false;
        for (int kernel = 0; kernel < problem->kernel_count(); ++kernel) {
          const bool yes = static_cast<bool>(problem->supports(kernel));
          any |= yes;
          EXPECT_FALSE(yes && capability.number < 80 && problem->kernel_name(kernel) != "composed")  // its parts refuse
              << operation.name << "/" << problem->kernel_name(kernel) << " on " << device.name;
        }
        if (capability.number < 80) continue;
        if (any) continue;
        const auto excuse = std::find_if(
            std::begin(kExceptions), std::end(kExceptions),
            [&](const Exception& exception) { return exception.holds(capability, operation.name, request); });
        if (excuse != std::end(kExceptions)) {
          used.insert(excuse->why);
          continue;
        }
        std::string words =
            concat(operation.name, " on ", device.name, ": ", shape_text(request.shape), " ", name_of(request.dtype));
        for (const auto& [name, value] : request.options) words += concat(" ", name, "=", value);
        missing.insert(words);
      }
    }
  }
  for (const std::string& words : missing) ADD_FAILURE() << words;
  for (const Exception& exception : kExceptions) EXPECT_TRUE(used.contains(exception.why)) << exception.why;
}

TEST(Capabilities, TheTableIsWhole) {
  int before = 0;
  for (const CudaCapability& row : kCudaCapabilities) {
    EXPECT_GT(row.number, before);
    before = row.number;
    EXPECT_EQ(cuda_capability(row.number).shared_kib_per_block, row.shared_kib_per_block);
    EXPECT_LE(row.shared_kib_per_block, row.shared_kib_per_multiprocessor);
    EXPECT_FALSE(row.wgmma && row.tensor_memory);
    if (row.hopper) EXPECT_TRUE(row.float8);
    EXPECT_EQ(row.hopper, row.cluster_blocks > 1);
  }
  EXPECT_TRUE(cuda_capability(90).wgmma);
  EXPECT_FALSE(cuda_capability(91).wgmma) << "instructions of one architecture are not those of the next";
  EXPECT_FALSE(cuda_capability(130).tensor_memory);
  EXPECT_TRUE(cuda_capability(130).hopper);
  EXPECT_FALSE(cuda_capability(61).float8);
}

TEST(Capabilities, AnAmdGpuIsNoHopper) {
  DeviceInfo device = gpu_of(kAmdGpu);
  EXPECT_TRUE(device.is_cuda() && device.is_amd());
  EXPECT_EQ(device.cuda.architecture(), "gfx90a");
  EXPECT_EQ(feature_obstacle(device, CudaFeature::kMma), nullptr);
  for (const CudaFeature feature : {CudaFeature::kBulkCopy, CudaFeature::kCluster, CudaFeature::kDependentLaunch,
                                    CudaFeature::kWgmma, CudaFeature::kTensorMemory}) {
    ASSERT_NE(feature_obstacle(device, feature), nullptr);
    EXPECT_NE(std::string_view(feature_obstacle(device, feature)).find("AMD"), std::string_view::npos);
  }
  EXPECT_EQ(most_cluster_blocks(device), 1);
}

TEST(Capabilities, WhatAPretendedOneIsCompiledFor) {
  const auto target = [](int pretended, int actual) {
    const CompileTarget found = compile_target(pretended, actual);
    return concat(found.as_ptx ? "compute_" : "sm_", found.capability);
  };
  EXPECT_EQ(target(80, 90), "compute_80") << "cubins run within their major number";
  EXPECT_EQ(target(80, 86), "sm_80");
  EXPECT_EQ(target(90, 90), "sm_90");
  EXPECT_EQ(target(89, 120), "compute_89");
  EXPECT_EQ(target(120, 90), "sm_90") << "chosen as there, compiled for what is here";
}

TEST(Capabilities, APretendedOneHasItsLimits) {
  DeviceInfo device = gpu_of(cuda_capability(90));
  device.device.index = 1;
  set_pretended_capability(86);
  pretend(device);
  EXPECT_EQ(device.cuda.capability(), 86);
  EXPECT_EQ(actual_capability(device), 90);
  EXPECT_EQ(device.cuda.shared_bytes_per_block, 99 << 10);
  EXPECT_EQ(device.cuda.shared_bytes_per_multiprocessor, 100 << 10);
  EXPECT_NE(feature_obstacle(device, CudaFeature::kWgmma), nullptr);
  EXPECT_EQ(feature_obstacle(device, CudaFeature::kMma), nullptr);
  EXPECT_THROW(set_pretended_capability(42), Error);
  set_pretended_capability(0);
  DeviceInfo untouched = gpu_of(cuda_capability(90));
  pretend(untouched);
  EXPECT_EQ(untouched.cuda.capability(), 90);
}

}  // namespace
}  // namespace kernel_pytorch
