// The XLA FFI handlers of every declared op, one for CPUs and one for NVIDIA GPUs. A call site names its op, its
// tensors and its results in attributes; options are attributes under their own names:
//
//   op = "rms_norm", tensors = "x weight", results = "output", eps = 1e-6
//
// A list of tensors repeats its name. A result that has the name of a tensor is that tensor, written in place (XLA
// aliases the two buffers). A last result called "workspace" is memory for the op's scratch, so that a call allocates
// nothing and may become part of a CUDA graph (XLA's command buffers); its size was asked for while tracing, when the
// kernels were compiled and loaded too. Everything else, checks and errors included, is the C interface's kp_call.
#include <array>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/c/kernel_pytorch.h"
#include "xla/ffi/api/ffi.h"

namespace kernel_pytorch::jax_ops {
namespace {

namespace ffi = xla::ffi;

ffi::Error invalid(std::string message) {
  return ffi::Error::InvalidArgument(std::move(message));
}

// -1: a type that no op takes. JAX has no 64-bit integers unless x64 is enabled: two words of 32 bits, the lower first,
// stand for one.
int32_t dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return KP_FLOAT32;
    case ffi::DataType::F64:
      return KP_FLOAT64;
    case ffi::DataType::BF16:
      return KP_BFLOAT16;
    case ffi::DataType::F16:
      return KP_FLOAT16;
    case ffi::DataType::F8E4M3FN:
      return KP_FLOAT8_E4M3;
    case ffi::DataType::F8E5M2:
      return KP_FLOAT8_E5M2;
    case ffi::DataType::S8:
      return KP_INT8;
    case ffi::DataType::S32:
      return KP_INT32;
    case ffi::DataType::S64:
    case ffi::DataType::U32:
      return KP_INT64;
    case ffi::DataType::PRED:
      return KP_BOOL;
    default:
      return -1;
  }
}

// Words of a text, each followed by a zero, so that every one is a C string.
class Names {
 public:
  explicit Names(std::string_view text) : text_(text) {
    for (size_t begin = 0; begin < text_.size();) {
      const size_t end = std::min(text_.find(' ', begin), text_.size());
      if (end < text_.size()) text_[end] = '\0';
      starts_.push_back(begin);
      begin = end + 1;
    }
  }
  size_t count() const { return starts_.size(); }
  const char* operator[](size_t index) const { return text_.c_str() + starts_[index]; }

 private:
  std::string text_;
  std::vector<size_t> starts_;
};

class Call {
 public:
  Call(kp_device device, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes)
      : device_(device), args_(args), rets_(rets), attributes_(attributes) {}

  ffi::Error run(kp_context* context) {
    const auto op = attributes_.get<std::string_view>("op"), tensors = attributes_.get<std::string_view>("tensors"),
               results = attributes_.get<std::string_view>("results");
    if (!op || !tensors || !results) return invalid("kernel_pytorch: a call needs the attributes op, tensors, results");
    const std::string name(*op);
    const Names tensor_names(*tensors), result_names(*results);
    if (tensor_names.count() != args_.size() || result_names.count() != rets_.size()) {
      return invalid(name + ": " + std::to_string(args_.size()) + " tensors and " + std::to_string(rets_.size()) +
                     " results, and names for " + std::to_string(tensor_names.count()) + " and " +
                     std::to_string(result_names.count()));
    }
    views_.reserve(args_.size() + rets_.size());
    arguments_.reserve(args_.size() + rets_.size() + attributes_.size());
    texts_.reserve(2 * attributes_.size());
    if (ffi::Error error = add_tensors(tensor_names); error.failure()) return error;
    if (ffi::Error error = add_results(tensor_names, result_names); error.failure()) return error;
    if (ffi::Error error = add_options(); error.failure()) return error;
    const kp_status status = kp_call_with_workspace(context, name.c_str(), arguments_.data(), arguments_.size(),
                                                    workspace_, workspace_bytes_);
    if (status == KP_OK) return ffi::Error::Success();
    const ffi::ErrorCode code = status == KP_INVALID_ARGUMENT ? ffi::ErrorCode::kInvalidArgument
                                : status == KP_UNSUPPORTED    ? ffi::ErrorCode::kUnimplemented
                                                              : ffi::ErrorCode::kInternal;
    return ffi::Error(code, kp_last_error());
  }

 private:
  ffi::Error add_view(const char* name, const ffi::AnyBuffer& buffer) {
    const int32_t dtype = dtype_of(buffer.element_type());
    if (dtype < 0) return invalid(std::string(name) + " has an element type that no op takes");
    const auto sizes = buffer.dimensions();
    const bool is_pairs = buffer.element_type() == ffi::DataType::U32;
    if (is_pairs && (sizes.size() == 0 || sizes.back() != 2)) {
      return invalid(std::string(name) + " has unsigned 32-bit integers that do not come in pairs");
    }
    views_.push_back({.data = buffer.untyped_data(),
                      .dtype = dtype,
                      .device = device_,
                      .rank = static_cast<int32_t>(sizes.size()) - is_pairs,
                      .sizes = sizes.begin(),
                      .strides = nullptr});
    return ffi::Error::Success();
  }

  ffi::Error add_tensors(const Names& names) {
    for (size_t i = 0; i < args_.size(); ++i) {
      const auto buffer = args_.get<ffi::AnyBuffer>(i);
      if (!buffer) return buffer.error();
      if (ffi::Error error = add_view(names[i], *buffer); error.failure()) return error;
      if (i > 0 && std::string_view(names[i]) == names[i - 1]) {
        arguments_.back().kind = KP_TENSORS;
        ++arguments_.back().count;
      } else {
        arguments_.push_back(kp_tensor_argument(names[i], &views_.back()));
      }
    }
    return ffi::Error::Success();
  }

  ffi::Error add_results(const Names& tensors, const Names& results) {
    for (size_t i = 0; i < rets_.size(); ++i) {
      bool is_in_place = false;
      for (size_t j = 0; j < tensors.count(); ++j) {
        is_in_place = is_in_place || std::string_view(tensors[j]) == results[i];
      }
      if (is_in_place) continue;
      auto buffer = rets_.get<ffi::AnyBuffer>(i);
      if (!buffer) return buffer.error();
      if (std::string_view(results[i]) == kWorkspace) {
        workspace_ = (*buffer)->untyped_data();
        workspace_bytes_ = (*buffer)->size_bytes();
        continue;
      }
      if (ffi::Error error = add_view(results[i], **buffer); error.failure()) return error;
      arguments_.push_back(kp_tensor_argument(results[i], &views_.back()));
    }
    return ffi::Error::Success();
  }

  ffi::Error add_options() {
    for (auto it = attributes_.begin(); it != attributes_.end(); ++it) {
      if (*it == "op" || *it == "tensors" || *it == "results") continue;
      texts_.emplace_back(*it);
      const char* name = texts_.back().c_str();
      if (attributes_.isa<bool>(it)) {
        arguments_.push_back(kp_flag_argument(name, *attributes_.get<bool>(*it)));
      } else if (attributes_.isa<int64_t>(it)) {
        arguments_.push_back(kp_integer_argument(name, *attributes_.get<int64_t>(*it)));
      } else if (attributes_.isa<double>(it)) {
        arguments_.push_back(kp_number_argument(name, *attributes_.get<double>(*it)));
      } else if (attributes_.isa<std::string_view>(it)) {
        texts_.emplace_back(*attributes_.get<std::string_view>(*it));
        arguments_.push_back(kp_text_argument(name, texts_.back().c_str()));
      } else {
        return invalid("kernel_pytorch: the attribute " + texts_.back() + " is no flag, 64-bit number or text");
      }
    }
    return ffi::Error::Success();
  }

  static constexpr std::string_view kWorkspace = "workspace";  // no op has an output of this name: _workspace.py checks
  kp_device device_;
  void* workspace_ = nullptr;
  size_t workspace_bytes_ = 0;
  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  ffi::Dictionary attributes_;
  std::vector<kp_tensor> views_;
  std::vector<kp_argument> arguments_;
  std::vector<std::string> texts_;  // reserved in full: arguments point into them
};

// A thread's contexts, one per device and stream: a context serves one thread at a time and keeps its scratch memory.
class Contexts {
 public:
  Contexts() = default;
  Contexts(const Contexts&) = delete;
  Contexts& operator=(const Contexts&) = delete;
  ~Contexts() {
    for (const Entry& entry : entries_) kp_context_destroy(entry.context);
  }
  // Null where it could not be made; kp_last_error() says why.
  kp_context* get(kp_device device, void* stream) {
    for (const Entry& entry : entries_) {
      if (entry.stream == stream && entry.index == device.index) return entry.context;
    }
    kp_context* context = nullptr;
    if (kp_context_create(device, stream, &context) != KP_OK) return nullptr;
    entries_.push_back({device.index, stream, context});
    return context;
  }

 private:
  struct Entry {
    int32_t index;
    void* stream;
    kp_context* context;
  };
  std::vector<Entry> entries_;
};

ffi::Error run(kp_device device, void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
               ffi::Dictionary attributes) {
  static thread_local Contexts cpu, cuda;
  kp_context* context = (device.kind == KP_CPU ? cpu : cuda).get(device, stream);
  if (context == nullptr) return ffi::Error(ffi::ErrorCode::kInternal, kp_last_error());
  return Call(device, args, rets, attributes).run(context);
}

ffi::Error run_on_cpu(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) {
  return run({KP_CPU, 0}, nullptr, args, rets, attributes);
}

ffi::Error run_on_cuda(void* stream, int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attributes) {
  return run({KP_CUDA, device}, stream, args, rets, attributes);
}

ffi::Error do_nothing(ffi::RemainingArgs, ffi::RemainingRets) {
  return ffi::Error::Success();
}

}  // namespace

extern "C" KP_API XLA_FFI_Error* kp_jax_cpu(XLA_FFI_CallFrame* frame);
extern "C" KP_API XLA_FFI_Error* kp_jax_cuda(XLA_FFI_CallFrame* frame);
// What XLA spends on a call by itself: benchmarks subtract it.
extern "C" KP_API XLA_FFI_Error* kp_jax_nothing(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(kp_jax_cpu, run_on_cpu,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs<ffi::Dictionary>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kp_jax_cuda, run_on_cuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<ffi::Dictionary>(),
                              {ffi::Traits::kCmdBufferCompatible});
// Not for command buffers: XLA refuses a graph of nothing.
XLA_FFI_DEFINE_HANDLER_SYMBOL(kp_jax_nothing, do_nothing, ffi::Ffi::Bind().RemainingArgs().RemainingRets());

}  // namespace kernel_pytorch::jax_ops
