#include "kernel_pytorch/cli/problem_arguments.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/c/names.h"
#include "kernel_pytorch/cli/command.h"

namespace kernel_pytorch::cli {
namespace {

// The core's "invalid argument" is the user's word here.
template <class Work>
auto as_usage(const Work& work) {
  try {
    return work();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInvalidArgument) throw UsageError(error.message());
    throw;
  }
}

std::pair<std::string, std::string> split_option(const std::string& text) {
  const size_t equals = text.find('=');
  if (equals == 0 || equals == std::string::npos) {
    throw UsageError("--option " + text + ": write NAME=VALUE, as residual=1");
  }
  return {text.substr(0, equals), text.substr(equals + 1)};
}

}  // namespace

void add_problem_arguments(Command& command, ProblemArguments& arguments, Need op_and_shape) {
  command.text("op", arguments.op, "an op, or the start of its name: rms_norm is forward and backward", op_and_shape)
      .texts("--shape,-s", arguments.shapes, "sizes with x between them: 1024x4096; may be repeated", op_and_shape)
      .texts("--dtype,-t", arguments.dtypes, "element type: fp32 (usual), bf16, fp16, ...; may be repeated")
      .text("--device,-d", arguments.device, "cpu, cuda or cuda:N")
      .texts("--option,-o", arguments.options, "a word of the op, as residual=1; may be repeated");
}

std::vector<const registry::AnyOperation*> named_operations(const std::string& op) {
  return as_usage([&] { return c_interface::matching_operations(op); });
}

Device named_device(const std::string& device) {
  const Device named = as_usage([&] { return c_interface::device_from(device); });
  device_info(named);  // throws, with the reason, where it is not there
  return named;
}

std::vector<NamedProblem> named_problems(const ProblemArguments& arguments) {
  auto operations = named_operations(arguments.op);
  // A whole name is that op alone: words of a problem are its own (grouped_matmul and grouped_matmul_weight differ).
  const auto exact = std::ranges::find(operations, arguments.op, [](const auto* one) { return one->name; });
  if (exact != operations.end()) operations = {*exact};
  const Device device = named_device(arguments.device);
  const std::vector<std::string> dtypes =
      arguments.dtypes.empty() ? std::vector<std::string>{"fp32"} : arguments.dtypes;
  std::vector<NamedProblem> problems;
  for (const registry::AnyOperation* operation : operations) {
    for (const std::string& shape : arguments.shapes) {
      for (const std::string& dtype : dtypes) {
        registry::ProblemRequest request;
        request.shape = as_usage([&] { return c_interface::shape_from(shape); });
        request.dtype = as_usage([&] { return c_interface::dtype_from(dtype); });
        request.device = device;
        for (const std::string& option : arguments.options) request.options.push_back(split_option(option));
        as_usage([&] { return operation->candidates(request); });  // the op reads its words, before anything runs
        problems.push_back({operation, std::move(request)});
      }
    }
  }
  return problems;
}

int64_t element_count(const registry::ProblemRequest& request) {
  int64_t count = 1;
  for (const int64_t size : request.shape) count *= size;
  return count;
}

std::string request_text(const registry::ProblemRequest& request) {
  std::string text = c_interface::request_shape_text(request.shape).append(" ").append(name_of(request.dtype));
  for (const auto& [name, value] : request.options) text.append(" ").append(name).append("=").append(value);
  return text;
}

std::string problem_text(const NamedProblem& problem) {
  return problem.operation->name + " " + request_text(problem.request) + " on " + to_string(problem.request.device);
}

}  // namespace kernel_pytorch::cli
