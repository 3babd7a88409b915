// Which kernels need no compiling again: a text file of their keys, which name source, includes, options and
// architecture. The first line names the compiler, since another one may spill where this one does not.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "kernel_pytorch/device/device_code.h"
#include "kernel_pytorch/jit/jit.h"

namespace kernel_pytorch::cli {

class KnownKernels {
 public:
  // A file that is not there, or that another compiler led to, knows nothing. `again` is "part/parts": these are
  // compiled all the same, so that as many calls with every part in turn check all of them.
  KnownKernels(std::string path, const std::string& again, std::string architecture);

  // Those of `codes` to compile for the architecture.
  std::vector<DeviceCode> left_of(const std::vector<DeviceCode>& codes);
  size_t skipped() const { return kept_.size(); }
  // Adds the keys of what has compiled now. With `of_all`, what no kernel has any longer goes.
  void record(const std::vector<jit::CompiledKernel>& compiled, bool of_all) const;

 private:
  std::string path_, architecture_;
  size_t part_ = 0, parts_ = 0;
  std::set<std::string> known_, kept_;
};

}  // namespace kernel_pytorch::cli
