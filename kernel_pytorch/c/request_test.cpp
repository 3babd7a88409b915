// The requests of the C interface: limits, unknown fields, every kind of wrong value, and the words that people type.
#include "kernel_pytorch/c/request.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>

#include <gtest/gtest.h>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/c/kernel_pytorch.h"
#include "kernel_pytorch/c/plans/request.h"

namespace kernel_pytorch::c_interface {
namespace {

template <class Work>
std::string message_of(const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.message();
  }
  return "";
}

std::string refusal_of(const std::string& request) {
  return message_of([&] {
    const Json json = parse_request(request);
    FieldReader fields(json, "test");
    read_operation(fields);
    fields.finish();
  });
}

TEST(Request, EmptyTextIsAnEmptyObject) {
  EXPECT_EQ(parse_request(""), Json::object());
}

TEST(Request, SizeAndDepthAreLimited) {
  const std::string long_text = "\"" + std::string(kMaxRequestBytes, 'a') + "\"";
  EXPECT_NE(message_of([&] { parse_request(long_text); }).find("bytes"), std::string::npos);
  const auto nested = [](int depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_EQ(message_of([&] { parse_request(nested(kMaxRequestDepth)); }), "");
  EXPECT_NE(message_of([&] { parse_request(nested(kMaxRequestDepth + 2)); }).find("deeper"), std::string::npos);
  EXPECT_NE(message_of([&] { parse_request(std::string(500'000, '[')); }).find("deeper"), std::string::npos);
}

TEST(Request, EveryTruncationIsRefused) {
  const std::string whole =
      R"({"op": "rms_norm_forward", "shape": [8, 64], "options": {"residual": 1, "weight": "0"}})";
  EXPECT_EQ(refusal_of(whole), "");
  for (size_t length = 1; length < whole.size(); ++length) {
    EXPECT_NE(refusal_of(whole.substr(0, length)), "") << whole.substr(0, length);
  }
}

TEST(Request, WrongValuesNameTheField) {
  const std::pair<const char*, const char*> cases[] = {
      {R"([])", "object"},
      {R"({"shape": [8]})", "\"op\" is missing"},
      {R"({"op": 5, "shape": [8]})", "\"op\" must be a string"},
      {R"({"op": "rms_norm_forward"})", "\"shape\" is missing"},
      {R"({"op": "rms_norm_forward", "shape": "8x8"})", "array"},
      {R"({"op": "rms_norm_forward", "shape": [-1]})", "-1"},
      {R"({"op": "rms_norm_forward", "shape": [1e3]})", "whole numbers"},
      {R"({"op": "rms_norm_forward", "shape": [18446744073709551615]})", "2^63"},
      {R"({"op": "rms_norm_forward", "shape": [99999999999, 99999999999]})", "63 bits"},
      {R"({"op": "rms_norm_forward", "shape": [1,1,1,1,1,1,1,1,1]})", "9 dimensions"},
      {R"({"op": "rms_norm_forward", "shape": [8], "dtype": "fp7"})", "fp7"},
      {R"({"op": "rms_norm_forward", "shape": [8], "device": "gpu"})", "gpu"},
      {R"({"op": "rms_norm_forward", "shape": [8], "options": []})", "options"},
      {R"({"op": "rms_norm_forward", "shape": [8], "options": {"a": []}})", "\"a\""},
      {R"({"op": "rms_norm_forward", "shape": [8], "sahpe": 1})", "unknown field \"sahpe\"; known: device, dtype"},
      {R"({"op": "rms\u0000", "shape": [8]})", "zero byte"},
  };
  for (const auto& [request, wanted] : cases) {
    EXPECT_NE(refusal_of(request).find(wanted), std::string::npos) << request << ": " << refusal_of(request);
  }
}

TEST(Request, OptionsBecomeWords) {
  const Json json = parse_request(R"({"shape": [], "options": {"a": true, "b": false, "c": 3, "d": 0.5, "e": "x"}})");
  FieldReader fields(json, "test");
  const registry::ProblemRequest problem = read_problem(fields);
  const std::vector<std::pair<std::string, std::string>> wanted = {
      {"a", "1"}, {"b", "0"}, {"c", "3"}, {"d", "0.5"}, {"e", "x"}};
  EXPECT_EQ(problem.options, wanted);
  EXPECT_EQ(problem.dtype, DType::kFloat32);
  EXPECT_EQ(problem.device, Device{});
  EXPECT_TRUE(problem.shape.empty());
}

TEST(Request, OverlaysNameKernelsThatExist) {
  const auto entries = read_overlay(parse_request(
      R"({"entries": [{"op": "rms_norm_forward", "kernel": "reference", "config": "a=1", "problem": "rows=1"}]})"));
  ASSERT_EQ(entries.size(), 1u);
  EXPECT_EQ(entries[0].op, "rms_norm_forward");
  EXPECT_EQ(entries[0].kernel, "reference");
  EXPECT_EQ(entries[0].config, "a=1");
  EXPECT_EQ(entries[0].problem, "rows=1");
  const auto refused = message_of(
      [] { read_overlay(parse_request(R"({"entries": [{"op": "rms_norm_forward", "kernel": "magic"}]})")); });
  EXPECT_NE(refused.find("reference"), std::string::npos) << refused;
}

TEST(Request, AutotuneScopesAreReadOrRefused) {
  const tuning::ScopeOptions usual = read_autotune(parse_request("{}"));
  EXPECT_TRUE(std::isinf(usual.budget_seconds));
  EXPECT_TRUE(usual.remembers && usual.only.empty());
  const tuning::ScopeOptions asked = read_autotune(parse_request(
      R"({"budget_seconds": 2, "remembers": false, "only": [{"op": "rms_norm_forward", "problem": "a=1", "seconds": 1}]})"));
  EXPECT_EQ(asked.budget_seconds, 2);
  EXPECT_FALSE(asked.remembers);
  ASSERT_EQ(asked.only.size(), 1u);
  EXPECT_EQ(asked.only[0].seconds, 1);
  const std::pair<const char*, const char*> wrong[] = {
      {R"({"budget_seconds": -1})", "budget_seconds"},
      {R"({"budget_seconds": "1"})", "budget_seconds"},
      {R"({"only": []})", "one problem or more"},
      {R"({"only": [{"op": "rms_nrom_forward", "problem": ""}]})", "rms_norm_forward"},
      {R"({"only": [{"op": "rms_norm_forward"}]})", "\"problem\" is missing"},
      {R"({"seconds": 1})", "unknown field \"seconds\""},
  };
  for (const auto& [request, wanted] : wrong) {
    const std::string refusal = message_of([&] { read_autotune(parse_request(request)); });
    EXPECT_NE(refusal.find(wanted), std::string::npos) << request << ": " << refusal;
  }
}

// What the fuzzer (request_fuzz.cpp) found worth keeping, against the ops of the library.
TEST(Request, TheFuzzersCorpusIsReadOrRefused) {
  int files = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(KP_SOURCE_DIR) + "/tests/fuzz_corpus/request")) {
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    refusal_of(text);
    message_of([&] { read_overlay(parse_request(text)); });
    message_of([&] { read_directories(parse_request(text)); });
    message_of([&] { read_clear(parse_request(text)); });
    message_of([&] { read_autotune(parse_request(text)); });
    for (const auto answer :
         {answer_graph_plan, answer_memory_plan, answer_activation_plan, answer_batch_plan, answer_offload_plan,
          answer_precision_plan, answer_context_parallel_plan, answer_model_plan, answer_tuning_plan,
          answer_budget_plan, answer_part_verdict, answer_whole_verdict}) {
      message_of([&] { to_text(answer(parse_request(text))); });
    }
    if (text.find("cuda") == std::string::npos) {  // a device that is not there is not the request's mistake
      message_of([&] { to_text(answer_bucket_plan(parse_request(text))); });
    }
    message_of([&] { shape_from(text); });
    message_of([&] { matching_operations(text); });
    ++files;
  }
  EXPECT_GE(files, 6);
}

TEST(Names, ShapesRoundTrip) {
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{0}, {1}, {1024, 4096}, {2, 3, 4, 5, 6, 7, 8, 9}, {int64_t{1} << 59}}) {
    EXPECT_EQ(shape_from(request_shape_text(shape)), shape);
  }
  for (const char* wrong : {"", "x", "8x", "x8", "8xx8", "8 x 8", "8,8", "0x", "-1", "1.5", "99999999999999999999",
                            "1x1x1x1x1x1x1x1x1", "9223372036854775807"}) {
    EXPECT_NE(message_of([&] { shape_from(wrong); }), "") << wrong;
  }
}

TEST(Names, NearestNameFindsMisspellings) {
  const std::vector<std::string> known = {"rms_norm", "layer_norm", "attention"};
  EXPECT_EQ(nearest_name("rms_nrom", known), "rms_norm");
  EXPECT_EQ(nearest_name("layernorm", known), "layer_norm");
  EXPECT_EQ(nearest_name("atention", known), "attention");
  EXPECT_EQ(nearest_name("conv2d_forward", known), "");
  EXPECT_EQ(nearest_name(std::string(100'000, 'a'), known), "");
}

TEST(Names, OpsMatchUpToAnUnderscore) {
  EXPECT_EQ(matching_operations("rms_norm").size(), 2u);
  EXPECT_EQ(matching_operations("rms_norm_forward").size(), 1u);
  EXPECT_EQ(matching_operations("").size(), operation_names().size());
  EXPECT_NE(message_of([] { matching_operations("rms_nor"); }), "");
  EXPECT_EQ(one_operation("layer_norm_backward").name, "layer_norm_backward");
  EXPECT_NE(message_of([] { one_operation("layer_norm"); }).find("say which"), std::string::npos);
}

TEST(CInterface, ErrorsBelongToTheirThreadAndKeepWholeCharacters) {
  char* result = nullptr;
  EXPECT_EQ(kp_kernels(("{\"op\": \"" + std::string(3000, 'x') + "\"}").c_str(), &result), KP_INVALID_ARGUMENT);
  EXPECT_EQ(result, nullptr);
  EXPECT_NE(std::string(kp_last_error()).find("unknown op"), std::string::npos);
  std::string many = R"({"op": "rms_norm_forward", "shape": [8], ")";
  for (int i = 0; i < 4000; ++i) many += "\u00e4";
  EXPECT_EQ(kp_explain((many + "\": 1}").c_str(), &result), KP_INVALID_ARGUMENT);
  const std::string message = kp_last_error();
  EXPECT_LT(message.size(), 4096u);
  EXPECT_GT(message.size(), 4000u);
  EXPECT_NO_THROW(Json(message).dump());  // dump throws on a character cut in two
}

}  // namespace
}  // namespace kernel_pytorch::c_interface
