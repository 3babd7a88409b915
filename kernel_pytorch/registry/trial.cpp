#include "kernel_pytorch/registry/trial.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/registry/compare.h"
#include "kernel_pytorch/registry/random_fill.h"

namespace kernel_pytorch::registry {
namespace {

constexpr int kMostRotations = 64;
constexpr int64_t kCacheMultiple = 3;  // sets together span this many last-level caches
constexpr int64_t kMostRotatedBytes = int64_t{4} << 30;

size_t bytes_of(const TensorView& view) {
  return static_cast<size_t>(span_elements(view) * size_of(view.dtype));
}

int64_t last_level_cache_bytes(const DeviceInfo& device) {
  if (device.is_cuda()) return device.cuda.l2_bytes;
  return std::max(device.cpu.l3_bytes, device.cpu.l2_bytes);
}

// Elements of the largest input over elements of this output: what each of its elements may sum over.
int64_t terms_per_element(const std::vector<ProblemTensor>& tensors, const TensorView& output) {
  int64_t largest = 1;
  for (const ProblemTensor& tensor : tensors) {
    if (tensor.role != Role::kOutput) largest = std::max(largest, tensor.view.element_count());
  }
  return std::max<int64_t>(1, largest / std::max<int64_t>(1, output.element_count()));
}

// One set on the device and the inputs on the host must fit with memory to spare: an operating system that promises
// more memory than it has would end the process and not the allocation.
void refuse_too_large(const AnyProblem& problem, int64_t bytes, const DeviceInfo& device) {
  for (const DeviceInfo* place : {&device, &device_info(Device{})}) {
    if (place->memory_bytes == 0 || bytes <= place->memory_bytes / 3) continue;
    fail(ErrorCode::kDevice, problem.op(), ": a trial needs ", bytes, " bytes on ", place->device, ", which has ",
         place->memory_bytes, "; at most a third is taken: try fewer rows");
  }
}

}  // namespace

TrialContext::TrialContext(const Context& context) : own_(context.device(), context.stream), context_(context) {
  context_.scratch = own_->scratch;
  context_.kernel_override = {};
}

void TrialContext::run(const AnyProblem& problem, int kernel, int config) {
  const ScratchScope scope(context_.scratch);
  problem.run(kernel, config, context_);
}

BoundProblem::BoundProblem(const AnyProblem& problem, const DeviceInfo& device, const std::vector<DeviceBuffer>* inputs,
                           void* stream)
    : tensors_(problem.tensors()) {
  std::vector<void*> memory;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    buffers_.emplace_back(device.device, bytes_of(tensors_[i].view));
    if (inputs != nullptr && tensors_[i].role != Role::kOutput) buffers_[i].copy_from_host((*inputs)[i].data(), stream);
    memory.push_back(buffers_[i].data());
    tensors_[i].view.data = memory.back();
    tensors_[i].view.device = device.device;
  }
  problem_ = problem.with_memory(device, memory);
  poison_outputs(stream);
}

void BoundProblem::poison_outputs(void* stream) const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].role == Role::kOutput) buffers_[i].fill(kPoisonByte, stream);
  }
}

void BoundProblem::restore_updated(const std::vector<DeviceBuffer>& inputs, void* stream) {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].role == Role::kUpdated) buffers_[i].copy_from_host(inputs[i].data(), stream);
  }
}

std::vector<DeviceBuffer> make_random_inputs(const AnyProblem& problem, Threads* threads) {
  std::vector<DeviceBuffer> inputs;
  uint64_t seed = 1;
  for (const ProblemTensor& tensor : problem.tensors()) {
    if (tensor.role == Role::kOutput) {
      inputs.emplace_back();
      continue;
    }
    DeviceBuffer buffer(Device{}, bytes_of(tensor.view));
    fill_random(buffer.data(), tensor.view.dtype, span_elements(tensor.view), tensor.filling,
                hash_text(tensor.name) + seed++, threads);
    inputs.push_back(std::move(buffer));
  }
  std::vector<void*> memory;
  for (const DeviceBuffer& buffer : inputs) memory.push_back(buffer.data());
  problem.with_memory(device_info(Device{}), memory)->set_trial_inputs();
  return inputs;
}

int rotation_count(int64_t bytes, const DeviceInfo& device) {
  const int64_t wanted = kCacheMultiple * last_level_cache_bytes(device);
  const int64_t affordable =
      std::min(kMostRotatedBytes, device.memory_bytes > 0 ? device.memory_bytes / 8 : kMostRotatedBytes);
  const int64_t sets = std::min(wanted, affordable) / std::max<int64_t>(bytes, 1) + 1;
  return static_cast<int>(std::clamp<int64_t>(sets, 1, kMostRotations));
}

RotatedProblem::RotatedProblem(const AnyProblem& problem, const Context& context) {
  int64_t bytes = 0;
  for (const ProblemTensor& tensor : problem.tensors()) bytes += static_cast<int64_t>(bytes_of(tensor.view));
  refuse_too_large(problem, bytes, *context.info);
  const std::vector<DeviceBuffer> inputs = make_random_inputs(problem, context.threads);
  for (int i = rotation_count(bytes, *context.info); i > 0; --i) {
    sets_.emplace_back(problem, *context.info, &inputs, context.stream);
  }
}

ReferenceCheck::ReferenceCheck(const AnyProblem& problem, const Context& context)
    : context_(context), trial_(context), inputs_(make_random_inputs(problem, context.threads)) {
  expected_ = std::make_unique<BoundProblem>(problem, device_info(Device{}), &inputs_, nullptr);
  const AnyProblem& host_problem = expected_->problem();
  const int reference = host_problem.kernel_count() - 1;
  const Support support = host_problem.supports(reference);
  KP_INTERNAL_CHECK(support, problem.op(), ": the last kernel, ", problem.kernel_name(reference),
                    ", must be the reference and take every problem on the host: ", support.reason());
  OwnContext host;
  TrialContext(host).run(host_problem, reference, host_problem.heuristic(reference));
  actual_ = std::make_unique<BoundProblem>(problem, *context.info, &inputs_, context.stream);
}

ReferenceCheck::~ReferenceCheck() = default;

bool ReferenceCheck::try_check(int kernel, const std::string& config, std::string& failure) {
  const AnyProblem& problem = actual_->problem();
  if (!problem.supports(kernel)) return false;
  const std::vector<std::string> configs = problem.configs(kernel);
  const auto place = std::find(configs.begin(), configs.end(), config);
  if (place == configs.end()) return false;
  actual_->poison_outputs(context_.stream);
  actual_->restore_updated(inputs_, context_.stream);
  trial_.run(problem, kernel, static_cast<int>(place - configs.begin()));
  for (size_t i = 0; i < actual_->tensors().size(); ++i) {
    const ProblemTensor& tensor = actual_->tensors()[i];
    if (tensor.role == Role::kInput) continue;
    DeviceBuffer host(Device{}, actual_->buffer(i).bytes());
    actual_->buffer(i).copy_to_host(host.data(), context_.stream);
    TensorView actual = tensor.view;
    actual.data = host.data();
    actual.device = Device{};
    const Tolerance tolerance = tolerance_for(tensor.precision, terms_per_element(actual_->tensors(), actual));
    const std::string difference = compare(actual, expected_->tensors()[i].view, tolerance);
    if (!difference.empty()) {
      failure = concat("wrong result: ", tensor.name, ": ", difference);
      return true;
    }
  }
  failure.clear();
  return true;
}

}  // namespace kernel_pytorch::registry
