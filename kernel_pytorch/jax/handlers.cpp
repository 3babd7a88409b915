// The XLA FFI handlers of every declared op, for CPUs and for NVIDIA GPUs. A call site names its op, its tensors and
// its results in attributes; options are attributes under their own names:
//
//   op = "rms_norm", tensors = "x weight", results = "output", eps = 1e-6
//
// A list of tensors repeats its name. Buffers of XLA are row-major; several tensors may be slices of one, in its last
// dimension but one: "query@0:32+key@32:8+value@40:8" are heads of a packed buffer, first head and count. A result that
// has the name of a tensor is that tensor, written in place (XLA aliases the two buffers). A last result called
// "workspace" is memory for the op's scratch, so that a call allocates nothing and may become part of a CUDA graph
// (XLA's command buffers); its size was asked for while tracing, when the kernels were compiled and loaded too.
// Everything else, checks and errors included, is the C interface's kp_call.
//
// The attribute "site" is a hash of all others: what they say is read once and found by it later. XLA has a state for
// that, whose type must be registered before the handlers; jax 0.10 registers both in the other order.
#include <algorithm>
#include <array>
#include <charconv>
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

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> found;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    found.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return found;
}

// A tensor in a buffer: all of it, or a slice of the last dimension but one.
struct Part {
  std::string name;
  int64_t begin = 0;
  int64_t size = -1;  // all
};

bool read_part(std::string_view word, Part& part) {
  const size_t at = word.find('@');
  part.name = word.substr(0, at);
  if (at == std::string_view::npos) return !part.name.empty();
  const std::vector<std::string_view> numbers = split(word.substr(at + 1), ':');
  if (numbers.size() != 2) return false;
  for (size_t i = 0; i < 2; ++i) {
    const std::string_view number = numbers[i];
    const auto read = std::from_chars(number.data(), number.data() + number.size(), i == 0 ? part.begin : part.size);
    if (read.ec != std::errc{} || read.ptr != number.data() + number.size()) return false;
  }
  return part.begin >= 0 && part.size >= 0;
}

// The tensors of a call, as kp_call takes them.
class Views {
 public:
  // Pointers to tensors stay valid while at most `count` are added.
  void clear(size_t count) {
    tensors_.clear();
    tensors_.reserve(count);
    shapes_.resize(std::max(count, shapes_.size()));
  }
  ffi::Error add(const Part& part, const ffi::AnyBuffer& buffer, kp_device device) {
    const int32_t dtype = dtype_of(buffer.element_type());
    if (dtype < 0) return invalid(part.name + " has an element type that no op takes");
    const auto sizes = buffer.dimensions();
    const bool is_pairs = buffer.element_type() == ffi::DataType::U32;
    if (is_pairs && (sizes.size() == 0 || sizes.back() != 2)) {
      return invalid(part.name + " has unsigned 32-bit integers that do not come in pairs");
    }
    kp_tensor tensor{.data = buffer.untyped_data(),
                     .dtype = dtype,
                     .device = device,
                     .rank = static_cast<int32_t>(sizes.size()) - is_pairs,
                     .sizes = sizes.begin(),
                     .strides = nullptr};
    if (part.size >= 0) {
      const size_t rank = sizes.size();
      if (rank < 2 || rank > kMostDimensions || is_pairs || part.begin + part.size > sizes[rank - 2]) {
        return invalid(part.name + " is a slice that its buffer does not have");
      }
      Shape& shape = shapes_[tensors_.size()];
      int64_t stride = 1;
      for (size_t i = rank; i-- > 0; stride *= sizes[i]) {
        shape.sizes[i] = sizes[i];
        shape.strides[i] = stride;
      }
      shape.sizes[rank - 2] = part.size;
      const int64_t element = buffer.element_count() == 0 ? 0 : buffer.size_bytes() / buffer.element_count();
      tensor.data = static_cast<char*>(tensor.data) + part.begin * shape.strides[rank - 2] * element;
      tensor.sizes = shape.sizes.data();
      tensor.strides = shape.strides.data();
    }
    tensors_.push_back(tensor);
    return ffi::Error::Success();
  }
  const kp_tensor* last() const { return &tensors_.back(); }

 private:
  static constexpr size_t kMostDimensions = 8;
  struct Shape {
    std::array<int64_t, kMostDimensions> sizes, strides;
  };
  std::vector<kp_tensor> tensors_;
  std::vector<Shape> shapes_;
};

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
          if (!read_buffers(text, tensors_)) return invalid("kernel_pytorch: tensors are " + std::string(text));
        } else if (name == "results") {
          if (!read_buffers(text, results_)) return invalid("kernel_pytorch: results are " + std::string(text));
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
    static thread_local Views views;  // kept, so that calls do not allocate
    static thread_local std::vector<kp_argument> arguments;
    views.clear(parts_);
    arguments.assign(options_.begin(), options_.end());
    for (size_t i = 0; i < args.size(); ++i) {
      const auto buffer = args.get<ffi::AnyBuffer>(i);
      if (!buffer) return buffer.error();
      for (const Part& part : tensors_[i]) {
        if (ffi::Error error = views.add(part, *buffer, device); error.failure()) return error;
        if (i > 0 && part.name == tensors_[i - 1].back().name) {
          arguments.back().kind = KP_TENSORS;
          ++arguments.back().count;
        } else {
          arguments.push_back(kp_tensor_argument(part.name.c_str(), views.last()));
        }
      }
    }
    void* workspace = nullptr;
    size_t workspace_bytes = 0;
    for (size_t i = 0; i < rets.size(); ++i) {
      const std::string& first = results_[i].front().name;
      if (is_tensor(first)) continue;  // written in place
      auto buffer = rets.get<ffi::AnyBuffer>(i);
      if (!buffer) return buffer.error();
      if (first == kWorkspace) {
        workspace = (*buffer)->untyped_data();
        workspace_bytes = (*buffer)->size_bytes();
        continue;
      }
      for (const Part& part : results_[i]) {
        if (ffi::Error error = views.add(part, **buffer, device); error.failure()) return error;
        arguments.push_back(kp_tensor_argument(part.name.c_str(), views.last()));
      }
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

  // False where a word is no tensor.
  bool read_buffers(std::string_view text, std::vector<std::vector<Part>>& buffers) {
    for (const std::string_view word : split(text, ' ')) {
      std::vector<Part>& parts = buffers.emplace_back();
      for (const std::string_view one : split(word, '+')) {
        if (!read_part(one, parts.emplace_back())) return false;
        ++parts_;
      }
    }
    return true;
  }

  bool is_tensor(const std::string& name) const {
    return std::ranges::any_of(tensors_, [&](const std::vector<Part>& parts) { return parts.front().name == name; });
  }

  std::string op_;
  std::vector<std::vector<Part>> tensors_, results_;  // of each buffer
  size_t parts_ = 0;                                  // of all of them
  std::deque<std::string> texts_;                     // options point into them
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

// What handlers are registered with; an XLA that knows only earlier ones drops them without a word.
extern "C" KP_API int kp_jax_ffi_major() {
  return XLA_FFI_API_MAJOR;
}
extern "C" KP_API int kp_jax_ffi_minor() {
  return XLA_FFI_API_MINOR;
}

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
