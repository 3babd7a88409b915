// A kernel is a row of its op's list: plain function pointers, no inheritance, no static registration.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernel_pytorch/base/field.h"
#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/device/device_code.h"
#include "kernel_pytorch/device/device_info.h"
#include "kernel_pytorch/registry/tolerance.h"
#include "kernel_pytorch/tuning/key.h"

namespace kernel_pytorch::registry {

// Yes, or a reason that a person can act on.
class Support {
 public:
  static Support yes() { return Support(); }
  // `reason` is a literal, so that a warm call that passes over a kernel pays nothing for it.
  static Support no(const char* reason) { return Support(reason); }
  static Support unless(const char* obstacle) { return Support(obstacle); }  // null: yes
  explicit operator bool() const { return reason_ == nullptr; }
  std::string_view reason() const { return reason_ == nullptr ? std::string_view() : reason_; }

 private:
  Support() = default;
  explicit Support(const char* reason) : reason_(reason) {}
  const char* reason_ = nullptr;
};

enum class Origin : uint8_t { kOurs, kVendor };

template <class Problem>
struct Kernel {
  std::string_view name;  // "cuda_block"
  Origin origin = Origin::kOurs;
  Support (*supports)(const Problem&, const DeviceInfo&) = nullptr;  // never throws
  // Text of each config, e.g. "threads=256 vectors=2"; the text is what is remembered. Empty list: one config, "".
  // May depend only on the device and on what Operation::describe tells the key: a warm call keeps the index.
  std::vector<std::string> (*configs)(const Problem&, const DeviceInfo&) = nullptr;
  int (*heuristic)(const Problem&, const DeviceInfo&) = nullptr;  // index into configs; null: 0
  void (*run)(const Problem&, int config, Context&) = nullptr;
  // Hash of its device source or code version, part of the tuning key; null: changes with the library's version.
  uint64_t (*source_hash)() = nullptr;
  std::vector<DeviceCode> (*device_code)() = nullptr;  // every instantiation; null: none
  // It takes what faster kernels do not: a caller who has a vendor's kernel had better use that. References are such.
  bool is_fallback = false;
};

// Whether a tensor of a problem is read, written, or both (in place), for whoever fills, compares or counts them.
enum class Role : uint8_t { kInput, kOutput, kUpdated };

// What a trial puts into a tensor that is read. Indices lie in [0, limit) and seeds are any bits; offsets ascend from 0
// to limit, which is what cu_seqlens are; places are words of 2:4 metadata, two of four in each four bits.
enum class Content : uint8_t { kNormal, kPositive, kIndices, kOffsets, kSeeds, kPlaces };
struct Filling {
  Content content = Content::kNormal;
  int64_t limit = 8;
};

// The kernels of an Operation, best first, the reference last.
template <const auto& kFirst, const auto&... kOthers>
std::span<const std::remove_cvref_t<decltype(kFirst)>> kernel_list() {
  static const std::remove_cvref_t<decltype(kFirst)> kKernels[] = {kFirst, kOthers...};
  return kKernels;
}

using RequestOptions = std::vector<std::pair<std::string, std::string>>;  // {"residual", "1"}, {"weight_dtype", "fp32"}

// How a test, the tuner or the command line asks for a problem: shape and words, no data.
struct ProblemRequest {
  std::vector<int64_t> shape;
  DType dtype = DType::kFloat32;
  Device device;
  RequestOptions options;  // the op's
};

// A list of requests, made by calling it.
struct RequestList {
  std::vector<ProblemRequest> all;

  void operator()(std::vector<int64_t> shape, DType dtype, RequestOptions options = {}) {
    all.push_back({.shape = std::move(shape), .dtype = dtype, .device = {}, .options = std::move(options)});
  }
};

// The requests that an op is tested and measured on: a table (requests_of in request_options.h says how it is written),
// or a function that makes them.
class RequestSource {
 public:
  constexpr RequestSource() = default;
  constexpr RequestSource(const char* table) : table_(table) {}
  constexpr RequestSource(std::vector<ProblemRequest> (*make)()) : make_(make) {}
  std::vector<ProblemRequest> operator()() const;

 private:
  const char* table_ = "";
  std::vector<ProblemRequest> (*make_)() = nullptr;
};

// What requests of an op say besides what follows from its list of fields.
struct RequestForm {
  std::string_view shape{};    // "... m n k": the dimensions that a shape gives; empty: those of the leading input
  std::string_view type_of{};  // the tensor whose type is the request's, where that is not the leading input
  std::string_view sizes{};    // "parts=4 key_heads=heads": dimensions that options of these names give, or else a
                               // number or another dimension; "inner=hidden?gated": twice that with a flag;
                               // without "=": only the option
  std::string_view options{};  // the words that Operation::arrange reads
  std::string_view shrinks{};  // the dimension of which a smaller problem has less; empty: the leading tensor's first
};

// Fewest bytes that must move and floating-point operations that must be done: the two numbers of a roofline.
struct Cost {
  int64_t bytes = 0;
  int64_t flops = 0;
};

using TensorVisitor = void (*)(void* state, std::string_view name, Role role, TensorView& view);

// What visit_tensors of an op is written with: hands over the tensors that are present.
struct PresentTensors {
  TensorVisitor visit;
  void* state;
  void operator()(std::string_view name, Role role, TensorView& view) const {
    if (view.is_present()) visit(state, name, role, view);
  }
};

// A visitor that adds a tensor's bytes to an int64_t, those updated in place twice.
inline void add_tensor_bytes(void* bytes, std::string_view, Role role, TensorView& view) {
  *static_cast<int64_t*>(bytes) += view.byte_count() * (role == Role::kUpdated ? 2 : 1);
}

// Bytes of all tensors that a problem names: Cost::bytes of most ops.
template <class Problem>
int64_t tensor_bytes(const Problem& problem, void (*visit_tensors)(Problem&, TensorVisitor visit, void* state)) {
  int64_t bytes = 0;
  Problem copy = problem;
  visit_tensors(copy, add_tensor_bytes, &bytes);
  return bytes;
}

// The problems that a problem is composed of, in the order of their calls; each chooses its own kernel.
class AnyProblem;
using Parts = std::vector<std::unique_ptr<AnyProblem>>;

// An op as the registry sees it.
template <class Problem>
struct Operation {
  std::string_view name;                                            // "rms_norm_forward"
  std::span<const Kernel<Problem>> (*kernels)() = nullptr;          // best first, the reference last
  void (*describe)(const Problem&, tuning::KeyBuilder&) = nullptr;  // what a tuned choice may depend on, bucketed;
                                                                    // of a declared problem: besides its fields
  // Calls visit(state, name, role, view) for each tensor that is present; the visitor may set view.data.
  void (*visit_tensors)(Problem&, TensorVisitor visit, void* state) = nullptr;
  Filling (*filling)(const Problem&, std::string_view tensor) = nullptr;  // null: as Rules::content says
  Precision (*precision)(const Problem&, std::string_view tensor,
                         DType own) = nullptr;  // null: of the tensor's own type
  // Inputs of a trial that must agree with each other, made so in host memory after it was filled; null: they need not.
  void (*set_trial_inputs)(const Problem& on_host) = nullptr;
  // A problem of a request is made of views without data, then checked like every call (make_problem in declared.h).
  // `make` makes the tensors; null: they follow from `fields`, and `arrange` may change them by options of its own.
  Fields fields{};                                   // of the problem, where it is declared by a list
  RequestForm request{};                             // of a declared problem
  Problem (*make)(const ProblemRequest&) = nullptr;  // throws on bad words
  void (*arrange)(const ProblemRequest&, Problem&) = nullptr;
  void (*check)(Problem&, Device) = nullptr;                      // the op's own; leaves the form that kernels take
  Problem (*shrink)(const Problem&, int64_t elements) = nullptr;  // the same kind of problem, fewer rows
  Cost (*cost)(const Problem&) = nullptr;
  int flops_per_element = 0;  // of a declared problem's leading tensor, where there is no `cost`; bytes: of all tensors
  RequestSource shapes{};     // for tests and benchmarks, on the CPU: for a GPU set the device
  Parts (*parts)(const Problem&, const DeviceInfo&) = nullptr;  // null: it is computed by a kernel of its own
};

}  // namespace kernel_pytorch::registry
