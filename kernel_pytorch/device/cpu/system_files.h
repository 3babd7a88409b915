// The one-line files of /proc and /sys.
#pragma once

#include <fstream>
#include <string>

namespace kernel_pytorch::cpu_device {

// Empty where there is no such file.
inline std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

}  // namespace kernel_pytorch::cpu_device
