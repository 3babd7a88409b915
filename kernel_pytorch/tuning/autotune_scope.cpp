// What a scope spent and found is guarded by the lock of selection_state.h, its callbacks by a lock of their own: a
// callback may call back into the library, even to pop its own scope, and pop waits for no more than a running
// callback.
#include "kernel_pytorch/tuning/autotune_scope.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <set>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/tuning/selection_state.h"

namespace kernel_pytorch::tuning {
namespace {

using Clock = std::chrono::steady_clock;
constexpr double kLeastSeconds = 0.01;  // with less left nothing is begun
constexpr double kLeastGain = 1.02;
constexpr int kLeastSamples = 3;  // of which a median tells more than chance

}  // namespace

class AutotuneScope {
 public:
  AutotuneScope(int64_t handle, ScopeOptions options) : handle_(handle), options_(std::move(options)) {}

  int64_t handle() const { return handle_; }
  bool remembers() const { return options_.remembers; }

  // The three below: with the state's lock held.
  double claim(const Key& key) {
    const double asked = asked_seconds(key);
    if (asked <= 0 || !seen_.insert(key).second) return 0;
    const double left = options_.budget_seconds - report_.seconds;
    if (left < kLeastSeconds || is_interrupted_) {
      report_.untuned.push_back({key, is_interrupted_ ? "interrupted before it was measured"
                                                      : concat("the budget of ", options_.budget_seconds,
                                                               " s was spent before it was measured")});
      return 0;
    }
    return std::min(asked, left);
  }
  void finish(const Key& key, std::optional<TunedProblem> tuned, std::string reason, double seconds) {
    report_.seconds += seconds;
    if (tuned) {
      tuned->seconds = seconds;
      report_.tuned.push_back(*std::move(tuned));
    } else {
      report_.untuned.push_back({key, std::move(reason)});
    }
  }
  ScopeProgress begin_progress(const Key& key) const {
    return {key, static_cast<int>(report_.tuned.size()), report_.seconds, options_.budget_seconds, {}};
  }

  bool interrupted() {
    const std::lock_guard lock(callbacks_);
    if (is_closed_ || (options_.interrupted && options_.interrupted())) is_interrupted_ = true;
    return is_interrupted_;
  }
  void tell(const ScopeProgress& progress) {
    const std::lock_guard lock(callbacks_);
    if (!is_closed_ && options_.progress) options_.progress(progress);
  }
  void close() {
    const std::lock_guard lock(callbacks_);
    is_closed_ = true;
  }
  const ScopeReport& report() const { return report_; }

 private:
  double asked_seconds(const Key& key) const {
    if (options_.only.empty()) return options_.problem_seconds;
    for (const ScopedProblem& one : options_.only) {
      if (one.op == key.op && one.problem == key.problem) return one.seconds;
    }
    return 0;
  }

  const int64_t handle_;
  const ScopeOptions options_;
  std::set<Key> seen_;
  ScopeReport report_;
  std::atomic<bool> is_interrupted_{false};
  std::recursive_mutex callbacks_;
  bool is_closed_ = false;
};

bool TunedProblem::gains() const {
  return std::min(before.samples, after.samples) >= kLeastSamples && before.median_us >= after.median_us * kLeastGain &&
         before.median_us - before.spread_us > after.median_us + after.spread_us;
}

int64_t push_autotune(ScopeOptions options) {
  KP_CHECK(options.budget_seconds >= 0 && options.problem_seconds >= 0, "tuning: a budget is ", options.budget_seconds,
           " s, ", options.problem_seconds, " s for one problem; neither may be negative");
  SelectionState& state = selection_state();
  const std::unique_lock lock(state.mutex);
  const int64_t handle = state.next_handle++;
  state.autotune_scopes.push_back(std::make_shared<AutotuneScope>(handle, std::move(options)));
  state.publish();
  return handle;
}

ScopeReport pop_autotune(int64_t handle) {
  SelectionState& state = selection_state();
  std::shared_ptr<AutotuneScope> scope;
  {
    const std::unique_lock lock(state.mutex);
    const auto found = std::find_if(state.autotune_scopes.begin(), state.autotune_scopes.end(),
                                    [&](const auto& one) { return one->handle() == handle; });
    KP_CHECK(found != state.autotune_scopes.end(), "tuning: no autotune scope has the handle ", handle,
             "; pop each pushed scope once");
    scope = std::move(*found);
    state.autotune_scopes.erase(found);
    state.publish();
  }
  scope->close();
  const std::shared_lock lock(state.mutex);
  return scope->report();
}

TuningClaim::TuningClaim(std::shared_ptr<AutotuneScope> scope, Key key, TuneOptions options)
    : scope_(std::move(scope)), key_(std::move(key)), options_(std::move(options)), start_(Clock::now()) {}

TuningClaim::~TuningClaim() {
  if (scope_ == nullptr) return;  // moved from
  const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  const std::unique_lock lock(selection_state().mutex);
  scope_->finish(key_, std::move(tuned_), std::move(reason_), seconds);
}

void TuningClaim::finish(const TuneReport& report) {
  const auto is_right = [](const TuneRow& row) { return row.failure.empty(); };
  if (report.rows.empty() || !is_right(report.rows.front())) {
    reason_ = report.rows.empty() ? concat("nothing could be measured in ", options_.budget_seconds, " s")
                                  : concat("no candidate was right: ", report.rows.front().failure);
    return;
  }
  const auto measured = std::count_if(report.rows.begin(), report.rows.end(), is_right);
  tuned_ = {.key = key_,
            .before = report.first,
            .after = report.rows.front(),
            .candidates = report.candidates,
            .measured = static_cast<int>(measured),
            .complete = report.complete};
}

std::optional<TuningClaim> claim_tuning(const Key& key) {
  SelectionState& state = selection_state();
  std::shared_ptr<AutotuneScope> scope;
  TuneOptions options;
  ScopeProgress progress;
  {
    const std::unique_lock lock(state.mutex);
    if (!state.autotune_scopes.empty()) {
      scope = state.autotune_scopes.back();
    } else if (state.autotune_option) {
      if (state.option_scope == nullptr) state.option_scope = std::make_shared<AutotuneScope>(0, ScopeOptions{});
      scope = state.option_scope;
    } else {
      return std::nullopt;
    }
    options.budget_seconds = scope->claim(key);
    if (options.budget_seconds <= 0) return std::nullopt;
    progress = scope->begin_progress(key);
  }
  options.remembers = scope->remembers();
  options.interrupted = [scope] { return scope->interrupted(); };
  const auto start = Clock::now();
  options.progress = [scope, progress, start](const TuneProgress& now) {
    ScopeProgress snapshot = progress;
    snapshot.seconds += std::chrono::duration<double>(Clock::now() - start).count();
    snapshot.problem = now;
    scope->tell(snapshot);
  };
  return TuningClaim(std::move(scope), key, std::move(options));
}

}  // namespace kernel_pytorch::tuning
