// The XLA FFI handlers of every declared op, for CPUs and for NVIDIA GPUs. A call site names its op, its tensors and
// its results in attributes; options are attributes under their own names:
//
//   op = "rms_norm", tensors = "x weight", results = "output", eps = 1e-6
//
// A list of tensors repeats its name. A result that has the name of a tensor is that tensor, written in place (XLA
// aliases the two buffers). A last result called "workspace" is memory for the op's scratch, so that a call allocates
// nothing and may become part of a CUDA graph (XLA's command buffers); its size was asked for while tracing, when the
// kernels were compiled and loaded too. Everything else, checks and errors included, is the C interface's kp_call.
//
// The attribute "site" is a hash of all others: what they say is read once and found by it later. XLA has a state for
// that, whose type must be registered before the handlers; jax 0.10 registers both in the other order.
#include <algorithm>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kernel_pytorch/c/kernel_pytorch.h"
#include "kernel_pytorch/jax/threads.h"
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

// What a call site says in attributes: the arguments of kp_call but for tensors' addresses.
class Site {
 public:
  // Returns what is wrong with the attributes.
  ffi::Error read(ffi::Dictionary attributes) {
    for (auto it = attributes.begin(); it != attributes.end(); ++it) {
      const std::string_view name = *it;
      if (attributes.isa<std::string_view>(it)) {
        const std::string_view text = *attributes.get<std::string_view>(name);
        if (name == "op") {
          op_ = text;
        } else if (name == "tensors") {
          tensors_ = words(text);
        } else if (name == "results") {
          results_ = words(text);
        } else {
          const char* kept = texts_.emplace_back(text).c_str();
          options_.push_back(kp_text_argument(texts_.emplace_back(name).c_str(), kept));
        }
      } else if (attributes.isa<bool>(it)) {
        options_.push_back(kp_flag_argument(texts_.emplace_back(name).c_str(), *attributes.get<bool>(name)));
      } else if (name == "site") {
        continue;
      } else if (attributes.isa<int64_t>(it)) {
        options_.push_back(kp_integer_argument(texts_.emplace_back(name).c_str(), *attributes.get<int64_t>(name)));
      } else if (attributes.isa<double>(it)) {
        options_.push_back(kp_number_argument(texts_.emplace_back(name).c_str(), *attributes.get<double>(name)));
      } else {
        return invalid("kernel_pytorch: the attribute " + std::string(name) + " is no flag, 64-bit number or text");
      }
    }
    if (op_.empty() || results_.empty()) return invalid("kernel_pytorch: a call needs the attributes op and results");
    return ffi::Error::Success();
  }

  ffi::Error call(kp_context* context, kp_device device, ffi::RemainingArgs args, ffi::RemainingRets rets) const {
    if (tensors_.size() != args.size() || results_.size() != rets.size()) {
      return invalid(op_ + ": " + std::to_string(args.size()) + " tensors and " + std::to_string(rets.size()) +
                     " results, and names for " + std::to_string(tensors_.size()) + " and " +
                     std::to_string(results_.size()));
    }
    static thread_local std::vector<kp_tensor> views;  // kept, so that calls do not allocate
    static thread_local std::vector<kp_argument> arguments;
    views.clear();
    views.reserve(args.size() + rets.size());  // arguments point into it
    arguments.assign(options_.begin(), options_.end());
    for (size_t i = 0; i < args.size(); ++i) {
      const auto buffer = args.get<ffi::AnyBuffer>(i);
      if (!buffer) return buffer.error();
      if (ffi::Error error = add_view(tensors_[i], *buffer, device, views); error.failure()) return error;
      if (i > 0 && tensors_[i] == tensors_[i - 1]) {
        arguments.back().kind = KP_TENSORS;
        ++arguments.back().count;
      } else {
        arguments.push_back(kp_tensor_argument(tensors_[i].c_str(), &views.back()));
      }
    }
    void* workspace = nullptr;
    size_t workspace_bytes = 0;
    for (size_t i = 0; i < rets.size(); ++i) {
      if (std::ranges::find(tensors_, results_[i]) != tensors_.end()) continue;  // written in place
      auto buffer = rets.get<ffi::AnyBuffer>(i);
      if (!buffer) return buffer.error();
      if (results_[i] == kWorkspace) {
        workspace = (*buffer)->untyped_data();
        workspace_bytes = (*buffer)->size_bytes();
        continue;
      }
      if (ffi::Error error = add_view(results_[i], **buffer, device, views); error.failure()) return error;
      arguments.push_back(kp_tensor_argument(results_[i].c_str(), &views.back()));
    }
    const kp_status status =
        kp_call_with_workspace(context, op_.c_str(), arguments.data(), arguments.size(), workspace, workspace_bytes);
    if (status == KP_OK) return ffi::Error::Success();
    const ffi::ErrorCode code = status == KP_INVALID_ARGUMENT ? ffi::ErrorCode::kInvalidArgument
                                : status == KP_UNSUPPORTED    ? ffi::ErrorCode::kUnimplemented
                                                              : ffi::ErrorCode::kInternal;
    return ffi::Error(code, kp_last_error());
  }

 private:
  static constexpr std::string_view kWorkspace = "workspace";  // no op has an output of this name: _workspace.py checks

  static std::vector<std::string> words(std::string_view text) {
    std::vector<std::string> found;
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = std::min(text.find(' ', begin), text.size());
      found.emplace_back(text.substr(begin, end - begin));
      begin = end + 1;
    }
    return found;
  }

  static ffi::Error add_view(const std::string& name, const ffi::AnyBuffer& buffer, kp_device device,
                             std::vector<kp_tensor>& views) {
    const int32_t dtype = dtype_of(buffer.element_type());
    if (dtype < 0) return invalid(name + " has an element type that no op takes");
    const auto sizes = buffer.dimensions();
    const bool is_pairs = buffer.element_type() == ffi::DataType::U32;
    if (is_pairs && (sizes.size() == 0 || sizes.back() != 2)) {
      return invalid(name + " has unsigned 32-bit integers that do not come in pairs");
    }
    views.push_back({.data = buffer.untyped_data(),
                     .dtype = dtype,
                     .device = device,
                     .rank = static_cast<int32_t>(sizes.size()) - is_pairs,
                     .sizes = sizes.begin(),
                     .strides = nullptr});
    return ffi::Error::Success();
  }

  std::string op_;
  std::vector<std::string> tensors_, results_;
  std::deque<std::string> texts_;  // options point into them
  std::vector<kp_argument> options_;
};

// Null where the attributes are no call; `error` says why.
const Site* site_of(ffi::Dictionary attributes, ffi::Error& error) {
  constexpr size_t kMost = 16384;  // programs come and go
  static thread_local std::unordered_map<int64_t, Site> sites;
  const auto hash = attributes.get<int64_t>("site");
  if (!hash) {
    error = invalid("kernel_pytorch: a call needs the attribute site");
    return nullptr;
  }
  if (const auto known = sites.find(*hash); known != sites.end()) return &known->second;
  if (sites.size() >= kMost) sites.clear();
  Site& site = sites[*hash];
  error = site.read(attributes);
  if (error.success()) return &site;
  sites.erase(*hash);
  return nullptr;
}

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

ffi::Error last_error() {
  return ffi::Error(ffi::ErrorCode::kInternal, kp_last_error());
}

ffi::Error run_on_cpu(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      ffi::Dictionary attributes) {
  ffi::Error error = ffi::Error::Success();
  const Site* site = site_of(attributes, error);
  if (site == nullptr) return error;
  static thread_local Contexts contexts;
  constexpr kp_device kCpu{KP_CPU, 0};
  kp_context* context = contexts.get(kCpu, nullptr);
  if (context == nullptr) return last_error();
  const XlaThreads threads(pool);
  if (kp_context_set_threads(context, threads.threads()) != KP_OK) return last_error();
  return site->call(context, kCpu, args, rets);
}

ffi::Error run_on_cuda(void* stream, int32_t ordinal, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attributes) {
  ffi::Error error = ffi::Error::Success();
  const Site* site = site_of(attributes, error);
  if (site == nullptr) return error;
  static thread_local Contexts contexts;
  const kp_device device{KP_CUDA, ordinal};
  kp_context* context = contexts.get(device, stream);
  if (context == nullptr) return last_error();
  return site->call(context, device, args, rets);
}

ffi::Error do_nothing(ffi::RemainingArgs, ffi::RemainingRets) {
  return ffi::Error::Success();
}

}  // namespace

extern "C" KP_API XLA_FFI_Error* kp_jax_cpu(XLA_FFI_CallFrame* frame);
extern "C" KP_API XLA_FFI_Error* kp_jax_cuda(XLA_FFI_CallFrame* frame);
// What XLA spends on a call by itself: benchmarks subtract it.
extern "C" KP_API XLA_FFI_Error* kp_jax_nothing(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    kp_jax_cpu, run_on_cpu,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs<ffi::Dictionary>());
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
