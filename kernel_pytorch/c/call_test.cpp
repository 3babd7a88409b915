// kp_call as C sees it: the arithmetic is that of the C++ entry points, and whatever can be given wrongly is refused
// with the op, the argument and the cure, for every op that is declared.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernel_pytorch/c/kernel_pytorch.h"
#include "kernel_pytorch/device/workspace.h"
#include "kernel_pytorch/ops/layer_norm/layer_norm.h"
#include "kernel_pytorch/ops/operations.h"

namespace kernel_pytorch::c_interface {
namespace {

constexpr int64_t kRows = 3, kColumns = 40;

class CCallTest : public testing::Test {
 protected:
  CCallTest() : x_(kRows * kColumns), weight_(kColumns, 2.0f), output_(kRows * kColumns), rstd_(kRows), mean_(kRows) {
    EXPECT_EQ(kp_context_create({KP_CPU, 0}, nullptr, &context_), KP_OK) << kp_last_error();
    for (size_t i = 0; i < x_.size(); ++i) x_[i] = std::sin(static_cast<float>(i));
  }
  ~CCallTest() override { kp_context_destroy(context_); }

  static kp_tensor rows(std::vector<float>& values) {
    static constexpr int64_t kSizes[] = {kRows, kColumns};
    return {values.data(), KP_FLOAT32, {KP_CPU, 0}, 2, kSizes, nullptr};
  }
  static kp_tensor flat(std::vector<float>& values, const int64_t& size) {
    return {values.data(), KP_FLOAT32, {KP_CPU, 0}, 1, &size, nullptr};
  }
  kp_status call(const char* op, const std::vector<kp_argument>& arguments) {
    return kp_call(context_, op, arguments.data(), arguments.size());
  }
  // The message of a call that must be refused.
  std::string refusal(const char* op, const std::vector<kp_argument>& arguments) {
    EXPECT_EQ(call(op, arguments), KP_INVALID_ARGUMENT);
    return kp_last_error();
  }

  kp_context* context_ = nullptr;
  std::vector<float> x_, weight_, output_, rstd_, mean_;
  kp_tensor x = rows(x_), weight = flat(weight_, kColumns), output = rows(output_), rstd = flat(rstd_, kRows),
            mean = flat(mean_, kRows);
  const kp_argument x_given = kp_tensor_argument("x", &x), output_given = kp_tensor_argument("output", &output);
};

// Softmax over long rows takes scratch memory on the CPU.
TEST_F(CCallTest, ScratchMemoryMayBeTheCallers) {
  constexpr int64_t kLong[] = {4, 100000};
  std::vector<float> x(4 * 100000), expected(x.size()), output(x.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
  kp_tensor in{x.data(), KP_FLOAT32, {KP_CPU, 0}, 2, kLong, nullptr}, out = in;
  const kp_argument given[] = {kp_tensor_argument("x", &in), kp_tensor_argument("output", &out)};
  out.data = expected.data();
  ASSERT_EQ(kp_call(context_, "softmax", given, 2), KP_OK) << kp_last_error();
  out.data = output.data();
  constexpr size_t kBytes = 16 << 20;
  std::vector<char> memory(kBytes + 256, 'x');
  char* begin = memory.data() + 1;                  // anywhere
  for (const size_t bytes : {kBytes, size_t{0}}) {  // none: the context's own
    std::ranges::fill(output, -1.0f);
    ASSERT_EQ(kp_call_with_workspace(context_, "softmax", given, 2, bytes == 0 ? nullptr : begin, bytes), KP_OK)
        << kp_last_error();
    EXPECT_EQ(output, expected);
  }
  EXPECT_TRUE(std::ranges::any_of(memory, [](char byte) { return byte != 'x'; }));
  EXPECT_EQ(kp_call_with_workspace(context_, "softmax", given, 2, begin, 3), KP_OK) << kp_last_error();
  EXPECT_EQ(kp_call_with_workspace(context_, "softmax", given, 2, nullptr, 256), KP_INVALID_ARGUMENT);
}

TEST(Workspace, PiecesAreAsCounted) {
  for (const size_t offset : {0, 1, 255}) {
    CountingScratch counted;
    for (const size_t bytes : {1, 256, 300}) counted.allocate(bytes);
    EXPECT_EQ(counted.bytes(), 1024 + 255);
    alignas(256) char memory[2048];
    OwnContext own;
    WorkspaceScratch given(memory + offset, counted.bytes(), own);
    char* last = memory + offset;
    for (const size_t bytes : {1, 256, 300}) {
      char* piece = static_cast<char*>(given.allocate(bytes));
      EXPECT_EQ(reinterpret_cast<uintptr_t>(piece) % 256, 0);
      EXPECT_GE(piece, last);
      EXPECT_LE(piece + bytes, memory + offset + counted.bytes());
      last = piece + bytes;
    }
    char* beyond = static_cast<char*>(given.allocate(400));  // the context's own
    EXPECT_TRUE(beyond < memory || beyond >= memory + sizeof(memory));
  }
}

TEST_F(CCallTest, ARehearsalChecksAndComputesNothing) {
  size_t bytes = 1;
  x.data = output.data = nullptr;
  const kp_argument given[] = {x_given, output_given};
  EXPECT_EQ(kp_workspace_bytes({KP_CPU, 0}, "rms_norm", given, 2, &bytes), KP_OK) << kp_last_error();
  EXPECT_EQ(bytes, 0);
  const int64_t wrong = kRows;
  kp_tensor short_weight = flat(weight_, wrong);
  const kp_argument refused[] = {x_given, output_given, kp_tensor_argument("weight", &short_weight)};
  EXPECT_EQ(kp_workspace_bytes({KP_CPU, 0}, "rms_norm", refused, 3, &bytes), KP_INVALID_ARGUMENT);
  EXPECT_EQ(kp_workspace_bytes({KP_CPU, 0}, "rms_norm", given, 2, nullptr), KP_INVALID_ARGUMENT);
}

TEST_F(CCallTest, ACallMayNameItsKernel) {
  const kp_argument reference = kp_text_argument("kernel", "reference");
  ASSERT_EQ(call("rms_norm", {x_given, output_given, reference}), KP_OK) << kp_last_error();
  EXPECT_NE(output_[1], 0.0f);
  EXPECT_NE(refusal("rms_norm", {x_given, output_given, kp_text_argument("kernel", "fast")}).find("\"fast\""),
            std::string::npos);
  EXPECT_NE(refusal("rms_norm", {x_given, output_given, kp_integer_argument("kernel", 1)}).find("text"),
            std::string::npos);
  for (const registry::Declaration& one : declarations()) {
    EXPECT_EQ(one.fields.find("kernel"), nullptr) << one.name << " has an argument of this name";
  }
}

TEST_F(CCallTest, ACallIsExplained) {
  x.data = output.data = nullptr;
  for (const bool is_named : {false, true}) {
    const kp_argument given[] = {x_given, output_given, kp_text_argument("kernel", "reference")};
    char* text = nullptr;
    ASSERT_EQ(kp_explain_call({KP_CPU, 0}, "rms_norm", given, is_named ? 3 : 2, &text), KP_OK) << kp_last_error();
    const std::string found = text;
    kp_free(text);
    EXPECT_NE(found.find("\"op\":\"rms_norm_forward\""), std::string::npos) << found;
    EXPECT_NE(found.find(is_named ? "\"tier\":\"override\"" : "\"tier\":\"heuristic\""), std::string::npos) << found;
  }
  EXPECT_EQ(kp_explain_call({KP_CPU, 0}, "rms_norm", nullptr, 0, nullptr), KP_INVALID_ARGUMENT);
}

TEST_F(CCallTest, KernelsRunOnTheCallersThreads) {
  struct Counted {
    int runs = 0;
    static void run(void* state, int32_t workers, void (*work)(void*, int), void* work_state) {
      ++static_cast<Counted*>(state)->runs;
      for (int32_t worker = workers - 1; worker >= 0; --worker) work(work_state, worker);
    }
  } counted;
  constexpr int64_t kLarge[] = {512, 4096};
  std::vector<float> x(512 * 4096, 2.0f), output(x.size());
  kp_tensor in{x.data(), KP_FLOAT32, {KP_CPU, 0}, 2, kLarge, nullptr}, out = in;
  out.data = output.data();
  const std::vector<kp_argument> given = {kp_tensor_argument("x", &in), kp_tensor_argument("output", &out)};
  kp_threads threads{3, Counted::run, &counted};
  ASSERT_EQ(kp_context_set_threads(context_, &threads), KP_OK) << kp_last_error();
  ASSERT_EQ(call("rms_norm", given), KP_OK) << kp_last_error();
  EXPECT_GT(counted.runs, 0);
  for (const float one : output) ASSERT_NEAR(one, 1.0f, 1e-5f);
  const int before = counted.runs;
  ASSERT_EQ(kp_context_set_threads(context_, nullptr), KP_OK);
  ASSERT_EQ(call("rms_norm", given), KP_OK);
  EXPECT_EQ(counted.runs, before);
  threads.count = 0;
  EXPECT_EQ(kp_context_set_threads(context_, &threads), KP_INVALID_ARGUMENT);
}

TEST_F(CCallTest, ComputesWhatCppComputes) {
  ASSERT_EQ(
      call("layer_norm_forward", {kp_tensor_argument("rstd", &rstd), output_given, kp_number_argument("eps", 0.25),
                                  kp_tensor_argument("mean", &mean), x_given, kp_tensor_argument("weight", &weight)}),
      KP_OK)
      << kp_last_error();
  std::vector<float> expected(x_.size()), expected_rstd(kRows), expected_mean(kRows);
  OwnContext context;
  layer_norm::Forward arguments;
  arguments.x = contiguous_view(x_.data(), DType::kFloat32, {kRows, kColumns});
  arguments.weight = contiguous_view(weight_.data(), DType::kFloat32, {kColumns});
  arguments.eps = 0.25;
  arguments.output = contiguous_view(expected.data(), DType::kFloat32, {kRows, kColumns});
  arguments.mean = contiguous_view(expected_mean.data(), DType::kFloat32, {kRows});
  arguments.rstd = contiguous_view(expected_rstd.data(), DType::kFloat32, {kRows});
  layer_norm::forward(arguments, context);
  EXPECT_EQ(output_, expected);
  EXPECT_EQ(rstd_, expected_rstd);
  EXPECT_EQ(mean_, expected_mean);
}

TEST_F(CCallTest, OptionsHaveTheOpsDefaultsAndSavedOutputsMayBeLeftOut) {
  ASSERT_EQ(call("rms_norm_forward", {x_given, output_given}), KP_OK) << kp_last_error();
  const std::vector<float> without = output_;
  ASSERT_EQ(call("rms_norm", {x_given, output_given, kp_number_argument("eps", 1e-6)}), KP_OK) << kp_last_error();
  EXPECT_EQ(output_, without);
}

// rope's second output is like its key: without a key there is none to give.
TEST_F(CCallTest, AnOutputLikeAnAbsentTensorIsLeftOut) {
  const int64_t sizes[] = {1, kRows, 1, kColumns}, table[] = {kRows, kColumns / 2};
  const kp_tensor query = {x_.data(), KP_FLOAT32, {KP_CPU, 0}, 4, sizes, nullptr};
  const kp_tensor turned = {output_.data(), KP_FLOAT32, {KP_CPU, 0}, 4, sizes, nullptr};
  std::vector<float> ones(kRows * kColumns / 2, 1.0f), zeros(ones.size());
  const kp_tensor cos = {ones.data(), KP_FLOAT32, {KP_CPU, 0}, 2, table, nullptr};
  const kp_tensor sin = {zeros.data(), KP_FLOAT32, {KP_CPU, 0}, 2, table, nullptr};
  ASSERT_EQ(call("rope", {kp_tensor_argument("query", &query), kp_tensor_argument("cos", &cos),
                          kp_tensor_argument("sin", &sin), kp_tensor_argument("rotated_query", &turned)}),
            KP_OK)
      << kp_last_error();
  EXPECT_EQ(output_, x_);
}

TEST_F(CCallTest, OneTensorIsAListOfOne) {
  float norm = 0;
  const kp_tensor result = {&norm, KP_FLOAT32, {KP_CPU, 0}, 0, nullptr, nullptr};
  ASSERT_EQ(call("reduce_norm", {kp_tensor_argument("tensors", &weight), kp_tensor_argument("output", &result)}), KP_OK)
      << kp_last_error();
  EXPECT_NEAR(norm, 2 * std::sqrt(static_cast<float>(kColumns)), 1e-4);
}

TEST_F(CCallTest, TakesStridesOnTheCallersMemory) {
  std::vector<float> wide(kRows * 2 * kColumns);
  for (int64_t i = 0; i < kRows * kColumns; ++i) {
    wide[static_cast<size_t>(i / kColumns * 2 * kColumns + i % kColumns)] = x_[static_cast<size_t>(i)];
  }
  ASSERT_EQ(call("rms_norm", {x_given, output_given}), KP_OK);
  const std::vector<float> dense = output_;
  const int64_t strides[] = {2 * kColumns, 1};
  kp_tensor strided = x;
  strided.data = wide.data();
  strided.strides = strides;
  ASSERT_EQ(call("rms_norm", {kp_tensor_argument("x", &strided), output_given}), KP_OK) << kp_last_error();
  EXPECT_EQ(output_, dense);
}

TEST_F(CCallTest, RefusesWithOpArgumentAndCure) {
  const auto has = [](const std::string& text, std::string_view word) { return text.find(word) != std::string::npos; };
  EXPECT_TRUE(has(refusal("rmsnorm", {x_given}), "did you mean rms_norm"));
  EXPECT_TRUE(has(refusal("rms_norm", {output_given}), "rms_norm: x is missing"));
  EXPECT_TRUE(has(refusal("rms_norm", {x_given}), "rms_norm: output is missing"));
  EXPECT_TRUE(has(refusal("rms_norm", {x_given, output_given, kp_number_argument("epsilon", 1)}), "it has: x, "));
  EXPECT_TRUE(has(refusal("rms_norm", {x_given, x_given, output_given}), "x is given twice"));
  EXPECT_TRUE(
      has(refusal("rms_norm", {x_given, output_given, kp_text_argument("eps", "1")}), "eps is given as a text"));
  EXPECT_TRUE(has(refusal("rms_norm", {x_given, output_given, kp_number_argument("eps", -1)}), "eps is -1"));
  EXPECT_TRUE(has(refusal("rms_norm", {x_given, kp_tensor_argument("output", &x)}), "shares memory with x"));
  EXPECT_TRUE(has(refusal("rms_norm", {x_given, kp_tensor_argument("output", &weight)}), "sizes [40]"));
  EXPECT_TRUE(has(refusal("rms_norm_forward", {x_given, output_given, kp_tensor_argument("sum", &output)}), "sum"));
  kp_tensor broken = x;
  broken.data = nullptr;
  EXPECT_TRUE(has(refusal("rms_norm", {kp_tensor_argument("x", &broken), output_given}), "data is NULL"));
  broken = x;
  broken.dtype = 77;
  EXPECT_TRUE(has(refusal("rms_norm", {kp_tensor_argument("x", &broken), output_given}), "dtype 77"));
  broken = x;
  broken.rank = 9;
  EXPECT_TRUE(has(refusal("rms_norm", {kp_tensor_argument("x", &broken), output_given}), "rank 9"));
  broken = x;
  broken.device = {KP_CUDA, 0};
  EXPECT_TRUE(has(refusal("rms_norm", {kp_tensor_argument("x", &broken), output_given}), "cuda:0"));
  broken = output;
  broken.dtype = KP_INT32;
  EXPECT_TRUE(has(refusal("rms_norm", {x_given, kp_tensor_argument("output", &broken)}), "int32"));
  EXPECT_TRUE(has(refusal("rms_norm", {{nullptr, KP_TENSOR, 0, {nullptr}}}), "no name"));
  EXPECT_TRUE(has(refusal(nullptr, {}), "NULL"));
}

// Whatever is declared later is held to the same.
TEST_F(CCallTest, EveryOpNamesWhatIsMissing) {
  for (const registry::Declaration& declaration : declarations()) {
    const std::string op(declaration.name);
    const std::string message = refusal(op.c_str(), {});
    EXPECT_TRUE(message.starts_with(op)) << message;
    EXPECT_NE(message.find("missing"), std::string::npos) << message;
  }
}

TEST(CContext, RefusesWhatIsNoDevice) {
  kp_context* context = nullptr;
  EXPECT_EQ(kp_context_create({7, 0}, nullptr, &context), KP_INVALID_ARGUMENT);
  EXPECT_EQ(kp_context_create({KP_CPU, 1}, nullptr, &context), KP_INVALID_ARGUMENT);
  EXPECT_EQ(kp_context_create({KP_CPU, 0}, &context, &context), KP_INVALID_ARGUMENT);
  EXPECT_EQ(context, nullptr);
  EXPECT_EQ(kp_context_create({KP_CPU, 0}, nullptr, nullptr), KP_INVALID_ARGUMENT);
  EXPECT_EQ(kp_call(nullptr, "rms_norm", nullptr, 0), KP_INVALID_ARGUMENT);
  kp_context_destroy(nullptr);
}

}  // namespace
}  // namespace kernel_pytorch::c_interface
