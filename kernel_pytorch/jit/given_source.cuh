// A device source that is not part of the library: DeviceCode::generated is all of it (`kpt compile --source FILE`). It
// may include every embedded source, so kernels of others can be written in our primitives.
#pragma once

#include "kernel_pytorch/generated.cuh"
