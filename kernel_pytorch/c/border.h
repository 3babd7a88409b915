// The border between the core and C: exceptions become a status and this thread's message, results a copy for the
// caller.
#pragma once

#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/c/json.h"
#include "kernel_pytorch/c/kernel_pytorch.h"

namespace kernel_pytorch::c_interface {

// A fixed buffer: reporting a failure must not be able to fail.
struct LastError {
  char text[4096] = "";
  void set(const char* message) noexcept {
    size_t length = std::strlen(message);
    if (length >= sizeof(text)) {
      length = sizeof(text) - 1;
      while (length > 0 && (static_cast<unsigned char>(message[length]) & 0xc0) == 0x80) --length;  // whole characters
    }
    std::memcpy(text, message, length);
    text[length] = '\0';
  }
};
inline thread_local LastError last_error;

// The one border: whatever the core throws becomes a status and this thread's message.
template <class Work>
kp_status guarded(const Work& work) noexcept {
  try {
    work();
    return KP_OK;
  } catch (const Error& error) {
    last_error.set(error.what());
    return static_cast<kp_status>(error.code());
  } catch (const std::bad_alloc&) {
    last_error.set("out of memory");
    return KP_DEVICE;
  } catch (const std::exception& error) {
    last_error.set(error.what());
    return KP_INTERNAL;
  } catch (...) {
    last_error.set("an exception of unknown type");
    return KP_INTERNAL;
  }
}

template <class Work>
kp_status answered(char** result, const Work& work) noexcept {
  if (result != nullptr) *result = nullptr;
  return guarded([&] {
    KP_CHECK(result != nullptr, "C interface: the result pointer is NULL");
    const std::string text = work();
    char* copy = static_cast<char*>(std::malloc(text.size() + 1));
    if (copy == nullptr) throw std::bad_alloc();
    std::memcpy(copy, text.c_str(), text.size() + 1);
    *result = copy;
  });
}

inline Json parsed(const char* request) {
  return parse_request(request == nullptr ? std::string_view() : request);
}

}  // namespace kernel_pytorch::c_interface
