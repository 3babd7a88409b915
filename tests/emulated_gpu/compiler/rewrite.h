// Device text that g++ cannot take as it stands.
#pragma once

#include <string>

namespace emulated {

// Declarations of shared memory become references into the block's memory (device/kernel_table.h), and a loop that
// waits with an empty body lets others run.
std::string rewrite(const std::string& source);

}  // namespace emulated
