// Compiled kernels on disk, in Options::cache_directory/cubins (0700), one file each, named by content key and NVRTC
// version. A bad file is a miss with one warning; a directory that cannot be written means memory only, said once.
#pragma once

#include <optional>
#include <string>

#include "kernel_pytorch/device/device_code.h"
#include "kernel_pytorch/jit/cubin_file.h"

namespace kernel_pytorch::jit {

// Names what is compiled, not by which NVRTC: hash of the source, its includes, the entry, the options, the
// architecture and the file format. Bundles use it alone.
std::string content_key(const DeviceCode& code, const std::string& architecture);

// The kernel from the bundle, the cache or NVRTC, in this order; compiled once even when several threads and processes
// ask at the same time (whoever waits longer than kLockSeconds compiles for itself).
CubinFile obtain_cubin(const DeviceCode& code, const std::string& architecture);

inline constexpr double kLockSeconds = 20;

std::string cubin_cache_directory();  // empty: the cache is off
// `nvrtc_version` "" accepts a file of any NVRTC.
std::optional<CubinFile> load_cubin(const std::string& key, const std::string& nvrtc_version, const std::string& entry);
void store_cubin(const std::string& key, const std::string& nvrtc_version, const CubinFile& file);

// A file of a bundle; never removed, since the bundle is not ours.
std::optional<CubinFile> load_from_bundle(const std::string& key, const std::string& entry);

}  // namespace kernel_pytorch::jit
