// The kernels of gradients' codes, best first, references last, and the shapes they are tested on.
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/gradient_code/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::gradient_code {
namespace {

// A request's shape is [rows, numbers].
struct Message {
  int64_t rows, count, columns;
};
Message message_of(const registry::ProblemRequest& request, std::string_view op, bool has_one_row) {
  KP_CHECK(request.shape.size() == 2 && request.shape[0] > 0, op, ": the shape is ", shape_text(request.shape),
           "; it must be [rows, numbers] with a row at least");
  const int64_t rows = request.shape[0], count = request.shape[1];
  const int64_t each = has_one_row ? count : (count + rows - 1) / rows;
  return {rows, count, tiles_of(each) * kTile};
}
template <class Problem>
void set_message(const Message& message, Device device, Problem& problem) {
  problem.codes =
      contiguous_view(nullptr, DType::kInt8, {message.rows, message.columns * bits_of(problem.code) / 8}, device);
  problem.scales =
      contiguous_view(nullptr, DType::kFloat32, {message.rows, message.columns / block_elements(problem.code)}, device);
}

// Option besides those of the list: error=0|1.
Encode make_encode(const registry::ProblemRequest& request) {
  Encode problem;
  std::vector<std::string_view> known = registry::option_names(kEncodeFields);
  known.push_back("error");
  registry::check_options(request, known);
  registry::make_options(kEncodeFields, request, &problem);
  const Message message = message_of(request, "gradient_encode", false);
  problem.x = contiguous_view(nullptr, request.dtype, {message.count}, request.device);
  if (registry::flag_option(request, "error", true)) {
    problem.error = contiguous_view(nullptr, DType::kFloat32, {message.count}, request.device);
  }
  set_message(message, request.device, problem);
  return problem;
}
Decode make_decode(const registry::ProblemRequest& request) {
  Decode problem;
  registry::check_options(request, registry::option_names(kDecodeFields));
  registry::make_options(kDecodeFields, request, &problem);
  const Message message = message_of(request, "gradient_decode", problem.mean);
  problem.output = contiguous_view(nullptr, request.dtype, {message.count}, request.device);
  set_message(message, request.device, problem);
  return problem;
}

constexpr const char* kEncodeShapes = R"(
    fp32 bf16 fp16: 1x256 code=int8,int4,onebit error=0,1; 3x7001 code=int8,int4,onebit carries=0,1
    fp32: 2x1 code=int8,int4,onebit; 4x0 code=int8; 1x70001 code=int8,int4,onebit
)";
constexpr const char* kDecodeShapes = R"(
    fp32 bf16 fp16: 1x256 code=int8,int4,onebit adds=0,1; 3x7001 code=int8,int4,onebit mean=0,1 adds=0,1
    fp32: 2x1 code=int8,int4,onebit mean=0,1; 4x0 code=int8; 2x70001 code=int8,int4,onebit
)";

}  // namespace

constinit const registry::Operation<Encode> kEncode = registry::declared<Encode, kEncodeFields>(
    {.name = "gradient_encode",
     .kernels = registry::kernel_list<kEncodeCuda, kEncodeCpu, kEncodeReference>,
     .make = make_encode,
     .check = registry::check_only<Encode, check>,
     .flops_per_element = 6,
     .shapes = kEncodeShapes});

constinit const registry::Operation<Decode> kDecode = registry::declared<Decode, kDecodeFields>(
    {.name = "gradient_decode",
     .kernels = registry::kernel_list<kDecodeCuda, kDecodeCpu, kDecodeReference>,
     .make = make_decode,
     .check = registry::check_only<Decode, check>,
     .flops_per_element = 2,
     .shapes = kDecodeShapes});

constexpr auto kDeclarations = registry::join(registry::plain<Encode, encode>("gradient_encode_", kEncodeFields),
                                              registry::plain<Decode, decode>("gradient_decode_", kDecodeFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kEncode, kDecode>};

}  // namespace kernel_pytorch::gradient_code
