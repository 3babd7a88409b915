#include "kernel_pytorch/c/sample_file.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/tuning/row_check.h"

namespace kernel_pytorch::c_interface {
namespace {

constexpr std::string_view kFormat = "kernel_pytorch samples";
constexpr int kFormatVersion = 1;
constexpr double kLongestMicroseconds = 1e13;

std::vector<double> read_times(FieldReader& fields, std::string_view field) {
  std::vector<double> times;
  const Json* values = fields.value(field);
  if (values == nullptr) return times;
  KP_CHECK(values->is_array(), fields.where(), ": \"", field, "\" must be an array, not ", values->type_name());
  times.reserve(values->size());
  for (const Json& value : *values) {
    KP_CHECK(value.is_number(), fields.where(), ": \"", field, "\" has a ", value.type_name(), " in it");
    const double time = value.get<double>();
    KP_CHECK(time > 0 && time <= kLongestMicroseconds, fields.where(), ": \"", field, "\" has the time ", time);
    times.push_back(time);
  }
  return times;
}

const Json& read_array(FieldReader& fields, std::string_view field) {
  const Json* values = fields.value(field);
  KP_CHECK(values != nullptr && values->is_array(), fields.where(), ": \"", field, "\" must be an array");
  return *values;
}

NamedSamples read_series(const Json& json, const std::string& where) {
  FieldReader fields(json, where);
  NamedSamples series;
  series.name = fields.required_text("name");
  series.kernel = fields.text("kernel", "");
  series.samples.samples_us = read_times(fields, "samples_us");
  series.samples.control_us = read_times(fields, "control_us");
  fields.finish();
  const size_t count = series.samples.samples_us.size(), controls = series.samples.control_us.size();
  KP_CHECK(count > 0, where, ": ", series.name, " has no samples");
  KP_CHECK(controls == 0 || controls == count, where, ": ", series.name, " has ", count, " samples and ", controls,
           " of its control; they belong to the same rounds");
  return series;
}

SampleRun read_run(const Json& json, const std::string& where) {
  FieldReader fields(json, where);
  SampleRun run;
  run.date = fields.text("date", "");
  run.device = fields.text("device", "");
  run.fingerprint = fields.text("fingerprint", "");
  run.library_version = fields.text("library_version", "");
  std::map<std::string, int> seen;
  for (const Json& series : read_array(fields, "series")) {
    run.series.push_back(read_series(series, where));
    KP_CHECK(++seen[run.series.back().name] == 1, where, ": two series are called ", run.series.back().name);
  }
  fields.finish();
  return run;
}

// Steps of a nanosecond: what a clock says, and a third of the digits.
Json times_json(const std::vector<double>& times) {
  Json json = Json::array();
  for (const double time : times) json.push_back(std::max(1e-3, std::round(time * 1e3) / 1e3));
  return json;
}

struct Pooled {
  tuning::Series series;
  std::string kernel;  // of the newest run
};

std::map<std::string, Pooled> pooled(const std::vector<SampleRun>& runs) {
  std::map<std::string, Pooled> by_name;
  for (const SampleRun& run : runs) {
    for (const NamedSamples& series : run.series) {
      Pooled& pool = by_name[series.name];
      pool.series.push_back(series.samples);
      pool.kernel = series.kernel;
    }
  }
  return by_name;
}

void check_one_device(const std::vector<SampleRun>& before, const std::vector<SampleRun>& after) {
  const SampleRun* first = nullptr;
  for (const std::vector<SampleRun>* runs : {&before, &after}) {
    for (const SampleRun& run : *runs) {
      if (first == nullptr) first = &run;
      KP_CHECK(run.fingerprint == first->fingerprint, "compare: runs on ", first->device, " and on ", run.device, " (",
               first->fingerprint, ", ", run.fingerprint, "): times of different machines say nothing of a change");
    }
  }
}

}  // namespace

std::vector<SampleRun> read_sample_runs(const Json& file, std::string_view where) {
  FieldReader fields(file, where);
  const std::string format = fields.text("format", "");
  KP_CHECK(format == kFormat, where, ": no file of timings; `kpt bench --save` makes one");
  const double version = fields.number("version", 0, 0, 1e9);
  KP_CHECK(version == kFormatVersion, where, ": its version is ", version, ", this program reads ", kFormatVersion);
  std::vector<SampleRun> runs;
  for (const Json& run : read_array(fields, "runs")) {
    runs.push_back(read_run(run, concat(where, ": run ", runs.size() + 1)));
  }
  fields.finish();
  KP_CHECK(!runs.empty(), where, ": no run is in it");
  return runs;
}

std::vector<SampleRun> sample_runs_from(std::string_view text, std::string_view where) {
  KP_CHECK(!text.empty(), where, ": an empty file");
  return read_sample_runs(parse_json(text, where, kMaxSampleFileBytes), where);
}

std::string sample_file_text(const std::vector<SampleRun>& runs) {
  Json listed = Json::array();
  for (const SampleRun& run : runs) {
    Json all = Json::array();
    for (const NamedSamples& series : run.series) {
      all.push_back({{"name", series.name},
                     {"kernel", series.kernel},
                     {"samples_us", times_json(series.samples.samples_us)},
                     {"control_us", times_json(series.samples.control_us)}});
    }
    listed.push_back({{"date", run.date.empty() ? tuning::utc_now() : run.date},
                      {"device", run.device},
                      {"fingerprint", run.fingerprint},
                      {"library_version", run.library_version},
                      {"series", std::move(all)}});
  }
  return to_text({{"format", kFormat}, {"version", kFormatVersion}, {"runs", std::move(listed)}}) + "\n";
}

int SampleComparison::count(tuning::Change change) const {
  return static_cast<int>(
      std::count_if(changes.begin(), changes.end(), [&](const auto& row) { return row.change == change; }));
}

SampleComparison compare_runs(const std::vector<SampleRun>& before, const std::vector<SampleRun>& after,
                              const tuning::CompareOptions& options) {
  check_one_device(before, after);
  const std::map<std::string, Pooled> old_series = pooled(before);
  std::map<std::string, Pooled> new_series = pooled(after);
  SampleComparison comparison;
  std::vector<tuning::SeriesPair> pairs;
  for (const auto& [name, pool] : old_series) {
    const auto found = new_series.find(name);
    if (found == new_series.end()) {
      comparison.only_before.push_back(name);
      continue;
    }
    pairs.push_back({name, pool.series, std::move(found->second.series)});
    const std::string& kernel = found->second.kernel;
    comparison.kernels.push_back(pool.kernel == kernel ? kernel : pool.kernel + " -> " + kernel);
    new_series.erase(found);
  }
  for (const auto& [name, pool] : new_series) comparison.only_after.push_back(name);
  comparison.changes = tuning::compare(pairs, options);
  return comparison;
}

Json report(const SampleComparison& comparison) {
  Json rows = Json::array();
  for (size_t i = 0; i < comparison.changes.size(); ++i) {
    const tuning::SeriesChange& change = comparison.changes[i];
    rows.push_back({{"name", change.name},
                    {"kernel", comparison.kernels[i]},
                    {"change", std::string(name_of(change.change))},
                    {"before_us", change.before_us},
                    {"after_us", change.after_us},
                    {"ratio", change.ratio},
                    {"control_ratio", change.control_ratio > 0 ? Json(change.control_ratio) : Json(nullptr)},
                    {"p", change.p},
                    {"exact", change.is_exact}});
  }
  return {{"rows", std::move(rows)},
          {"slower", comparison.count(tuning::Change::kSlower)},
          {"only_before", comparison.only_before},
          {"only_after", comparison.only_after}};
}

Json answer_compare(std::string_view request) {
  const Json json = parse_json(request, "compare", 2 * kMaxSampleFileBytes);
  FieldReader fields(json, "compare");
  const Json* before = fields.value("before");
  const Json* after = fields.value("after");
  KP_CHECK(before != nullptr && after != nullptr, "compare: \"before\" and \"after\" are needed");
  tuning::CompareOptions options;
  options.threshold = fields.number("threshold", options.threshold, 0, 1e6);
  options.significance = fields.number("significance", options.significance, 0, 1);
  fields.finish();
  return report(
      compare_runs(read_sample_runs(*before, "compare: before"), read_sample_runs(*after, "compare: after"), options));
}

}  // namespace kernel_pytorch::c_interface
