// The declared ops as JSON: what a front end needs to make shapes, batching rules and documents of them.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/c/json.h"

namespace kernel_pytorch::c_interface {

KP_EXPORT Json report_declarations();

}  // namespace kernel_pytorch::c_interface
