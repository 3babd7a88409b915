// A code object is an ELF file; a note of its own type holds the metadata as MessagePack (LLVM's AMDGPU backend, code
// object V3 and later).
#include "kernel_pytorch/jit/code_object.h"

#include <elf.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::jit {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kNoteName = "AMDGPU";
constexpr uint32_t kMetadataNote = 32;

// A header at an offset, where the file is long enough.
template <class Header>
std::optional<Header> read_at(std::string_view file, uint64_t offset) {
  if (offset > file.size() || file.size() - offset < sizeof(Header)) return std::nullopt;
  Header header;
  std::memcpy(&header, file.data() + offset, sizeof(Header));
  return header;
}

std::string_view part_of(std::string_view file, uint64_t offset, uint64_t bytes) {
  if (offset > file.size() || file.size() - offset < bytes) return {};
  return file.substr(offset, bytes);
}

uint64_t padded(uint64_t bytes) {
  return (bytes + 3) / 4 * 4;
}

// The text of the metadata note among a section's notes; empty where there is none.
std::string_view metadata_in(std::string_view notes) {
  uint64_t at = 0;
  while (const std::optional<Elf64_Nhdr> note = read_at<Elf64_Nhdr>(notes, at)) {
    const uint64_t name = at + sizeof(Elf64_Nhdr), text = name + padded(note->n_namesz);
    if (note->n_type == kMetadataNote && part_of(notes, name, note->n_namesz).starts_with(kNoteName)) {
      return part_of(notes, text, note->n_descsz);
    }
    at = text + padded(note->n_descsz);
  }
  return {};
}

std::string_view metadata_of(std::string_view file) {
  const std::optional<Elf64_Ehdr> header = read_at<Elf64_Ehdr>(file, 0);
  if (!header.has_value() || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return {};
  for (int i = 0; i < header->e_shnum; ++i) {
    const auto section = read_at<Elf64_Shdr>(file, header->e_shoff + uint64_t{header->e_shentsize} * i);
    if (!section.has_value() || section->sh_type != SHT_NOTE) continue;
    const std::string_view text = metadata_in(part_of(file, section->sh_offset, section->sh_size));
    if (!text.empty()) return text;
  }
  return {};
}

// "5total" of "space::total<float>": how a symbol spells the function's own name.
std::string mangled_part(const std::string& entry) {
  const std::string name = entry.substr(0, entry.find('<'));
  const size_t colon = name.rfind(':');
  const std::string own = colon == std::string::npos ? name : name.substr(colon + 1);
  return concat(own.size(), own);
}

std::string symbol_of(const Json& kernel) {
  const auto symbol = kernel.is_object() ? kernel.find(".name") : kernel.end();
  return symbol != kernel.end() && symbol->is_string() ? symbol->get<std::string>() : "";
}

// The one kernel whose symbol holds the name; null where there is none, or several. A source may hold other kernels.
Json kernel_of(const Json& metadata, const std::string& name) {
  const auto kernels = metadata.is_object() ? metadata.find("amdhsa.kernels") : metadata.end();
  if (kernels == metadata.end() || !kernels->is_array()) return nullptr;
  Json found;
  for (const Json& kernel : *kernels) {
    if (symbol_of(kernel).find(name) == std::string::npos) continue;
    if (!found.is_null()) return nullptr;
    found = kernel;
  }
  return found;
}

}  // namespace

CodeObjectSummary summarize_code_object(std::string_view code_object, const std::string& entry) {
  const std::string_view text = metadata_of(code_object);
  const Json metadata = Json::from_msgpack(text.begin(), text.end(), /*strict=*/true, /*allow_exceptions=*/false);
  const Json kernel = kernel_of(metadata, mangled_part(entry));
  if (!kernel.is_object()) {
    fail(ErrorCode::kDevice, "jit: ", entry, ": the compiler's ", code_object.size(),
         " bytes are no code object with metadata of one kernel of this name");
  }
  const auto number = [&](const char* name) {
    const auto found = kernel.find(name);
    return found != kernel.end() && found->is_number_integer() ? found->get<int>() : 0;
  };
  CodeObjectSummary summary;
  summary.symbol = symbol_of(kernel);
  summary.vector_registers = number(".vgpr_count");
  summary.scalar_registers = number(".sgpr_count");
  summary.vector_spills = number(".vgpr_spill_count");
  summary.scalar_spills = number(".sgpr_spill_count");
  summary.private_bytes = number(".private_segment_fixed_size");
  summary.shared_bytes = number(".group_segment_fixed_size");
  summary.wave_lanes = number(".wavefront_size");
  // Memory is for what accumulation registers have no room for: the waves of a SIMD share 512 registers a lane (gfx90a
  // and later), in steps of eight.
  const int waves = std::max(1, (number(".max_flat_workgroup_size") + 255) / 256);
  const bool has_room = number(".agpr_count") > 0 && summary.vector_registers + 8 <= 512 / waves;
  summary.spilled_bytes = has_room ? 0 : std::min(4 * summary.vector_spills, summary.private_bytes);
  return summary;
}

}  // namespace kernel_pytorch::jit
