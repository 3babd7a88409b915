#pragma once

#include <string_view>

namespace kernel_pytorch {

inline constexpr std::string_view kVersion = KP_VERSION;  // from CMake's project()

}  // namespace kernel_pytorch
