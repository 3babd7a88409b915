// Schemas of variants of one list.
#include "kernel_pytorch/registry/declaration.h"

#include <gtest/gtest.h>

namespace kernel_pytorch::registry::declaration_test {
namespace {

enum class Kind : uint8_t { kOne, kTwo };
struct Arguments {
  TensorView x{};
  TensorView residual{};
  std::vector<TensorView> captured{};
  Kind kind = Kind::kOne;
  std::optional<int64_t> offset{};
  bool back = false;
  TensorView output{};
  TensorView sum{};
  TensorView lse{};
};
inline constexpr auto kFields = fields<Arguments>(
    input<&Arguments::x>({.shape = "... columns", .leads = true}),
    optional_input<&Arguments::residual>({.shape = "... columns"}), input<&Arguments::captured>(),
    option<&Arguments::kind>({.choices = "one two"}), option<&Arguments::offset>({.symbolic = true}),
    option<&Arguments::back>({.hidden = true}),
    output<&Arguments::output>({.shape = "... columns", .dtype = "x", .dtype_option = "out_dtype", .in_place = "x"}),
    output<&Arguments::sum>({.shape = "... columns", .dtype = "x", .when = "residual", .wanted = "with_sum"}),
    saved<&Arguments::lse>({.shape = "...", .dtype = "statistic x"}));

std::string schema(const Variant& variant, bool returns_saved = false) {
  return schema_of({.name = "f", .fields = kFields, .variant = variant, .returns_saved = returns_saved});
}

TEST(Declaration, SchemasOfVariants) {
  const std::string given = "Tensor[] captured, str kind, SymInt? offset";
  EXPECT_EQ(schema({}), "f(Tensor x, Tensor? residual, " + given +
                            ", bool with_sum, ScalarType? out_dtype=None) -> (Tensor output, Tensor sum)");
  EXPECT_EQ(schema({.never = "residual"}, true),
            "f(Tensor x, " + given + ", ScalarType? out_dtype=None) -> (Tensor output, Tensor lse)");
  EXPECT_EQ(schema({.always = "residual", .without = "kind captured offset sum", .renamed = "x=grad residual=kept"}),
            "f(Tensor grad, Tensor kept, ScalarType? out_dtype=None) -> Tensor");
  EXPECT_EQ(schema({.never = "residual", .shown = "back", .in_place = true}),
            "f(Tensor(a!) x, " + given + ", bool back) -> ()");
  EXPECT_EQ(schema({.never = "residual", .without = "kind captured offset", .updated = "output lse"}),
            "f(Tensor x, Tensor(a!) output, Tensor(b!) lse) -> ()");
}

}  // namespace
}  // namespace kernel_pytorch::registry::declaration_test
