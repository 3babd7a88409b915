// The file of one compiled kernel, in the cache and in bundles: a header with lengths and a checksum, then the entry it
// was compiled from, its lowered name, and the code. Files are untrusted: nothing is used before both hold.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kernel_pytorch::jit {

struct CubinFile {
  std::string entry;
  std::string lowered_name;
  std::string cubin;  // or PTX, for a device newer than the NVRTC that made it
};

// Part of every key: a new layout never meets old files.
inline constexpr uint32_t kCubinFormatVersion = 1;

std::string encode_cubin_file(const CubinFile& file);

// Says in `problem` why not.
std::optional<CubinFile> decode_cubin_file(std::string_view bytes, std::string& problem);

// Writes to a temporary name in the same folder, syncs, renames: readers see the old file, no file, or the whole new
// one. False with errno's words in `problem`; nothing is left behind then.
bool write_file_atomically(const std::string& path, std::string_view bytes, std::string& problem);

// nullopt where the file is not there (problem empty), cannot be read, or could be another user's work (problem says
// why).
std::optional<std::string> read_whole_file(const std::string& path, std::string& problem);

// Temporary names of write_file_atomically; one that a killed process left is removed when it is old.
bool is_temporary_name(std::string_view name);

}  // namespace kernel_pytorch::jit
