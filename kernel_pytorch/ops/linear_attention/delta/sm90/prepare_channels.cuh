#pragma once
#include "kernel_pytorch/ops/linear_attention/delta/sm90/prepare.cuh"
