// Shared memory of a kernel's declarations, and the table by which the driver finds and calls it. The compiler rewrites
//   __shared__ T name[n];         to  using emulated_type_1 = T[n]; auto& name = emulated_static_shared<...>();
//   extern __shared__ T name[];   to  auto* name = emulated_dynamic_shared<...>();
#pragma once

extern "C" EmulatedKernel emulated_kernel;

// Each declaration of each instantiated function is a type of its own, whose place is taken when the object is loaded.
template <class T, class Tag, unsigned kAlignment>
struct EmulatedStatic {
  static const unsigned offset;
};
inline unsigned emulated_reserve(unsigned bytes, unsigned alignment) {
  const unsigned start = (emulated_kernel.static_shared_bytes + alignment - 1) / alignment * alignment;
  emulated_kernel.static_shared_bytes = start + bytes;
  return 1024 + start;  // after what the system has
}
template <class T, class Tag, unsigned kAlignment>
const unsigned EmulatedStatic<T, Tag, kAlignment>::offset = emulated_reserve(sizeof(T), alignof(T) > kAlignment
                                                                                            ? alignof(T)
                                                                                            : kAlignment);

template <class T, class Tag, unsigned kAlignment>
inline T& emulated_static_shared() {
  return *reinterpret_cast<T*>(emulated_shared_memory + EmulatedStatic<T, Tag, kAlignment>::offset);
}

template <unsigned kAlignment>
struct EmulatedDynamic {
  static const unsigned alignment;
};
inline unsigned emulated_align_dynamic(unsigned alignment) {
  if (emulated_kernel.dynamic_shared_alignment < alignment) emulated_kernel.dynamic_shared_alignment = alignment;
  return alignment;
}
template <unsigned kAlignment>
const unsigned EmulatedDynamic<kAlignment>::alignment = emulated_align_dynamic(kAlignment);

template <class T, unsigned kAlignment>
inline T* emulated_dynamic_shared() {
  const unsigned alignment = emulated_kernel.dynamic_shared_alignment;
  const unsigned used = EmulatedDynamic<(alignof(T) > kAlignment ? alignof(T) : kAlignment)>::alignment;
  const unsigned end = 1024 + emulated_kernel.static_shared_bytes;
  return reinterpret_cast<T*>(emulated_shared_memory + (end + alignment - 1) / alignment * alignment + used * 0);
}

// Calls a kernel with arguments by address, as cuLaunchKernelEx has them.
template <class Function>
struct EmulatedCall;
template <class... Parameters>
struct EmulatedCall<void (*)(Parameters...)> {
  static constexpr unsigned kCount = sizeof...(Parameters);
  static constexpr unsigned kBytes[kCount + 1] = {sizeof(Parameters)..., 0};
  template <unsigned... kIndices>
  struct Indices {};
  template <unsigned... kIndices>
  static void call(void (*function)(Parameters...), void** arguments, Indices<kIndices...>) {
    function(*static_cast<Parameters*>(arguments[kIndices])...);
  }
  static void call(void (*function)(Parameters...), void** arguments) {
    call(function, arguments, Indices<__integer_pack(kCount)...>());
  }
};
