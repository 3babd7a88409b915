#include "kernel_pytorch/ops/scaled_matmul/scaled_matmul.h"

#include <string_view>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/scaled_matmul/operation.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::scaled_matmul {
namespace {

bool is_float8(DType dtype) {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
}
bool is_small_float(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

struct Checks {
  Device device;

  void check_present(std::string_view name, const TensorView& view) const {
    KP_CHECK(view.is_present(), "scaled_matmul: ", name, " is missing");
    check_device(name, view);
  }
  void check_device(std::string_view name, const TensorView& view) const {
    KP_CHECK(view.device == device, "scaled_matmul: ", name, " is on ", view.device, ", the call runs on ", device,
             "; move all tensors to one device");
  }

  void check_codes(std::string_view name, const TensorView& view) const {
    check_present(name, view);
    KP_CHECK(is_float8(view.dtype), "scaled_matmul: ", name, " is ", view.dtype,
             "; it must be e4m3 or e5m2, quantize it first");
    KP_CHECK(view.rank == 2, "scaled_matmul: ", name, " has shape ", shape_text(view.shape()),
             "; it must be a matrix whose columns are k");
    KP_CHECK(view.sizes[1] <= 1 || view.strides[1] == 1, "scaled_matmul: ", name, " has strides ",
             shape_text({view.strides.data(), 2}),
             "; its last dimension, k, must be dense: quantize gives the transposed codes too");
  }

  // In the two dimensions of operation.h.
  TensorView normal_scale(std::string_view name, const TensorView& scale, int64_t rows, int64_t k) const {
    check_present(name, scale);
    KP_CHECK(scale.dtype == DType::kFloat32, "scaled_matmul: ", name, " is ", scale.dtype, "; it must be fp32");
    TensorView form = scale;
    if (scale.rank <= 2 && scale.element_count() == 1) {
      form.sizes = {1, 1};
      form.strides = {0, 0};
    } else if (scale.rank == 1) {
      form.sizes = {scale.sizes[0], 1};
      form.strides = {scale.strides[0], 0};
    }
    form.rank = 2;
    const int64_t blocks = (k + kBlock - 1) / kBlock, groups = (rows + kBlock - 1) / kBlock;
    const bool is_tensor = form.sizes[0] == 1 && form.sizes[1] == 1;
    const bool is_row = form.sizes[0] == rows && form.sizes[1] == 1;
    const bool is_block = (form.sizes[0] == rows || form.sizes[0] == groups) && form.sizes[1] == blocks;
    KP_CHECK(scale.rank <= 2 && (is_tensor || is_row || (is_block && scale.rank == 2)), "scaled_matmul: ", name,
             " has shape ", shape_text(scale.shape()), "; for ", rows, " rows and k = ", k, " it must be [], [", rows,
             "], [", rows, ", ", blocks, "] (1x128 blocks) or [", groups, ", ", blocks, "] (128x128)");
    return form;
  }

  void check_one(std::string_view name, const TensorView& view) const {
    check_present(name, view);
    KP_CHECK(view.dtype == DType::kFloat32 && view.element_count() == 1, "scaled_matmul: ", name, " is ", view,
             "; it must be fp32 with one element");
  }

  void check_output(const Product& arguments) const {
    const TensorView& output = arguments.output;
    check_present("output", output);
    const int64_t m = arguments.a.sizes[0], n = arguments.b.sizes[0];
    KP_CHECK(output.rank == 2 && output.sizes[0] == m && output.sizes[1] == n, "scaled_matmul: output has shape ",
             shape_text(output.shape()), ", a has ", m, " rows and b ", n, "; it must be [", m, ", ", n, "]");
    KP_CHECK(output.sizes[1] <= 1 || output.strides[1] == 1, "scaled_matmul: output has strides ",
             shape_text({output.strides.data(), 2}), "; its last dimension must be dense");
    KP_CHECK(is_small_float(output.dtype) || is_float8(output.dtype), "scaled_matmul: output is ", output.dtype,
             "; it must be fp32, bf16, fp16, e4m3 or e5m2");
    KP_CHECK(is_float8(output.dtype) == arguments.output_scale.is_present(), "scaled_matmul: output is ", output.dtype,
             " and output_scale is ", arguments.output_scale.is_present() ? "given" : "missing",
             "; an FP8 output needs one, others take none");
  }

  void check_bias(const TensorView& bias, int64_t n) const {
    if (!bias.is_present()) return;
    check_device("bias", bias);
    KP_CHECK(is_small_float(bias.dtype), "scaled_matmul: bias is ", bias.dtype, "; convert it to fp32, bf16 or fp16");
    KP_CHECK(bias.rank == 1 && bias.sizes[0] == n && (n <= 1 || bias.strides[0] == 1), "scaled_matmul: bias is ", bias,
             "; it must be contiguous with one element for each of the ", n, " rows of b");
  }
};

}  // namespace

void check(Product& arguments, Device device) {
  const Checks checks{device};
  checks.check_codes("a", arguments.a);
  checks.check_codes("b", arguments.b);
  KP_CHECK(arguments.a.sizes[1] == arguments.b.sizes[1], "scaled_matmul: a has shape ", shape_text(arguments.a.shape()),
           ", b has ", shape_text(arguments.b.shape()), "; their last dimensions, k, must be equal");
  checks.check_output(arguments);
  const int64_t m = arguments.a.sizes[0], n = arguments.b.sizes[0], k = arguments.a.sizes[1];
  checks.check_bias(arguments.bias, n);
  if (arguments.output_scale.is_present()) checks.check_one("output_scale", arguments.output_scale);
  if (arguments.amax.is_present()) checks.check_one("amax", arguments.amax);
  arguments.scale_a = checks.normal_scale("scale_a", arguments.scale_a, m, k);
  arguments.scale_b = checks.normal_scale("scale_b", arguments.scale_b, n, k);
}

void multiply(const Product& arguments, Context& context) {
  Product problem = arguments;
  check(problem, context.device());
  registry::run_best(kProduct, problem, context);
}

}  // namespace kernel_pytorch::scaled_matmul
