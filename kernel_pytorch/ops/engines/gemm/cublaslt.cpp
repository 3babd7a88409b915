#include "kernel_pytorch/ops/engines/gemm/cublaslt.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <bit>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/device/rehearsal.h"
#include "kernel_pytorch/jit/jit.h"

namespace kernel_pytorch::vendor {
namespace {

constexpr const char* kAbsent =
    "libcublasLt is not found: neither loaded by a framework, nor beside NVRTC, nor where the system looks; install "
    "nvidia-cublas";
constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
constexpr int kChoices = 6;
constexpr uint64_t kMostWorkspace = uint64_t{32} << 20;

// cublasLt.h's numbers, of which these are never changed.
enum DescriptionField : int {
  kTransposeA = 3,
  kTransposeB = 4,
  kEpilogue = 7,
  kBiasPointer = 8,
  kScaleA = 17,
  kScaleB = 18,
  kFastAccumulator = 25
};
enum LayoutField : int { kBatchCount = 5, kBatchStride = 6 };
enum PreferenceField : int { kWorkspaceBytes = 1, kAlignmentA = 5, kAlignmentB = 6, kAlignmentC = 7, kAlignmentD = 8 };
constexpr int kComputeFloat32 = 68;                                     // fp32 is multiplied as it is, not as tf32
constexpr int kEpilogueNone = 1, kEpilogueRelu = 2, kEpilogueBias = 4;  // relu and bias: their sum

struct Algorithm {  // as the library writes its list
  uint64_t words[8];
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};
static_assert(sizeof(Algorithm) == 96);

#define KP_CUBLASLT_FUNCTIONS(of)                                                                                     \
  of(create, "cublasLtCreate", (void**)) of(create_description, "cublasLtMatmulDescCreate", (void**, int, int))       \
      of(set_description, "cublasLtMatmulDescSetAttribute", (void*, int, const void*, size_t))                        \
          of(destroy_description, "cublasLtMatmulDescDestroy", (void*))                                               \
              of(create_layout, "cublasLtMatrixLayoutCreate", (void**, int, uint64_t, uint64_t, int64_t))             \
                  of(set_layout, "cublasLtMatrixLayoutSetAttribute", (void*, int, const void*, size_t)) of(           \
                      destroy_layout, "cublasLtMatrixLayoutDestroy", (void*))                                         \
                      of(create_preference, "cublasLtMatmulPreferenceCreate", (void**)) of(                           \
                          set_preference, "cublasLtMatmulPreferenceSetAttribute", (void*, int, const void*, size_t))  \
                          of(destroy_preference, "cublasLtMatmulPreferenceDestroy", (void*))                          \
                              of(algorithms, "cublasLtMatmulAlgoGetHeuristic",                                        \
                                 (void*, void*, void*, void*, void*, void*, void*, int, Algorithm*, int*))            \
                                  of(multiply, "cublasLtMatmul",                                                      \
                                     (void*, void*, const void*, const void*, void*, const void*, void*, const void*, \
                                      const void*, void*, void*, void*, const uint64_t*, void*, size_t, void*))

struct Library {
#define KP_CUBLASLT_MEMBER(member, symbol, parameters) int(*member) parameters = nullptr;
  KP_CUBLASLT_FUNCTIONS(KP_CUBLASLT_MEMBER)
#undef KP_CUBLASLT_MEMBER
  size_t version = 0;
};

void* open_library() {
  for (const char* name : kNames) {
    if (void* handle = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return handle;
  }
  const std::filesystem::path nvrtc(jit::nvrtc_info().path);
  for (const char* name : kNames) {
    const auto sibling = nvrtc.parent_path() / name, wheel = nvrtc.parent_path() / "../../cublas/lib" / name;
    for (const std::filesystem::path& path : {sibling, wheel}) {
      if (!path.has_parent_path()) continue;
      if (void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
    }
    if (void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return handle;
  }
  return nullptr;
}

// Kept for good; null as long as there is none.
const Library* library() {
  static std::mutex mutex;
  static std::unique_ptr<const Library> found;
  const std::lock_guard lock(mutex);
  if (found != nullptr) return found.get();
  void* handle = open_library();
  if (handle == nullptr) return nullptr;
  auto next = std::make_unique<Library>();
#define KP_CUBLASLT_RESOLVE(member, symbol, parameters)                           \
  next->member = reinterpret_cast<decltype(next->member)>(dlsym(handle, symbol)); \
  if (next->member == nullptr) return nullptr;
  KP_CUBLASLT_FUNCTIONS(KP_CUBLASLT_RESOLVE)
#undef KP_CUBLASLT_RESOLVE
  const auto version = reinterpret_cast<size_t (*)()>(dlsym(handle, "cublasLtGetVersion"));
  if (version == nullptr) return nullptr;
  next->version = version();
  found = std::move(next);
  return found.get();
}

void require(int status, const std::string& label, std::string_view what) {
  if (status != 0) fail(ErrorCode::kDevice, label, ": cuBLASLt: ", what, ": status ", status);
}

// With the device current. A handle is made once for each device and serves all threads.
void* handle_of(const Library& lt, int device, const std::string& label) {
  static std::mutex mutex;
  static std::map<int, void*> handles;
  const std::lock_guard lock(mutex);
  void*& handle = handles[device];
  if (handle == nullptr) require(lt.create(&handle), label, "making a handle");
  return handle;
}

using Destroy = int (*)(void*);
using Owned = std::unique_ptr<void, Destroy>;

int type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 0;
    case DType::kFloat16:
      return 2;
    case DType::kBFloat16:
      return 14;
    case DType::kFloat8E4M3:
      return 28;
    default:
      return 29;  // e5m2
  }
}

uint32_t alignment_of(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return address == 0 ? 256u : static_cast<uint32_t>(std::min<uintptr_t>(address & (~address + 1), 256));
}

// The library counts along columns: a matrix whose rows are dense is its own transpose there.
struct Layout {
  bool transposed = false;
  int64_t rows = 0, columns = 0, leading = 0, batch_stride = 0;

  explicit Layout(const TensorView& view) : transposed(view.strides[2] != 1), batch_stride(view.strides[0]) {
    rows = view.sizes[transposed ? 1 : 2];
    columns = view.sizes[transposed ? 2 : 1];
    leading = view.strides[transposed ? 2 : 1];
  }
};

// Everything one call needs, in the library's own objects. What it calls A is our b, and its B our a.
class Call {
 public:
  Call(const Library& lt, const LtProduct& product, const std::string& label)
      : lt_(lt), product_(product), label_(label) {
    void* description = nullptr;
    require(lt.create_description(&description, kComputeFloat32, 0), label, "describing");
    description_ = Owned(description, lt.destroy_description);
    const int transposes[2] = {Layout(product.b).transposed, Layout(product.a).transposed};
    set(kTransposeA, transposes[0]);
    set(kTransposeB, transposes[1]);
    const int epilogue = (product.relu ? kEpilogueRelu : 0) + (product.bias.is_present() ? kEpilogueBias : 0);
    set(kEpilogue, epilogue == 0 ? kEpilogueNone : epilogue);
    if (product.bias.is_present()) set<const void*>(kBiasPointer, product.bias.data);
    if (product.scale_a != nullptr) {
      set<const void*>(kScaleA, product.scale_b);
      set<const void*>(kScaleB, product.scale_a);
      set<int8_t>(kFastAccumulator, product.fast_accumulator);
    }
    add_layout(product.b);
    add_layout(product.a);
    add_layout(added());
    add_layout(product.output);
  }

  std::vector<Algorithm> algorithms(void* handle) const {
    void* made = nullptr;
    require(lt_.create_preference(&made), label_, "making a preference");
    const Owned preference(made, lt_.destroy_preference);
    const auto prefer = [&](int field, auto value) {
      require(lt_.set_preference(preference.get(), field, &value, sizeof(value)), label_, "setting a preference");
    };
    prefer(kWorkspaceBytes, kMostWorkspace);
    prefer(kAlignmentA, alignment_of(product_.b.data));
    prefer(kAlignmentB, alignment_of(product_.a.data));
    prefer(kAlignmentC, alignment_of(added().data));
    prefer(kAlignmentD, alignment_of(product_.output.data));
    std::vector<Algorithm> list(kChoices);
    int count = 0;
    const int status = lt_.algorithms(handle, description_.get(), layout(0), layout(1), layout(2), layout(3),
                                      preference.get(), kChoices, list.data(), &count);
    list.resize(status == 0 ? static_cast<size_t>(count) : 0);
    std::erase_if(list, [](const Algorithm& algorithm) { return algorithm.status != 0; });
    return list;
  }

  void run(void* handle, const Algorithm& algorithm, Context& context) const {
    void* workspace = algorithm.workspace_bytes > 0 ? context.scratch->allocate(algorithm.workspace_bytes) : nullptr;
    if (Rehearsal::is_running()) return;
    const float beta = product_.residual.is_present() ? product_.beta : 0.0f;
    require(lt_.multiply(handle, description_.get(), &product_.alpha, product_.b.data, layout(0), product_.a.data,
                         layout(1), &beta, added().data, layout(2), product_.output.data, layout(3), algorithm.words,
                         workspace, algorithm.workspace_bytes, context.stream),
            label_, "multiplying");
  }

 private:
  const TensorView& added() const { return product_.residual.is_present() ? product_.residual : product_.output; }
  void* layout(int index) const { return layouts_[static_cast<size_t>(index)].get(); }
  template <class T>
  void set(int field, T value) {
    require(lt_.set_description(description_.get(), field, &value, sizeof(value)), label_, "setting an attribute");
  }
  void add_layout(const TensorView& view) {
    const Layout shape(view);
    void* made = nullptr;
    require(lt_.create_layout(&made, type_of(view.dtype), static_cast<uint64_t>(shape.rows),
                              static_cast<uint64_t>(shape.columns), shape.leading),
            label_, "laying out a matrix");
    layouts_.emplace_back(made, lt_.destroy_layout);
    const auto count = static_cast<int32_t>(product_.output.sizes[0]);
    if (count == 1) return;
    require(lt_.set_layout(made, kBatchCount, &count, sizeof(count)), label_, "laying out a batch");
    require(lt_.set_layout(made, kBatchStride, &shape.batch_stride, sizeof(shape.batch_stride)), label_,
            "laying out a batch");
  }

  const Library& lt_;
  const LtProduct& product_;
  const std::string& label_;
  Owned description_{nullptr, nullptr};
  std::vector<Owned> layouts_;
};

// What the list may depend on.
using Key = std::array<int64_t, 28>;
Key key_of(const LtProduct& product, int device) {
  Key key{};
  size_t at = 0;
  const auto add = [&](auto value) { key[at++] = static_cast<int64_t>(value); };
  const TensorView& added = product.residual.is_present() ? product.residual : product.output;
  for (const TensorView* view : {&product.a, &product.b, &added, &product.output}) {
    const Layout layout(*view);
    add(type_of(view->dtype) * 2 + layout.transposed);
    add(layout.rows), add(layout.columns), add(layout.leading), add(layout.batch_stride);
    add(alignment_of(view->data));
  }
  add(product.output.sizes[0]);
  add(device * 4 + product.relu * 2 + product.bias.is_present());
  add(product.residual.is_present() * 2 + product.fast_accumulator);
  return key;
}

}  // namespace

const char* cublaslt_obstacle(const DeviceInfo& device) {
  if (device.is_amd()) return "is a library for NVIDIA's GPUs, and this is AMD's";
  return library() == nullptr ? kAbsent : nullptr;
}

std::vector<std::string> cublaslt_configs() {
  const Library* lt = library();
  std::vector<std::string> texts;
  for (int i = 0; i < kChoices; ++i)
    texts.push_back(concat("choice=", i, " version=", lt == nullptr ? 0 : lt->version));
  return texts;
}

void cublaslt_multiply(const LtProduct& product, int choice, Context& context, const std::string& label) {
  static std::mutex mutex;
  static std::map<Key, std::vector<Algorithm>> lists;
  const Library* lt = library();
  if (lt == nullptr) fail(ErrorCode::kUnsupported, label, ": ", kAbsent);
  const int device = context.info->device.index;
  const cuda_device::CurrentDevice current(device);
  void* handle = handle_of(*lt, device, label);
  const Call call(*lt, product, label);
  const Key key = key_of(product, device);
  std::vector<Algorithm> list;
  {
    const std::lock_guard lock(mutex);
    const auto place = lists.find(key);
    if (place != lists.end()) list = place->second;
  }
  if (list.empty()) {
    list = call.algorithms(handle);
    if (list.empty()) fail(ErrorCode::kUnsupported, label, ": cuBLASLt has no algorithm for this product");
    const std::lock_guard lock(mutex);
    lists[key] = list;
  }
  call.run(handle, list[std::min(static_cast<size_t>(choice), list.size() - 1)], context);
}

}  // namespace kernel_pytorch::vendor
