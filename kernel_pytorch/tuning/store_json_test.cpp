#include "kernel_pytorch/tuning/store_json.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "kernel_pytorch/tuning/temporary_store_test.h"

namespace kernel_pytorch::tuning {
namespace {

const std::vector<std::string> kOps = {"toy", "other"};

class StoreJson : public TemporaryStore {};

std::string document(const std::string& rows) {
  return R"({"format": "kernel_pytorch tuning measurements", "version": 1, "measurements": [)" + rows + "]}";
}

// A sound row with one field replaced, or another added.
std::string row_with(const std::string& field = "", const std::string& value = "") {
  const std::pair<std::string, std::string> fields[] = {{"device", R"("d")"},
                                                        {"op", R"("toy")"},
                                                        {"kernel_set", R"("00ff")"},
                                                        {"problem", R"("n=1")"},
                                                        {"kernel", R"("fast")"},
                                                        {"config", R"("unroll=4")"},
                                                        {"median_us", "1.5"},
                                                        {"spread_us", "0"},
                                                        {"date", R"("2024-02-29T23:59:59Z")"},
                                                        {"library_version", R"("0.5.0")"}};
  std::string text;
  bool is_replaced = field.empty();
  for (const auto& [name, usual] : fields) {
    const bool is_this = name == field;
    is_replaced |= is_this;
    if (is_this && value == "absent") continue;
    text += (text.empty() ? "{" : ", ") + ("\"" + name + "\": ") + (is_this ? value : usual);
  }
  if (!is_replaced) text += ", \"" + field + "\": " + value;
  return text + "}";
}

std::string refusal(const std::string& json) {
  try {
    parse_measurements(json, kOps);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.message();
  }
  return "";
}

void expect_refused(const std::string& json, const std::string& words) {
  const std::string message = refusal(json);
  EXPECT_NE(message.find(words), std::string::npos) << "wanted: " << words << "\ngot: " << message;
  EXPECT_LT(message.size(), 400u);
}

TEST_F(StoreJson, ExportAndImportRoundTrip) {
  remember(make_test_key("n=1"), make_test_measurement("fast", 0.1 + 0.2));
  remember(make_test_key("n=\"2\" \xc3\xa4"), make_test_measurement("slow", 12345.678));
  const auto before = list_store();
  const std::string text = export_store();
  clear_store();
  EXPECT_EQ(import_store(text, kOps), 2);
  const auto after = list_store();
  ASSERT_EQ(after.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(after[i].key, before[i].key);
    EXPECT_EQ(after[i].measurement.median_us, before[i].measurement.median_us);
    EXPECT_EQ(after[i].measurement.date, before[i].measurement.date);
  }
  EXPECT_EQ(find_measured(make_test_key("n=1"))->tier, Tier::kPersistent) << "this process sees it at once";
  EXPECT_EQ(export_store(), text);
}

TEST_F(StoreJson, AnEmptyStoreRoundTrips) {
  EXPECT_EQ(import_store(export_store(), kOps), 0);
}

TEST_F(StoreJson, ANewerMeasurementInTheStoreStays) {
  Key key{"d", "toy", "00ff", "n=1"};
  remember(key, make_test_measurement("newer"));
  EXPECT_EQ(import_store(document(row_with()), kOps), 0);
  EXPECT_EQ(list_store()[0].measurement.kernel, "newer");
}

TEST_F(StoreJson, NothingIsWrittenWhenOneRowIsWrong) {
  EXPECT_THROW(import_store(document(row_with() + "," + row_with("median_us", "-1")), kOps), Error);
  EXPECT_TRUE(list_store().empty());
}

TEST_F(StoreJson, ASoundDocumentIsTaken) {
  EXPECT_EQ(parse_measurements(document(row_with() + "," + row_with("config", "\"\"")), kOps).size(), 2u);
  EXPECT_TRUE(parse_measurements(document(""), kOps).empty());
}

TEST_F(StoreJson, WrongTopLevelsAreRefused) {
  expect_refused("", "not JSON");
  expect_refused("{", "not JSON");
  expect_refused("[]", "top level holds an array");
  expect_refused("null", "top level holds null");
  expect_refused("{}", "format");
  expect_refused(R"({"format": "something else"})", "format");
  expect_refused(R"({"format": "kernel_pytorch tuning measurements", "version": 1})",
                 "measurements: the list is missing");
  expect_refused(R"({"format": "kernel_pytorch tuning measurements", "version": 2, "measurements": []})",
                 "version: is 2");
  expect_refused(R"({"measurements": {}})", "measurements holds an object");
  expect_refused(R"({"measurements": [], "measurements": []})", "second list");
  expect_refused(R"({"surprise": 1})", "surprise is not a field");
  expect_refused(document("") + "{}", "not JSON");
  expect_refused(std::string("\xff\xfe\x00\x01", 4), "not JSON");
}

TEST_F(StoreJson, WrongRowsAreRefusedWithTheirPlace) {
  expect_refused(document("1"), "measurements[0] holds a number");
  expect_refused(document(row_with() + ",[]"), "measurements[1] holds an array");
  expect_refused(document(row_with() + "," + row_with("median_us", "\"fast\"")),
                 "measurements[1].median_us holds a text");
  for (const std::string field :
       {"device", "op", "kernel_set", "problem", "kernel", "config", "date", "library_version"}) {
    for (const std::string value : {"null", "true", "7", "[]", "{}", "1e300"}) {
      expect_refused(document(row_with(field, value)), "measurements[0]." + field + " holds");
    }
    expect_refused(document(row_with(field, "absent")), "lacks the field " + field);
    expect_refused(document(row_with(field, "\"a\\u0000b\"")), field + ": ");
    expect_refused(document(row_with(field, "\"" + std::string(5000, 'x') + "\"")), field + " has 5000 bytes");
  }
  expect_refused(document(row_with("surprise", "1")), "measurements[0].surprise is not a field");
  expect_refused(document(R"({"device": "a", "device": "b"})"), "device is given twice");
  expect_refused(document(row_with("op", "\"no_such_op\"")), "no_such_op\" is no op");
}

TEST_F(StoreJson, WrongNumbersAreRefused) {
  for (const std::string value : {"0", "-1", "-0.0", "1e13", "1e308", "9223372036854775807", "18446744073709551615"}) {
    expect_refused(document(row_with("median_us", value)), "median_us: is");
  }
  expect_refused(document(row_with("median_us", "1e999")), "not JSON");
  expect_refused(document(row_with("median_us", "NaN")), "not JSON");
  expect_refused(document(row_with("spread_us", "-0.5")), "spread_us: is");
}

TEST_F(StoreJson, WrongDatesAreRefused) {
  for (const std::string date : {"", "yesterday", "2024-02-29", "2024-02-29 23:59:59Z", "2024-13-01T00:00:00Z",
                                 "2023-02-29T00:00:00Z", "2024-02-30T00:00:00Z", "2024-02-01T24:00:00Z",
                                 "2024-02-01T00:60:00Z", "9999-01-01T00:00:00Z", "20240-2-01T00:00:00Z"}) {
    expect_refused(document(row_with("date", "\"" + date + "\"")), "date: ");
  }
}

TEST_F(StoreJson, DeepNestingIsRefusedAtOnce) {
  const std::string deep(20 << 20, '[');
  expect_refused(deep, "holds an array");
  expect_refused(document(deep), "measurements[0] holds an array");
  expect_refused(document(row_with("config", deep)), "config holds an array");
  std::string objects;
  for (int i = 0; i < 100000; ++i) objects += "{\"measurements\":";
  expect_refused(objects, "measurements holds an object");
}

TEST_F(StoreJson, AHugeFileIsRefusedUnread) {
  expect_refused(std::string(100 << 20, ' '), "104857600 bytes");
}

// What the fuzzer found worth keeping must stay handled: taken or refused, never a crash.
TEST_F(StoreJson, TheFuzzersCorpusIsHandled) {
  int files = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(KP_SOURCE_DIR) + "/tests/fuzz_corpus/import")) {
    std::ifstream in(entry.path(), std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    try {
      for (const StoredMeasurement& row : parse_measurements(text, kOps)) EXPECT_EQ(problem_with(row), "");
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    }
    ++files;
  }
  EXPECT_GT(files, 0);
}

}  // namespace
}  // namespace kernel_pytorch::tuning
