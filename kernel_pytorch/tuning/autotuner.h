// Measures candidates and names the fastest. Knows nothing of ops: a candidate is something that runs and checks
// itself.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/tuning/selection.h"

namespace kernel_pytorch::tuning {

struct Candidate {
  std::string kernel;
  std::string config;
  std::function<void(int rotation)> run;  // on the rotation-th set of buffers; asynchronous on CUDA
  std::function<std::string()> check;     // empty when the output is right, else what is wrong
};

struct TuneProgress {
  int done = 0;
  int total = 0;
  std::string candidate;    // "sm90_bulk threads=256"
  double candidate_us = 0;  // 0: failed or not yet timed
  std::string best;
  double best_us = 0;
};

struct TuneOptions {
  double budget_seconds = 10;                         // nothing more is begun after this
  int rotations = 1;                                  // buffer sets that candidate.run knows
  std::function<void(const TuneProgress&)> progress;  // may be empty
  std::function<bool()> interrupted;                  // true: stop, keep what was measured (Ctrl-C)
  bool remembers = true;                              // the winner, in tiers 3 and 4
};

struct TuneRow {
  std::string kernel;
  std::string config;
  double median_us = 0;
  double spread_us = 0;
  std::string failure;  // wrong result or error: not a contender
  int samples = 0;      // rounds that it took part in; 0: the time is that of one first run
};

struct TuneReport {
  Key key;
  std::vector<TuneRow> rows;  // fastest first, failures last
  TuneRow first;              // the candidate that came first, which is what would run untuned
  int candidates = 0;
  bool complete = false;  // every candidate was measured within the budget
  double seconds = 0;
};

// Checks each candidate, then times the survivors in interleaved rounds (CUDA events or the steady clock), dropping
// those that are clearly slower after a few rounds. Remembers the winner (tiers 3 and 4) if there is one and it may.
// Throws kUnsupported when called while the context's stream captures.
KP_EXPORT TuneReport autotune(const Key& key, const std::vector<Candidate>& candidates, const Context& context,
                              const TuneOptions& options);

// Throws kUnsupported when the context's stream captures; for callers that allocate before they tune.
KP_EXPORT void refuse_while_capturing(const Context& context);

// Times one thing the same way: for `kpt bench`.
struct Timing {
  double median_us = 0;
  double spread_us = 0;
  std::vector<double> samples_us;  // one a round; rounds are the same for all candidates
};
// Interleaves the candidates; checks nothing, remembers nothing.
KP_EXPORT std::vector<Timing> time_interleaved(const std::vector<Candidate>& candidates, const Context& context,
                                               double seconds_each, int rotations);

}  // namespace kernel_pytorch::tuning
