// The library's own threads, used where no framework brings its own (C++ users, the command line, tuning).
// Survives fork(): the child starts a new pool at its first use.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::cpu_device {

// One pool per process, Options::threads wide (default: one per allowed core). The calling thread is one of the
// workers.
KP_EXPORT Threads& own_threads();

}  // namespace kernel_pytorch::cpu_device
