// Stands before the shipped header of this name when a kernel runs on a CPU.
#pragma once
#include <cstddef>
#include <cstdint>
#define KP_SHARED_CODE
