// The border between the core and torch: the one place where an Error of the core becomes an exception that torch
// shows to Python, as a RuntimeError with our message and nothing around it.
#pragma once

#include <new>
#include <stdexcept>
#include <utility>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::torch_ops {

template <class Body>
auto at_border(Body&& body) {
  try {
    return std::forward<Body>(body)();
  } catch (const Error& error) {
    throw std::runtime_error(error.message());
  } catch (const std::bad_alloc&) {
    throw std::runtime_error("kernel_pytorch: out of host memory");
  }
}

}  // namespace kernel_pytorch::torch_ops
