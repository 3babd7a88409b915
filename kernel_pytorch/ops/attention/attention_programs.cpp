#include "kernel_pytorch/ops/attention/attention_programs.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/expression/text.h"

namespace kernel_pytorch::attention {
namespace {

constexpr size_t kMostKept = 1024;  // a process with more makes them in a loop: begin again

std::shared_ptr<const Programs> make_programs(const Scoring& scoring) {
  auto made = std::make_shared<Programs>();
  if (!scoring.score_mod.empty()) {
    made->score = expression::parse(scoring.score_mod);
    KP_CHECK(made->score.results.size() == 1 && made->score.result_type() == expression::Type::kFloat,
             "attention: score_mod returns ", made->score.results.size(), " values, the first a ",
             expression::name_of(made->score.result_type()), "; it must return one float, the new score");
    made->score_gradient = expression::differentiate(made->score);
  }
  if (!scoring.mask_mod.empty()) {
    made->mask = expression::parse(scoring.mask_mod);
    KP_CHECK(made->mask.results.size() == 1 && made->mask.result_type() == expression::Type::kBool,
             "attention: mask_mod returns ", made->mask.results.size(), " values, the first a ",
             expression::name_of(made->mask.result_type()), "; it must return one bool, true where a key is kept");
    const bool reads_score = std::ranges::any_of(
        made->mask.nodes, [](const expression::Node& node) { return node.op == expression::Op::kScore; });
    KP_CHECK(!reads_score, "attention: mask_mod reads the score; it decides by batch, head, query and key alone");
  }
  return made;
}

}  // namespace

std::shared_ptr<const Programs> programs_of(const Scoring& scoring) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<std::string, std::shared_ptr<const Programs>>();
  std::string key = scoring.score_mod;
  key.push_back('\0');
  key += scoring.mask_mod;
  const std::lock_guard lock(mutex);
  if (const auto found = known->find(key); found != known->end()) return found->second;
  std::shared_ptr<const Programs> made = make_programs(scoring);
  if (known->size() >= kMostKept) known->clear();
  known->emplace(std::move(key), made);
  return made;
}

}  // namespace kernel_pytorch::attention
