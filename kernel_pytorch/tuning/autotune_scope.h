// Scopes inside which a call tunes a problem that was never measured: how long all of that may take, for which
// problems, the progress function, whether results are stored, and the report. Process-wide; of nested scopes the
// newest is in charge.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/tuning/autotuner.h"
#include "kernel_pytorch/tuning/key.h"

namespace kernel_pytorch::tuning {

struct ScopedProblem {
  std::string op;
  std::string problem;  // the key's text
  double seconds = 10;
};

struct ScopeProgress {
  Key key;
  int problems_done = 0;  // before this one
  double seconds = 0;     // spent in the scope so far
  double budget_seconds = 0;
  TuneProgress problem;
};

struct ScopeOptions {
  double budget_seconds = std::numeric_limits<double>::infinity();  // of all problems; then the heuristic decides
  double problem_seconds = 10;                                      // of one
  std::vector<ScopedProblem> only;                                  // empty: every problem
  // False: calls go on as they would have, and what was found is in the report alone.
  bool remembers = true;
  // Called by whichever thread tunes, one at a time, and not after the scope was popped. Either may be empty.
  std::function<void(const ScopeProgress&)> progress;
  std::function<bool()> interrupted;  // true: the scope tunes no more
};

struct TunedProblem {
  Key key;
  TuneRow before;  // what would run untuned; median 0 where it could not be measured
  TuneRow after;   // the fastest
  int candidates = 0;
  int measured = 0;
  bool complete = false;
  double seconds = 0;
  // Faster by more than both spreads, and by enough to be worth another choice.
  KP_EXPORT bool gains() const;
};

struct UntunedProblem {
  Key key;
  std::string reason;
};

struct ScopeReport {
  std::vector<TunedProblem> tuned;
  std::vector<UntunedProblem> untuned;  // that were asked for and not measured, and why
  double seconds = 0;
};

// Returns a handle for pop; pops may come in any order.
KP_EXPORT int64_t push_autotune(ScopeOptions options = {});
KP_EXPORT ScopeReport pop_autotune(int64_t handle);

class AutotuneScope;

// The right to tune one problem: given once for each problem of a scope. Charges the scope for its own lifetime.
class KP_EXPORT TuningClaim {
 public:
  TuningClaim(std::shared_ptr<AutotuneScope> scope, Key key, TuneOptions options);
  ~TuningClaim();  // without finish(): the problem stays untuned
  TuningClaim(TuningClaim&&) = default;
  TuningClaim& operator=(TuningClaim&&) = delete;

  const TuneOptions& options() const { return options_; }
  void finish(const TuneReport& report);
  void fail(std::string reason) { reason_ = std::move(reason); }

 private:
  std::shared_ptr<AutotuneScope> scope_;
  Key key_;
  TuneOptions options_;
  std::chrono::steady_clock::time_point start_;
  std::optional<TunedProblem> tuned_;
  std::string reason_;
};

// Nothing where the problem is not asked for, was tuned in this scope before, or no time is left for it.
KP_EXPORT std::optional<TuningClaim> claim_tuning(const Key& key);

}  // namespace kernel_pytorch::tuning
