#include "kernel_pytorch/c/sample_file.h"

#include <gtest/gtest.h>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::c_interface {
namespace {

SampleRun toy_run(double us, const std::string& fingerprint = "toy") {
  SampleRun run{"2026-01-31T12:00:00Z", "a toy", fingerprint, "0.5.0", {}};
  NamedSamples series{"norm 4x4 fp32", "fast", {}};
  for (int i = 0; i < 24; ++i) {
    series.samples.samples_us.push_back(us + 0.001 * i);
    series.samples.control_us.push_back(10 + 0.001 * (i % 3));
  }
  run.series.push_back(series);
  return run;
}

std::string why_no_sample_file(std::string_view text) {
  try {
    sample_runs_from(text, "a.json");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "";
}

TEST(SampleFile, GoesThereAndBack) {
  const std::vector<SampleRun> runs{toy_run(100), toy_run(101)};
  const std::vector<SampleRun> read = sample_runs_from(sample_file_text(runs), "a.json");
  ASSERT_EQ(read.size(), 2u);
  EXPECT_EQ(read[1].date, runs[1].date);
  EXPECT_EQ(read[1].device, "a toy");
  EXPECT_EQ(read[1].series[0].kernel, "fast");
  for (size_t i = 0; i < 24; ++i) {
    EXPECT_NEAR(read[1].series[0].samples.samples_us[i], runs[1].series[0].samples.samples_us[i], 5e-4);
    EXPECT_NEAR(read[1].series[0].samples.control_us[i], runs[1].series[0].samples.control_us[i], 5e-4);
  }
  EXPECT_FALSE(sample_runs_from(sample_file_text({SampleRun{"", "", "", "", {}}}), "b")[0].date.empty());
}

TEST(SampleFile, SaysWhatIsWrong) {
  const auto with_series = [](const std::string& series) {
    return R"({"format": "kernel_pytorch samples", "version": 1, "runs": [{"series": [)" + series + "]}]}";
  };
  EXPECT_EQ(why_no_sample_file(with_series(R"({"name": "a", "samples_us": [1]})")), "");
  const std::pair<std::string, std::string> cases[] = {
      {"", "a.json: an empty file"},
      {"{", "a.json: not JSON"},
      {"[]", "an object is needed"},
      {"{}", "no file of timings"},
      {R"({"format": "kernel_pytorch samples", "version": 2, "runs": []})", "its version is 2"},
      {R"({"format": "kernel_pytorch samples", "version": 1, "runs": []})", "no run"},
      {R"({"format": "kernel_pytorch samples", "version": 1, "runs": 7})", "\"runs\" must be an array"},
      {with_series("7"), "an object is needed"},
      {with_series(R"({"samples_us": [1]})"), "\"name\" is missing"},
      {with_series(R"({"name": "a"})"), "a has no samples"},
      {with_series(R"({"name": "a", "samples_us": [0]})"), "has the time 0"},
      {with_series(R"({"name": "a", "samples_us": [-1]})"), "has the time -1"},
      {with_series(R"({"name": "a", "samples_us": [1e300]})"), "has the time"},
      {with_series(R"({"name": "a", "samples_us": ["1"]})"), "has a string in it"},
      {with_series(R"({"name": "a", "samples_us": [1, 2], "control_us": [1]})"), "2 samples and 1 of its control"},
      {with_series(R"({"name": "a", "samples_us": [1]}, {"name": "a", "samples_us": [1]})"), "two series are called a"},
      {with_series(R"({"name": "a", "sample_us": [1]})"), "unknown field \"sample_us\""},
  };
  for (const auto& [text, wanted] : cases)
    EXPECT_NE(why_no_sample_file(text).find(wanted), std::string::npos) << text << "\n" << why_no_sample_file(text);
}

TEST(SampleFile, SeriesMeetByName) {
  SampleRun before = toy_run(100), after = toy_run(120);
  after.series[0].kernel = "faster";
  before.series.push_back({"gone", "k", {{1}, {}}});
  after.series.push_back({"new", "k", {{1}, {}}});
  const SampleComparison comparison = compare_runs({before}, {after}, {});
  ASSERT_EQ(comparison.changes.size(), 1u);
  EXPECT_EQ(comparison.changes[0].change, tuning::Change::kSlower);
  EXPECT_EQ(comparison.kernels[0], "fast -> faster");
  EXPECT_EQ(comparison.only_before, std::vector<std::string>{"gone"});
  EXPECT_EQ(comparison.only_after, std::vector<std::string>{"new"});
  EXPECT_EQ(comparison.count(tuning::Change::kSlower), 1);
  const Json json = report(comparison);
  EXPECT_EQ(json["slower"], 1);
  EXPECT_EQ(json["rows"][0]["change"], "slower");
  EXPECT_NEAR(json["rows"][0]["ratio"].get<double>(), 1.2, 1e-3);
}

TEST(SampleFile, MachinesAreNotCompared) {
  EXPECT_THROW(compare_runs({toy_run(1)}, {toy_run(1, "another")}, {}), Error);
}

TEST(SampleFile, AnswersTheCInterface) {
  const std::string before = sample_file_text({toy_run(100)}), after = sample_file_text({toy_run(80)});
  const Json answer = answer_compare("{\"before\": " + before + ", \"after\": " + after + ", \"threshold\": 0.1}");
  EXPECT_EQ(answer["rows"][0]["change"], "faster");
  EXPECT_EQ(answer["slower"], 0);
  EXPECT_THROW(answer_compare("{}"), Error);
  EXPECT_THROW(answer_compare(""), Error);
}

}  // namespace
}  // namespace kernel_pytorch::c_interface
