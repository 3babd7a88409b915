// Kernels on a GPU, through the whole path; skipped with the reason where there is none.
#include <gtest/gtest.h>

#include <chrono>
#include <numeric>
#include <thread>

#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/device/cuda/driver_table.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/jit/jit_fixture_test.h"

namespace kernel_pytorch::jit {
namespace {

using testing::error_of;
using testing::scale_code;

DeviceCode probe_code(const std::string& function, int addend) {
  DeviceCode code = scale_code("float", 1, 0);
  code.entry =
      concat("kernel_pytorch::jit_probe::", function, "<kernel_pytorch::jit_probe::ProbeConfig{32, ", addend, "}>");
  return code;
}

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values) : count_(values.size()) {
    memory_ = cuda_device::allocate(0, count_ * sizeof(T));
    cuda_device::copy_to_device(0, memory_, values.data(), count_ * sizeof(T), nullptr);
    cuda_device::synchronize(0, nullptr);
  }
  ~DeviceArray() { cuda_device::release(0, memory_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  void* memory() const { return memory_; }
  std::vector<T> values(void* stream) const {
    std::vector<T> values(count_);
    cuda_device::copy_to_host(0, values.data(), memory_, count_ * sizeof(T), stream);
    cuda_device::synchronize(0, stream);
    return values;
  }

 private:
  size_t count_;
  void* memory_;
};

class Launch : public testing::CacheTest {
 protected:
  void SetUp() override {
    std::string absence;
    devices_ = cuda_device::detect(absence);
    if (devices_.empty()) GTEST_SKIP() << absence;
    const bool has_compiler = devices_[0].is_amd() ? hiprtc_info().found : nvrtc_info(true).found;
    if (!has_compiler) GTEST_SKIP() << nvrtc_info().absence << hiprtc_info().absence;
    stream_ = std::make_unique<cuda_device::Stream>(0);
    context_.info = &devices_[0];
    context_.stream = stream_->handle();
  }
  CUkern_st* kernel(const DeviceCode& code) const { return get_kernel(code, devices_[0], context_.stream); }
  void launch_scale(CUkern_st* kernel, void* values, float factor, int64_t count, bool dependent = false) const {
    void* arguments[] = {&values, &factor, &count};
    cuda_device::launch(context_, kernel, {.grid_x = 4, .block_x = 128, .programmatic_dependent = dependent}, arguments,
                        "probe scale");
  }

  std::vector<DeviceInfo> devices_;
  std::unique_ptr<cuda_device::Stream> stream_;
  Context context_;
};

TEST_F(Launch, ComputesWhatTheSourceSays) {
  std::vector<float> host(1000);
  std::iota(host.begin(), host.end(), 0.0f);
  const DeviceArray<float> array(host);
  CUkern_st* scale = kernel(scale_code("float", 128, 5));
  EXPECT_EQ(kernel(scale_code("float", 128, 5)), scale);
  for (bool dependent : {false, true}) launch_scale(scale, array.memory(), 2.0f, 999, dependent);
  const std::vector<float> result = array.values(context_.stream);
  for (int i = 0; i < 999; ++i) ASSERT_EQ(result[i], (host[i] * 2 + 5) * 2 + 5) << i;
  EXPECT_EQ(result[999], 999) << "past the count nothing is touched";
  const cuda_device::KernelResources resources = cuda_device::resources(scale, 0);
  EXPECT_GT(resources.registers, 0);
  EXPECT_EQ(resources.local_bytes, 0);
}

TEST_F(Launch, LargeSharedMemoryIsRaisedFromSeveralThreads) {
  CUkern_st* touch = kernel(probe_code("touch_shared", 1));
  const auto limit = static_cast<int32_t>(devices_[0].cuda.shared_bytes_per_block);
  const auto run = [&](int32_t bytes) {
    const DeviceArray<int32_t> sums(std::vector<int32_t>(8, 0));
    void* memory = sums.memory();
    void* arguments[] = {&memory, &bytes};
    cuda_device::launch(context_, touch, {.grid_x = 8, .block_x = 32, .shared_bytes = static_cast<unsigned>(bytes)},
                        arguments, "probe touch_shared");
    for (int32_t sum : sums.values(context_.stream)) EXPECT_EQ(sum, 8) << bytes;
  };
  std::vector<std::thread> threads;
  for (int32_t bytes : {1000, 49152, 49153, 65536, limit, 50000}) {
    threads.emplace_back([&, bytes] { EXPECT_EQ(error_of([&] { run(bytes); }), ""); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(cuda_device::resident_blocks(touch, 0, 32, static_cast<unsigned>(limit)), 1);
  EXPECT_GT(cuda_device::resident_blocks(touch, 0, 32, 1024), 8);
  const std::string message = error_of([&] { run(limit + 1024); });
  EXPECT_NE(message.find("probe touch_shared"), std::string::npos) << message;
  EXPECT_NE(message.find("CUDA_ERROR_INVALID_VALUE"), std::string::npos) << message;
}

TEST_F(Launch, ClustersUpToSixteenBlocks) {
  if (devices_[0].cuda.capability() < 90) GTEST_SKIP() << "clusters need compute capability 9.0";
  DeviceCode code = probe_code("count_cluster", 0);
  code.minimum_capability = 90;
  CUkern_st* count = kernel(code);
  for (unsigned blocks : {1u, 2u, 4u, 8u, 16u}) {
    const DeviceArray<int32_t> sizes(std::vector<int32_t>(32, -1));
    void* memory = sizes.memory();
    void* arguments[] = {&memory};
    cuda_device::launch(context_, count, {.grid_x = 32, .block_x = 32, .cluster_x = blocks}, arguments,
                        "probe cluster");
    for (int32_t size : sizes.values(context_.stream)) EXPECT_EQ(size, static_cast<int32_t>(blocks));
  }
}

TEST_F(Launch, EventsMeasureAndMemoryRunsOutWithWords) {
  cuda_device::Event start(0), end(0);
  start.record(context_.stream);
  const DeviceArray<float> array(std::vector<float>(1 << 20, 1.0f));
  cuda_device::fill_bytes(0, array.memory(), 0, 4 << 20, context_.stream);
  end.record(context_.stream);
  end.synchronize();
  EXPECT_GT(end.milliseconds_since(start), 0);
  EXPECT_EQ(array.values(context_.stream)[12345], 0.0f);
  const std::string message = error_of([] { cuda_device::allocate(0, size_t{1} << 50); });
  EXPECT_NE(message.find("1125899906842624 bytes"), std::string::npos) << message;
  EXPECT_NE(message.find("CUDA_ERROR_OUT_OF_MEMORY"), std::string::npos) << message;
}

// In every capture mode: the kernel is compiled, loaded and launched for the first time inside the capture, with large
// shared memory, and the graph replays right.
TEST_F(Launch, AKernelMissingWhileCapturing) {
  const cuda_device::DriverTable& driver = *cuda_device::driver();
  auto* stream = static_cast<CUstream_st*>(context_.stream);
  int addend = 40;
  for (auto mode : {cuda_device::kCaptureGlobal, cuda_device::kCaptureThreadLocal, cuda_device::kCaptureRelaxed}) {
    const DeviceArray<float> array(std::vector<float>(64, 1.0f));
    const DeviceArray<int32_t> sums(std::vector<int32_t>(1, 0));
    const cuda_device::CurrentDevice current(0);
    cuda_device::check(driver.stream_begin_capture(stream, mode), "begin");
    EXPECT_TRUE(cuda_device::is_capturing(stream));
    launch_scale(kernel(scale_code("float", 128, addend)), array.memory(), 2.0f, 64);
    void* memory = sums.memory();
    int32_t bytes = 60'000;
    void* arguments[] = {&memory, &bytes};
    cuda_device::launch(context_, kernel(probe_code("touch_shared", addend)), {.block_x = 32, .shared_bytes = 60'000},
                        arguments, "probe touch_shared");
    CUgraph_st* graph = nullptr;
    cuda_device::check(driver.stream_end_capture(stream, &graph), "end");
    EXPECT_FALSE(cuda_device::is_capturing(stream));
    CUgraphExec_st* executable = nullptr;
    cuda_device::check(driver.graph_instantiate(&executable, graph, 0), "instantiate");
    EXPECT_EQ(array.values(stream)[3], 1.0f) << "captured, not run";
    for (int i = 0; i < 2; ++i) cuda_device::check(driver.graph_launch(executable, stream), "launch");
    EXPECT_EQ(array.values(stream)[3], (2.0f + addend) * 2 + addend);
    EXPECT_EQ(sums.values(stream)[0], 7 + addend);
    driver.graph_executable_destroy(executable);
    driver.graph_destroy(graph);
    ++addend;
  }
}

TEST_F(Launch, ACompileErrorWhileCapturingLeavesTheCaptureWhole) {
  const cuda_device::DriverTable& driver = *cuda_device::driver();
  auto* stream = static_cast<CUstream_st*>(context_.stream);
  const cuda_device::CurrentDevice current(0);
  cuda_device::check(driver.stream_begin_capture(stream, cuda_device::kCaptureGlobal), "begin");
  EXPECT_NE(error_of([&] { kernel(probe_code("no_such_kernel", 0)); }), "");
  CUgraph_st* graph = nullptr;
  EXPECT_EQ(driver.stream_end_capture(stream, &graph), cuda_device::kSuccess);
  driver.graph_destroy(graph);
}

TEST_F(Launch, ManyThreadsGetTheSameKernel) {
  std::vector<CUkern_st*> kernels(8);
  std::vector<std::thread> threads;
  for (CUkern_st*& slot : kernels) {
    threads.emplace_back([&] { slot = kernel(scale_code("float", 128, 60)); });
  }
  for (std::thread& thread : threads) thread.join();
  for (CUkern_st* found : kernels) EXPECT_EQ(found, kernels[0]);
}

TEST_F(Launch, WarmCallsAreCheap) {
  const DeviceCode code = scale_code("float", 128, 5);
  CUkern_st* scale = kernel(code);
  const DeviceArray<float> array(std::vector<float>(64, 1.0f));
  const auto nanoseconds = [](int repeats, const auto& work) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < repeats; ++i) work();
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / repeats;
  };
  launch_scale(scale, array.memory(), 1.0f, 64);
  const double lookup = nanoseconds(100'000, [&] { kernel(code); });
  const double launch = nanoseconds(500, [&] { launch_scale(scale, array.memory(), 1.0f, 64); });
  cuda_device::synchronize(0, context_.stream);
  RecordProperty("lookup_nanoseconds", std::to_string(lookup));
  RecordProperty("launch_nanoseconds", std::to_string(launch));
  std::printf("warm get_kernel %.0f ns, warm launch %.0f ns\n", lookup, launch);
  EXPECT_LT(lookup, 1'000);
  EXPECT_LT(launch, 20'000);
}

}  // namespace
}  // namespace kernel_pytorch::jit
