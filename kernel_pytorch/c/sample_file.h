// Files of timings: what `kpt bench --save` and kernel_pytorch.utils.performance write, and what is compared. A file is
// a list of runs, one a process; a run has series by name, each with its samples and those of a control of the same
// rounds. A file comes from a disk: it is believed after it was read here, field by field.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/c/json.h"
#include "kernel_pytorch/tuning/comparison.h"

namespace kernel_pytorch::c_interface {

inline constexpr size_t kMaxSampleFileBytes = size_t{64} << 20;

struct NamedSamples {
  std::string name;    // what is compared with the same name in another file
  std::string kernel;  // what ran, for people
  tuning::RunSamples samples;
};

struct SampleRun {
  std::string date, device, fingerprint, library_version;
  std::vector<NamedSamples> series;
};

// Errors begin with `where`: a file's name, or the field of a request.
KP_EXPORT std::vector<SampleRun> read_sample_runs(const Json& file, std::string_view where);
KP_EXPORT std::vector<SampleRun> sample_runs_from(std::string_view text, std::string_view where);
KP_EXPORT std::string sample_file_text(const std::vector<SampleRun>& runs);  // the date is now where it is empty

struct KP_EXPORT SampleComparison {
  std::vector<tuning::SeriesChange> changes;
  std::vector<std::string> kernels;  // of each change: "old -> new", or one name where it is the same
  std::vector<std::string> only_before, only_after;
  int count(tuning::Change change) const;
};
// Runs of different devices are an error.
KP_EXPORT SampleComparison compare_runs(const std::vector<SampleRun>& before, const std::vector<SampleRun>& after,
                                        const tuning::CompareOptions& options);

KP_EXPORT Json report(const SampleComparison& comparison);
KP_EXPORT Json answer_compare(std::string_view request);

}  // namespace kernel_pytorch::c_interface
