#include "kernel_pytorch/registry/slow_path.h"

#include <unistd.h>

#include <optional>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/log.h"
#include "kernel_pytorch/base/version.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/device/rehearsal.h"
#include "kernel_pytorch/registry/append_only_list.h"
#include "kernel_pytorch/registry/decision_cache.h"
#include "kernel_pytorch/registry/explain.h"
#include "kernel_pytorch/registry/tune.h"
#include "kernel_pytorch/tuning/autotune_scope.h"

namespace kernel_pytorch::registry {
namespace {

using tuning::Key;
using tuning::Tier;

constinit DecisionCache decision_cache;

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) {
    if (!text.empty()) text += ", ";
    text += word.empty() ? "\"\"" : word;
  }
  return text;
}

std::vector<std::string> kernel_names(const AnyProblem& problem) {
  std::vector<std::string> names;
  for (int i = 0; i < problem.kernel_count(); ++i) names.emplace_back(problem.kernel_name(i));
  return names;
}

int find_kernel(const AnyProblem& problem, std::string_view name) {
  for (int i = 0; i < problem.kernel_count(); ++i) {
    if (problem.kernel_name(i) == name) return i;
  }
  return -1;
}

int find_config(const AnyProblem& problem, int kernel, std::string_view config) {
  const std::vector<std::string> texts = problem.configs(kernel);
  for (size_t i = 0; i < texts.size(); ++i) {
    if (texts[i] == config) return static_cast<int>(i);
  }
  return -1;
}

// What a person named (an override, an overlay) must exist. `who` begins the message.
Selected resolve_named(const AnyProblem& problem, std::string_view who, std::string_view name, std::string_view config,
                       Tier tier) {
  const int kernel = find_kernel(problem, name);
  KP_CHECK(kernel >= 0, problem.op(), ": ", who, " names the kernel \"", name,
           "\"; this op has: ", join(kernel_names(problem)));
  if (!problem.supports(kernel)) return {kernel, 0, tier};
  if (config.empty()) return {kernel, problem.heuristic(kernel), tier};
  const int index = find_config(problem, kernel, config);
  KP_CHECK(index >= 0, problem.op(), ": ", who, " names the config \"", config, "\" of ", name,
           "; its configs here are: ", join(problem.configs(kernel)));
  return {kernel, index, tier};
}

Selected by_override(const AnyProblem& problem, std::string_view text) {
  const size_t space = text.find(' ');
  const std::string_view name = text.substr(0, space);
  const std::string_view config = space == std::string_view::npos ? std::string_view() : text.substr(space + 1);
  const Selected selected = resolve_named(problem, "the override", name, config, Tier::kOverride);
  const Support support = problem.supports(selected.kernel);
  if (!support) {
    fail(ErrorCode::kUnsupported, problem.op(), ": the override asks for ", name,
         ", which cannot take this problem: ", support.reason(), "; leave the override out or name another kernel");
  }
  return selected;
}

// A kernel that cannot take this very problem (its alignment, say) is passed over; others of the same key may still
// want it, so `is_final` turns false: this outcome does not speak for them.
std::optional<Selected> by_overlay(const AnyProblem& problem, const Key& key, bool& is_final) {
  const auto entry = tuning::find_overlay(problem.op(), key);
  if (!entry) return std::nullopt;
  const Selected selected = resolve_named(problem, "an overlay", entry->kernel, entry->config, Tier::kOverlay);
  const Support support = problem.supports(selected.kernel);
  if (support) return selected;
  KP_LOG(kDebug, problem.op(), ": overlay's ", entry->kernel, " passed over: ", support.reason());
  is_final = false;
  return std::nullopt;
}

std::optional<Selected> by_measurement(const AnyProblem& problem, const Key& key, bool& is_final) {
  const auto remembered = tuning::find_measured(key);
  if (!remembered) return std::nullopt;
  const tuning::Measurement& measurement = remembered->measurement;
  const int kernel = find_kernel(problem, measurement.kernel);
  if (kernel < 0) {
    KP_LOG(kDebug, problem.op(), ": remembered kernel ", measurement.kernel, " does not exist");
    return std::nullopt;
  }
  if (const Support support = problem.supports(kernel); !support) {
    KP_LOG(kDebug, problem.op(), ": remembered kernel ", measurement.kernel, " passed over: ", support.reason());
    is_final = false;
    return std::nullopt;
  }
  const int config = find_config(problem, kernel, measurement.config);
  if (config < 0) {
    KP_LOG(kDebug, problem.op(), ": remembered config \"", measurement.config, "\" of ", measurement.kernel,
           " does not exist");
    return std::nullopt;
  }
  return Selected{kernel, config, remembered->tier};
}

Selected by_heuristic(const AnyProblem& problem) {
  for (int i = 0; i < problem.kernel_count(); ++i) {
    if (problem.supports(i)) return {i, problem.heuristic(i), Tier::kHeuristic};
  }
  return {};
}

[[noreturn]] void fail_unsupported(const AnyProblem& problem) {
  std::string reasons;
  for (int i = 0; i < problem.kernel_count(); ++i) {
    reasons += concat(i == 0 ? " " : "; ", problem.kernel_name(i), ": ", problem.supports(i).reason());
  }
  fail(ErrorCode::kUnsupported, problem.op(), ": no kernel takes this problem (", make_key(problem).problem, ") on ",
       problem.device().device, ":", reasons);
}

// One tuning at a time in a process, since two would time each other; a call that finds another at it goes on by
// heuristic. Holds a process id and not a lock, so that a child forked meanwhile can tune.
class TuningTurn {
 public:
  TuningTurn() {
    pid_t holder = tuner.load();
    is_mine_ = holder != getpid() && tuner.compare_exchange_strong(holder, getpid());
  }
  ~TuningTurn() {
    if (is_mine_) tuner.store(0);
  }
  TuningTurn(const TuningTurn&) = delete;
  TuningTurn& operator=(const TuningTurn&) = delete;
  explicit operator bool() const { return is_mine_; }

 private:
  static inline std::atomic<pid_t> tuner{0};
  bool is_mine_ = false;
};

// `is_final` as above: false where a later call should look again.
std::optional<Selected> by_autotuning(const AnyProblem& problem, const Key& key, const Context& context,
                                      bool& is_final) {
  if (!tuning::autotune_enabled() || candidate_count(problem) < 2) return std::nullopt;
  const bool is_capturing = problem.device().is_cuda() && cuda_device::is_capturing(context.stream);
  const TuningTurn turn;
  if (is_capturing || !turn) {
    is_final = false;
    return std::nullopt;
  }
  std::optional<tuning::TuningClaim> claim = tuning::claim_tuning(key);
  if (!claim) return std::nullopt;
  KP_LOG(kInfo, problem.op(), ": measuring ", key.problem, " on ", problem.device().device);
  try {
    const tuning::TuneReport report = tune(problem, context, claim->options());
    claim->finish(report);
    if (!report.rows.empty() && report.rows[0].failure.empty()) {
      KP_LOG(kInfo, problem.op(), ": ", report.rows[0].kernel, " ", report.rows[0].config, " takes ",
             report.rows[0].median_us, " us, the best of ", report.rows.size(), " in ", report.seconds, " s");
    }
  } catch (const std::exception& error) {  // the call itself may well succeed; tuning it is a wish
    KP_LOG(kWarning, problem.op(), ": autotuning failed (", error.what(), "); the heuristic decides");
    claim->fail(concat("measuring it failed: ", error.what()));
  }
  if (!claim->options().remembers) return std::nullopt;
  auto selected = by_measurement(problem, key, is_final);
  if (!selected) return std::nullopt;
  selected->tier = Tier::kAutotune;
  is_final = false;
  return selected;
}

Selected decide(const AnyProblem& problem, const Key& key, const Context& context, bool& is_final) {
  if (const auto selected = by_overlay(problem, key, is_final)) return *selected;
  if (const auto selected = by_measurement(problem, key, is_final)) return *selected;
  if (const auto selected = by_autotuning(problem, key, context, is_final)) return *selected;
  return by_heuristic(problem);
}

void record(const AnyProblem& problem, const Key& key, const Selected& selected) {
  const std::vector<std::string> texts = problem.configs(selected.kernel);
  const bool is_listed = selected.config >= 0 && selected.config < static_cast<int>(texts.size());
  const Cost cost = problem.cost();
  tuning::record({.key = key,
                  .kernel = std::string(problem.kernel_name(selected.kernel)),
                  .config = is_listed ? texts[selected.config] : "",
                  .tier = selected.tier,
                  .candidates = candidate_count(problem),
                  .bytes = cost.bytes,
                  .flops = cost.flops});
}

uint64_t hash_call(const AnyProblem& problem) {
  tuning::KeyBuilder builder;
  problem.describe(builder);
  HashMixer mixer;
  mixer.add(problem.op_identity());
  mixer.add(problem.device().fingerprint_hash);
  mixer.add(builder.hash());
  mixer.add(tuning::selection_generation());
  return mixer.value();
}

// What was resolved for the problem's bucket, unless this very problem (its alignment, say) is not supported.
std::optional<Selected> find_resolved(const AnyProblem& problem, uint64_t call) {
  const auto known = decision_cache.find(call);
  if (!known) return std::nullopt;
  if (known->tier != Tier::kHeuristic && known->kernel < problem.kernel_count() && problem.supports(known->kernel)) {
    return known;
  }
  const Selected selected = by_heuristic(problem);
  if (selected.kernel < 0) return std::nullopt;
  return selected;
}

struct KernelSet {
  uint64_t op = 0;
  std::string hash;
};
constinit AppendOnlyList<KernelSet> kernel_sets;

const std::string& kernel_set_of(const AnyProblem& problem) {
  const uint64_t op = problem.op_identity();
  if (const KernelSet* known = kernel_sets.find([&](const KernelSet& set) { return set.op == op; })) return known->hash;
  Fnv128 hash;
  for (int i = 0; i < problem.kernel_count(); ++i) {
    const uint64_t source_hash = problem.kernel_source_hash(i);
    hash.add_part(problem.kernel_name(i)).add_number(source_hash).add_part(source_hash == 0 ? kVersion : "");
  }
  return kernel_sets.add({op, hash.hex()}).hash;
}

}  // namespace

Key make_key(const AnyProblem& problem) {
  std::string text;
  tuning::KeyBuilder builder(&text);
  problem.describe(builder);
  return {problem.device().fingerprint, std::string(problem.op()), kernel_set_of(problem), std::move(text)};
}

Selected select(const AnyProblem& problem, Context& context) {
  Selected selected;
  const bool is_recording = tuning::recording();
  if (Rehearsal::is_running()) Explaining::add(problem, context.kernel_override);
  if (!context.kernel_override.empty()) {
    selected = by_override(problem, context.kernel_override);
    if (is_recording) record(problem, make_key(problem), selected);
    return selected;
  }
  const uint64_t call = hash_call(problem);
  if (!is_recording) {
    if (const auto known = find_resolved(problem, call)) return *known;
  }
  const Key key = make_key(problem);
  bool is_final = true;
  selected = decide(problem, key, context, is_final);
  if (selected.kernel < 0) fail_unsupported(problem);
  if (is_final) decision_cache.keep(call, selected);
  if (is_recording) record(problem, key, selected);
  return selected;
}

Selected preview(const AnyProblem& problem, std::string_view kernel_override) {
  if (!kernel_override.empty()) return by_override(problem, kernel_override);
  const Key key = make_key(problem);
  bool is_final = true;
  if (const auto selected = by_overlay(problem, key, is_final)) return *selected;
  if (const auto selected = by_measurement(problem, key, is_final)) return *selected;
  return by_heuristic(problem);
}

}  // namespace kernel_pytorch::registry
