// Everything the environment can say to the library, read once. The only getenv of the project is in options.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/export.h"

namespace kernel_pytorch {

struct Options {
  std::string
      cache_directory;    // KERNEL_PYTORCH_CACHE_DIR, else $XDG_CACHE_HOME/kernel_pytorch, else ~/.cache/kernel_pytorch
  std::string log_level;  // KERNEL_PYTORCH_LOG: error, warning, info, debug
  std::string cpu_isa;    // KERNEL_PYTORCH_CPU_ISA: highest level used ("v3", "neon"); empty: the best there is
  std::string nvrtc_library;      // KERNEL_PYTORCH_NVRTC: path of libnvrtc to use; empty: search
  std::string hiprtc_library;     // KERNEL_PYTORCH_HIPRTC: path of libhiprtc to use; empty: the system's
  std::string bundle_directory;   // KERNEL_PYTORCH_BUNDLE: cubins written by `kpt compile`
  int64_t cubin_cache_megabytes;  // KERNEL_PYTORCH_CUBIN_CACHE_MB: 0 turns the cubin cache off
  int threads;                    // KERNEL_PYTORCH_THREADS: of the library's own pool; 0: one per core allowed
  bool autotune;                  // KERNEL_PYTORCH_AUTOTUNE=1: tune on first sight of a problem
  bool disable_cuda;              // KERNEL_PYTORCH_DISABLE_CUDA=1: behave as on a machine without a GPU
  bool amd;                       // KERNEL_PYTORCH_AMD=1: GPUs are AMD's, by libamdhip64; never run on hardware
  bool check_values;              // KERNEL_PYTORCH_CHECK=1: read offsets on a GPU back and check them, at every call
  bool no_color;                  // NO_COLOR set to anything
};

struct OptionDescription {
  std::string_view variable;
  std::string value;      // in force now, as text
  bool from_environment;  // set by the user, not the default
  std::string_view meaning;
};

// The options in force. Read from the environment at the first call; a value that makes no sense is reported once and
// ignored.
KP_EXPORT const Options& options();
KP_EXPORT std::vector<OptionDescription> describe_options();
// What the environment says now, whatever is in force.
KP_EXPORT Options read_environment();

// An environment variable of another program (HOME, LD_LIBRARY_PATH, ONEDNN_MAX_CPU_ISA), for reports
// and searches.
KP_EXPORT std::string environment(std::string_view variable);

// Replaces the options for the rest of the process: for tests and for `kpt --cache-dir`.
KP_EXPORT void set_options_for_process(const Options& replacement);

}  // namespace kernel_pytorch
