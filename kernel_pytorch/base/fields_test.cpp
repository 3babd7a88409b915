// Lists of fields: what builders find while compiling, and the sizes and types that follow in a call.
#include "kernel_pytorch/base/fields.h"

#include <gtest/gtest.h>

namespace kernel_pytorch::fields_test {
namespace {

enum class Layout : uint8_t { kHeadsFirst, kSequenceFirst, kPacked };

struct Options {
  Layout layout = Layout::kHeadsFirst;
  std::optional<int64_t> offset{};
  int64_t chunk = 4;
  std::string program{};
  std::vector<TensorView> captured{};
};
inline constexpr auto kOptions = field_group<Options>(
    option<&Options::layout>({.choices = "bhsd bshd packed"}), option<&Options::offset>({.symbolic = true}),
    option<&Options::chunk>(), option<&Options::program>(), optional_input<&Options::captured>());

struct Arguments {
  TensorView query{};
  TensorView ends{};
  Options options{};
  TensorView output{};
  TensorView chunks{};
  TensorView sequences{};
  TensorView copy{};
};
inline constexpr auto kFields = fields<Arguments>(
    input<&Arguments::query>({.shape = "batch heads tokens size | batch tokens heads size | tokens heads size",
                              .shape_by = "layout",
                              .leads = true}),
    optional_input<&Arguments::ends>({.shape = "ends"}), all_of<&Arguments::options, kOptions>(),
    output<&Arguments::output>({.shape = "batch heads tokens size | batch tokens heads size | tokens heads size",
                                .shape_by = "layout",
                                .order_of = "query",
                                .dtype = "query"}),
    output<&Arguments::chunks>({.shape = "heads ceil(tokens/chunk) size/2", .dtype = "statistic query"}),
    output<&Arguments::sequences>({.shape = "ends-1 3 | ()", .shape_by = "ends", .dtype = "int32"}),
    output<&Arguments::copy>({.name = "copied", .shape = "like query", .dtype = "query"}));
inline constexpr Fields kList = kFields;

const Field& field(std::string_view name) {
  return *kList.find(name);
}

DimensionSizes sizes_of(const Arguments& arguments) {
  DimensionSizes sizes(kList);
  sizes.bind_options(&arguments);
  for (const Field& one : kList.all) {
    if (one.is_tensor() && one.is_input()) sizes.bind(one, one.tensor(&arguments), &arguments);
  }
  return sizes;
}

std::vector<int64_t> shape_of(const Arguments& arguments, std::string_view name) {
  const auto shape = sizes_of(arguments).shape_of(field(name), &arguments);
  if (!shape) return {-1};
  return {shape->shape().begin(), shape->shape().end()};
}

TEST(Fields, NestedStructsAreFieldsOfTheirOwnNames) {
  Arguments arguments;
  field("chunk").value<int64_t>(&arguments) = 7;
  field("layout").value<uint8_t>(&arguments) = 2;
  EXPECT_EQ(arguments.options.chunk, 7);
  EXPECT_EQ(arguments.options.layout, Layout::kPacked);
  EXPECT_EQ(kList.all.size(), 11u);
  EXPECT_EQ(kList.find("copy"), nullptr);
}

TEST(Fields, AChoicePicksTheShape) {
  Arguments arguments{.query = contiguous_view(nullptr, DType::kBFloat16, {2, 3, 5, 8})};
  EXPECT_EQ(shape_of(arguments, "chunks"), (std::vector<int64_t>{3, 2, 4}));
  arguments.options.layout = Layout::kSequenceFirst;
  EXPECT_EQ(shape_of(arguments, "chunks"), (std::vector<int64_t>{5, 1, 4}));
  EXPECT_EQ(shape_of(arguments, "output"), (std::vector<int64_t>{2, 3, 5, 8}));
  arguments.query = contiguous_view(nullptr, DType::kBFloat16, {9, 3, 8});
  arguments.options.layout = Layout::kPacked;
  arguments.options.chunk = 2;
  EXPECT_EQ(shape_of(arguments, "output"), (std::vector<int64_t>{9, 3, 8}));
  EXPECT_EQ(shape_of(arguments, "chunks"), (std::vector<int64_t>{3, 5, 4}));
  EXPECT_EQ(shape_of(arguments, "copied"), (std::vector<int64_t>{9, 3, 8}));
  arguments.options.chunk = 0;  // a size that does not exist: the op says what is wrong
  EXPECT_EQ(shape_of(arguments, "chunks"), (std::vector<int64_t>{-1}));
}

TEST(Fields, APresentTensorPicksTheShape) {
  Arguments arguments{.query = contiguous_view(nullptr, DType::kFloat32, {2, 3, 5, 8})};
  EXPECT_EQ(shape_of(arguments, "sequences"), std::vector<int64_t>{});
  arguments.ends = contiguous_view(nullptr, DType::kInt32, {4});
  EXPECT_EQ(shape_of(arguments, "sequences"), (std::vector<int64_t>{3, 3}));
  arguments.ends.sizes[0] = 0;
  EXPECT_EQ(shape_of(arguments, "sequences"), (std::vector<int64_t>{0, 3}));
}

TEST(Fields, AnOutputLiesInMemoryAsItsInput) {
  Arguments arguments{.query = contiguous_view(nullptr, DType::kFloat32, {2, 5, 3, 8})};
  std::swap(arguments.query.sizes[1], arguments.query.sizes[2]);
  std::swap(arguments.query.strides[1], arguments.query.strides[2]);
  const auto shape = sizes_of(arguments).shape_of(field("output"), &arguments);
  EXPECT_EQ(shape->sizes, arguments.query.sizes);
  EXPECT_EQ(shape->strides, arguments.query.strides);
}

TEST(Fields, Types) {
  Arguments arguments{.query = contiguous_view(nullptr, DType::kFloat64, {1, 1, 1, 1})};
  EXPECT_EQ(declared_type(kList, field("chunks"), &arguments), DType::kFloat64);
  EXPECT_EQ(declared_type(kList, field("sequences"), &arguments), DType::kInt32);
  EXPECT_EQ(declared_type(kList, field("output"), &arguments), DType::kFloat64);
  EXPECT_EQ(declared_type(kList, field("query"), &arguments), std::nullopt);
}

}  // namespace
}  // namespace kernel_pytorch::fields_test
