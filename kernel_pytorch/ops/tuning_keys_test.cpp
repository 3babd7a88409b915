// The tuning key of every op over random problems: its text and its hash tell the same problems apart, and problems
// that share a key are problems that may share a measurement.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/operations.h"
#include "kernel_pytorch/registry/any_problem.h"

namespace kernel_pytorch {
namespace {

using registry::AnyOperation;
using registry::AnyProblem;
using registry::ProblemRequest;

struct Described {
  std::string request;
  std::string text;
  uint64_t hash = 0;
  std::vector<std::string> names;                           // of the fields, in order
  std::string tensors;                                      // which tensors are present, and their types
  std::map<std::string, std::vector<std::string>> configs;  // of each kernel that supports the problem
};

// A list of tensors counts once: how long it is, the key says in buckets.
std::string kind_of_tensor(const registry::ProblemTensor& tensor) {
  std::string name = tensor.name;
  while (!name.empty() && name.back() >= '0' && name.back() <= '9') name.pop_back();
  return name + ":" + std::string(name_of(tensor.view.dtype));
}

Described describe(const AnyProblem& problem, std::string request) {
  Described described{.request = std::move(request)};
  tuning::KeyBuilder with_text(&described.text), without_text;
  problem.describe(with_text);
  problem.describe(without_text);
  EXPECT_EQ(with_text.hash(), without_text.hash());
  described.hash = without_text.hash();
  for (size_t begin = 0; begin < described.text.size();) {
    const size_t end = std::min(described.text.find(' ', begin), described.text.size());
    described.names.push_back(described.text.substr(begin, described.text.find('=', begin) - begin));
    begin = end + 1;
  }
  std::vector<std::string> kinds;
  for (const registry::ProblemTensor& tensor : problem.tensors()) {
    // Statistics that forward keeps for a backward: what is measured in training serves inference.
    const bool is_kept = tensor.role == registry::Role::kOutput && (tensor.name == "mean" || tensor.name == "rstd");
    if (!is_kept) kinds.push_back(kind_of_tensor(tensor));
  }
  std::ranges::sort(kinds);
  kinds.erase(std::unique(kinds.begin(), kinds.end()), kinds.end());
  for (const std::string& kind : kinds) described.tensors += kind + " ";
  for (int i = 0; i < problem.kernel_count(); ++i) {
    if (problem.supports(i)) described.configs[std::string(problem.kernel_name(i))] = problem.configs(i);
  }
  return described;
}

std::string words_of(const ProblemRequest& request) {
  std::string text = shape_text(request.shape) + " " + std::string(name_of(request.dtype));
  for (const auto& [name, value] : request.options) text += " " + name + "=" + value;
  return text;
}

// A random request: the shape and type of one of the op's own, some of its options, and options of others of them.
ProblemRequest mix(const std::vector<ProblemRequest>& own, std::mt19937& random) {
  const auto below = [&](size_t limit) { return static_cast<size_t>(random() % limit); };
  ProblemRequest request = own[below(own.size())];
  if (below(2) == 0) request.dtype = own[below(own.size())].dtype;
  for (size_t changes = below(4); changes > 0; --changes) {
    const auto& others = own[below(own.size())].options;
    if (others.empty()) continue;
    const auto& added = others[below(others.size())];
    std::erase_if(request.options, [&](const auto& option) { return option.first == added.first; });
    request.options.push_back(added);
  }
  if (!request.options.empty() && below(4) == 0) {
    request.options.erase(request.options.begin() + static_cast<std::ptrdiff_t>(below(request.options.size())));
  }
  if (!request.shape.empty() && below(3) == 0) request.shape[below(request.shape.size())] += 1;
  return request;
}

std::vector<Described> random_problems(const AnyOperation& operation) {
  const std::vector<ProblemRequest> own = operation.shapes();
  std::vector<Described> all;
  const auto add = [&](const ProblemRequest& request) {
    try {
      all.push_back(describe(*operation.make(request), words_of(request)));
    } catch (const Error&) {  // options that do not go together
    }
  };
  for (const ProblemRequest& request : own) add(request);
  EXPECT_EQ(all.size(), own.size());
  std::mt19937 random(1);
  for (int i = 0; i < 1500; ++i) add(mix(own, random));
  return all;
}

class TuningKeys : public testing::TestWithParam<const AnyOperation*> {};

TEST_P(TuningKeys, TellProblemsApart) {
  const std::vector<Described> all = random_problems(*GetParam());
  ASSERT_GT(all.size(), 100u);
  std::map<std::string, const Described*> by_text;
  std::map<uint64_t, const Described*> by_hash;
  for (const Described& one : all) {
    ASSERT_EQ(one.names, all[0].names) << one.request << ": an op adds the same fields for each problem";
    const Described& same_text = *by_text.try_emplace(one.text, &one).first->second;
    const Described& same_hash = *by_hash.try_emplace(one.hash, &one).first->second;
    EXPECT_EQ(one.hash, same_text.hash) << one.text;
    EXPECT_EQ(one.text, same_hash.text) << one.hash;
    EXPECT_EQ(one.tensors, same_text.tensors)
        << one.request << " and " << same_text.request << " share the key " << one.text;
    for (const auto& [kernel, configs] : one.configs) {
      const auto other = same_text.configs.find(kernel);
      if (other == same_text.configs.end()) continue;  // its alignment, say: `supports` is asked at every call
      EXPECT_EQ(configs, other->second) << kernel << ": " << one.request << " and " << same_text.request;
    }
    if (HasFailure()) return;
  }
}

std::vector<const AnyOperation*> every_operation() {
  std::vector<const AnyOperation*> all;
  for (const AnyOperation& operation : operations()) all.push_back(&operation);
  return all;
}

INSTANTIATE_TEST_SUITE_P(Every, TuningKeys, testing::ValuesIn(every_operation()),
                         [](const auto& info) { return std::string(info.param->name); });

// The two problems that shared a hash while only values were hashed and fields of usual types were left out.
TEST(TuningKey, NamesAreHashed) {
  const AnyOperation* norm = find_operation("rms_norm_forward");
  ASSERT_NE(norm, nullptr);
  const auto of = [&](std::vector<std::pair<std::string, std::string>> options) {
    const ProblemRequest request{.shape = {4, 64}, .dtype = DType::kFloat32, .device = {}, .options = options};
    return describe(*norm->make(request), words_of(request));
  };
  const Described narrow_output = of({{"residual", "1"}, {"output_dtype", "bf16"}});
  const Described narrow_residual = of({{"residual", "1"}, {"residual_dtype", "bf16"}});
  EXPECT_NE(narrow_output.hash, narrow_residual.hash);
  EXPECT_NE(narrow_output.text, narrow_residual.text);
}

TEST(TuningKey, KindsOfValuesAreToldApart) {
  const auto hash_of = [](auto name, auto value) {
    tuning::KeyBuilder key;
    key.field(name, value);
    return key.hash();
  };
  constexpr tuning::FieldName kFirst = "first", kSecond = "second";
  std::vector<uint64_t> hashes = {hash_of(kFirst, TensorView{}), hash_of(kSecond, TensorView{})};
  for (int64_t i = 0; i < 16; ++i) {
    for (tuning::FieldName name : {kFirst, kSecond}) {
      hashes.push_back(hash_of(name, i));
      hashes.push_back(hash_of(name, static_cast<DType>(i)));
    }
  }
  std::ranges::sort(hashes);
  EXPECT_EQ(std::ranges::adjacent_find(hashes), hashes.end());
}

}  // namespace
}  // namespace kernel_pytorch
