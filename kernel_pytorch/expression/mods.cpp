#include "kernel_pytorch/expression/mods.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <tuple>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/expression/compose.h"
#include "kernel_pytorch/expression/cuda_text.h"
#include "kernel_pytorch/expression/text.h"

namespace kernel_pytorch::expression {
namespace {

std::optional<Program> read(const std::string& text, Type type, std::string_view name, const char* op) {
  if (text.empty()) return std::nullopt;
  Program program = parse(text);
  KP_CHECK(program.results.size() == 1 && program.result_type() == type, op, ": ", name, " gives a ",
           name_of(program.result_type()), "; it must give one ", name_of(type));
  return program;
}

std::unique_ptr<const Mods> make_mods(const std::string& score_mod, const std::string& mask_mod, const char* op) {
  auto mods = std::make_unique<Mods>();
  mods->score_mod = read(score_mod, Type::kFloat, "score_mod", op);
  mods->mask_mod = read(mask_mod, Type::kBool, "mask_mod", op);
  const Program* score = mods->score_mod ? &*mods->score_mod : nullptr;
  const Program* mask = mods->mask_mod ? &*mods->mask_mod : nullptr;
  if (score == nullptr && mask == nullptr) return mods;
  if (score != nullptr) mods->score_mod_gradient = differentiate(*score);
  const std::vector<Capture>& captures = (score != nullptr ? score : mask)->captures;
  mods->masked_score = score != nullptr ? *score : unchanged_score(captures);
  if (mask != nullptr) mods->masked_score = masked(*mods->masked_score, *mask);
  const bool has_double = std::any_of(captures.begin(), captures.end(),
                                      [](const Capture& capture) { return capture.dtype == DType::kFloat64; });
  if (has_double) return mods;
  const Gradient* gradient = mods->score_mod_gradient ? &*mods->score_mod_gradient : nullptr;
  mods->cuda_forward = cuda_text({.score_mod = score, .mask_mod = mask});
  mods->cuda_backward = cuda_text({.score_mod = score, .mask_mod = mask, .score_mod_gradient = gradient});
  return mods;
}

}  // namespace

const Mods& mods_of(const std::string& score_mod, const std::string& mask_mod, const char* op) {
  using Known = std::map<std::tuple<std::string, std::string>, std::unique_ptr<const Mods>, std::less<>>;
  static std::shared_mutex mutex;
  static auto* known = new Known;
  {
    const std::shared_lock lock(mutex);
    if (const auto found = known->find(std::tie(score_mod, mask_mod)); found != known->end()) return *found->second;
  }
  std::unique_ptr<const Mods> made = make_mods(score_mod, mask_mod, op);
  const std::unique_lock lock(mutex);
  return *known->try_emplace(std::tuple(score_mod, mask_mod), std::move(made)).first->second;
}

}  // namespace kernel_pytorch::expression
