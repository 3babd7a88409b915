// Two passes. First each candidate alone: check, warm up, one sample, so that there is a best-so-far early and an
// interrupt keeps it. Then rounds over the survivors, each round starting at another candidate, so that drifting clocks
// and neighbours hit all of them alike; the medians of the rounds decide.
#include "kernel_pytorch/tuning/autotuner.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/version.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/tuning/row_check.h"

namespace kernel_pytorch::tuning {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRounds = 15;
constexpr int kRoundsBeforeDropping = 3;
constexpr double kClearlySlower = 1.5;
constexpr double kSampleMicroseconds =
    200;  // runs of one sample take about this long together, to drown the clock's step
constexpr int kMostRunsPerSample = 1000;
constexpr double kShortestMicroseconds = 1e-3;  // a measurement is never zero

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Times runs of one context: CUDA events on its stream, or the steady clock.
class Stopwatch {
 public:
  explicit Stopwatch(const Context& context) : context_(context) {
    if (!context.info->is_cuda()) return;
    start_ = std::make_unique<cuda_device::Event>(context.device().index);
    stop_ = std::make_unique<cuda_device::Event>(context.device().index);
  }

  // Microseconds of one run, over `runs` of them on successive sets of buffers.
  double time(const Candidate& candidate, int runs, int rotations, int& rotation) {
    const auto run_all = [&] {
      for (int i = 0; i < runs; ++i, rotation = (rotation + 1) % rotations) candidate.run(rotation);
    };
    if (start_ != nullptr) {
      start_->record(context_.stream);
      run_all();
      stop_->record(context_.stream);
      stop_->synchronize();
      return std::max(stop_->milliseconds_since(*start_) * 1e3 / runs, kShortestMicroseconds);
    }
    const auto start = Clock::now();
    run_all();
    return std::max(seconds_since(start) * 1e6 / runs, kShortestMicroseconds);
  }

 private:
  const Context& context_;
  std::unique_ptr<cuda_device::Event> start_, stop_;
};

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  const double place = q * static_cast<double>(values.size() - 1);
  const size_t below = static_cast<size_t>(place);
  const size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (values[above] - values[below]) * (place - static_cast<double>(below));
}

struct Contender {
  explicit Contender(const Candidate& contending) : candidate(&contending) {}
  const Candidate* candidate;
  std::vector<double> samples;  // of the rounds
  double first_us = 0;          // of the first pass, until there are rounds
  int runs_per_sample = 1;
  bool is_dropped = false;
  std::string failure;

  bool is_measured() const { return failure.empty() && (first_us > 0 || !samples.empty()); }
  bool is_running() const { return is_measured() && !is_dropped; }
  double median_us() const { return samples.empty() ? first_us : quantile(samples, 0.5); }
  double spread_us() const { return samples.empty() ? 0 : (quantile(samples, 0.75) - quantile(samples, 0.25)) / 2; }
};

// A candidate's own failure is a row of the report, whatever it throws.
template <class Action>
void guard(Contender& contender, const Action& action) {
  try {
    action();
  } catch (const std::exception& error) {
    contender.failure = error.what();
  }
}

void warm_up_and_size(Contender& contender, Stopwatch& stopwatch, int rotations, int& rotation) {
  stopwatch.time(*contender.candidate, 1, rotations, rotation);
  const double once_us = stopwatch.time(*contender.candidate, 1, rotations, rotation);
  contender.runs_per_sample =
      static_cast<int>(std::clamp(std::ceil(kSampleMicroseconds / once_us), 1.0, double{kMostRunsPerSample}));
  contender.first_us = contender.runs_per_sample == 1
                           ? once_us
                           : stopwatch.time(*contender.candidate, contender.runs_per_sample, rotations, rotation);
}

std::string text_of(const Candidate& candidate) {
  return candidate.config.empty() ? candidate.kernel : candidate.kernel + " " + candidate.config;
}

const Contender* find_best(const std::vector<Contender>& contenders) {
  const Contender* best = nullptr;
  for (const Contender& contender : contenders) {
    if (contender.is_measured() && (best == nullptr || contender.median_us() < best->median_us())) best = &contender;
  }
  return best;
}

class Session {
 public:
  Session(const std::vector<Candidate>& candidates, const Context& context, const TuneOptions& options)
      : options_(options), stopwatch_(context), rotations_(std::max(options.rotations, 1)) {
    for (const Candidate& candidate : candidates) contenders_.emplace_back(candidate);
  }

  void measure() {
    check_each();
    for (int round = 0; round < kRounds && !should_stop(); ++round) {
      run_round(round);
      if (round + 1 == kRoundsBeforeDropping) drop_slow();
      report(static_cast<int>(contenders_.size()) + round + 1, find_best(contenders_));
    }
  }

  TuneReport finish() const {
    TuneReport report;
    report.complete = true;
    report.candidates = static_cast<int>(contenders_.size());
    for (const Contender& contender : contenders_) {
      const bool is_failed = !contender.failure.empty();
      report.complete &= is_failed || contender.samples.size() >= kRoundsBeforeDropping;
      const TuneRow row{contender.candidate->kernel,
                        contender.candidate->config,
                        is_failed ? 0 : contender.median_us(),
                        is_failed ? 0 : contender.spread_us(),
                        contender.failure,
                        static_cast<int>(contender.samples.size())};
      if (&contender == &contenders_.front()) report.first = row;
      if (is_failed || contender.is_measured()) report.rows.push_back(row);
    }
    std::stable_sort(report.rows.begin(), report.rows.end(), [](const TuneRow& a, const TuneRow& b) {
      if (a.failure.empty() != b.failure.empty()) return a.failure.empty();
      return a.median_us < b.median_us;
    });
    report.seconds = seconds_since(start_);
    return report;
  }

 private:
  bool should_stop() const {
    return seconds_since(start_) > options_.budget_seconds || (options_.interrupted && options_.interrupted());
  }

  void check_each() {
    for (size_t i = 0; i < contenders_.size() && !should_stop(); ++i) {
      Contender& contender = contenders_[i];
      guard(contender, [&] {
        if (contender.candidate->check) contender.failure = contender.candidate->check();
        if (contender.failure.empty()) warm_up_and_size(contender, stopwatch_, rotations_, rotation_);
      });
      report(static_cast<int>(i) + 1, &contender);
    }
  }

  void run_round(int round) {
    for (size_t i = 0; i < contenders_.size(); ++i) {
      Contender& contender = contenders_[(i + static_cast<size_t>(round)) % contenders_.size()];
      if (!contender.is_running()) continue;
      if (should_stop()) return;
      guard(contender, [&] {
        contender.samples.push_back(
            stopwatch_.time(*contender.candidate, contender.runs_per_sample, rotations_, rotation_));
      });
    }
  }

  void drop_slow() {
    const Contender* best = find_best(contenders_);
    if (best == nullptr) return;
    const double limit_us = best->median_us() * kClearlySlower;
    for (Contender& contender : contenders_)
      contender.is_dropped = contender.is_measured() && contender.median_us() > limit_us;
  }

  void report(int done, const Contender* now) const {
    if (!options_.progress || now == nullptr) return;
    TuneProgress progress;
    progress.done = done;
    progress.total = static_cast<int>(contenders_.size()) + kRounds;
    progress.candidate = text_of(*now->candidate);
    progress.candidate_us = now->failure.empty() ? now->median_us() : 0;
    if (const Contender* best = find_best(contenders_)) {
      progress.best = text_of(*best->candidate);
      progress.best_us = best->median_us();
    }
    options_.progress(progress);
  }

  const TuneOptions& options_;
  Stopwatch stopwatch_;
  const int rotations_;
  int rotation_ = 0;
  Clock::time_point start_ = Clock::now();
  std::vector<Contender> contenders_;
};

}  // namespace

void refuse_while_capturing(const Context& context) {
  if (context.info->is_cuda() && cuda_device::is_capturing(context.stream)) {
    fail(ErrorCode::kUnsupported,
         "tuning: the stream is capturing a graph, and measuring would become part of it; tune before the capture");
  }
}

TuneReport autotune(const Key& key, const std::vector<Candidate>& candidates, const Context& context,
                    const TuneOptions& options) {
  refuse_while_capturing(context);
  Session session(candidates, context, options);
  session.measure();
  TuneReport report = session.finish();
  report.key = key;
  if (options.remembers && !report.rows.empty() && report.rows.front().failure.empty()) {
    const TuneRow& best = report.rows.front();
    remember(key, {best.kernel, best.config, best.median_us, best.spread_us, utc_now(), std::string(kVersion)});
  }
  return report;
}

std::vector<Timing> time_interleaved(const std::vector<Candidate>& candidates, const Context& context,
                                     double seconds_each, int rotations) {
  refuse_while_capturing(context);
  rotations = std::max(rotations, 1);
  Stopwatch stopwatch(context);
  std::vector<Contender> contenders;
  int rotation = 0;
  for (const Candidate& candidate : candidates) {
    Contender contender(candidate);
    warm_up_and_size(contender, stopwatch, rotations, rotation);
    contenders.push_back(std::move(contender));
  }
  const auto start = Clock::now();
  const double seconds = seconds_each * static_cast<double>(candidates.size());
  for (size_t round = 0; round < kRoundsBeforeDropping || seconds_since(start) < seconds; ++round) {
    for (size_t i = 0; i < contenders.size(); ++i) {
      Contender& contender = contenders[(i + round) % contenders.size()];
      contender.samples.push_back(stopwatch.time(*contender.candidate, contender.runs_per_sample, rotations, rotation));
    }
  }
  std::vector<Timing> timings;
  for (Contender& contender : contenders) {
    timings.push_back({contender.median_us(), contender.spread_us(), std::move(contender.samples)});
  }
  return timings;
}

}  // namespace kernel_pytorch::tuning
