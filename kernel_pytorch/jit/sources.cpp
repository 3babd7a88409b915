// Reads #include lines of embedded sources. Only the form at the start of a line counts, which is the only one we
// write.
#include "kernel_pytorch/jit/sources.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/jit/jit.h"

namespace kernel_pytorch::jit {
namespace {

const EmbeddedSource* find_source(std::string_view path) {
  for (const EmbeddedSource& source : embedded_sources()) {
    if (source.path == path) return &source;
  }
  return nullptr;
}

std::vector<std::string_view> quoted_includes(std::string_view text) {
  constexpr std::string_view kInclude = "#include \"";
  std::vector<std::string_view> paths;
  for (size_t at = 0; at < text.size();) {
    const size_t line_end = std::min(text.find('\n', at), text.size());
    std::string_view line = text.substr(at, line_end - at);
    at = line_end + 1;
    if (!line.starts_with(kInclude)) continue;
    line.remove_prefix(kInclude.size());
    paths.push_back(line.substr(0, line.find('"')));
  }
  return paths;
}

bool holds(const std::vector<EmbeddedSource>& files, std::string_view path) {
  return std::any_of(files.begin(), files.end(), [&](const EmbeddedSource& file) { return file.path == path; });
}

constexpr std::string_view kNvidia = "kernel_pytorch/cuda/", kAmd = "kernel_pytorch/hip/";
constexpr std::string_view kNvidiaFolder = "kernel_pytorch/cuda/ptx/";

// The source that an include of this name means on an AMD GPU; nothing where there is none. Of cuda/ptx every file has
// a form of its own or none, of cuda/tile a few.
std::optional<EmbeddedSource> find_amd_source(std::string_view path) {
  const EmbeddedSource* found =
      path.starts_with(kNvidia) ? find_source(concat(kAmd, path.substr(kNvidia.size()))) : nullptr;
  if (found == nullptr && !path.starts_with(kNvidiaFolder)) found = find_source(std::string(path));
  if (found == nullptr) return std::nullopt;
  return EmbeddedSource{path, found->text};
}

// `find` gives the source behind an include's name, if there is one.
template <class Find>
SourceClosure make_closure(const std::vector<EmbeddedSource>& roots, const Find& find) {
  SourceClosure closure{roots, "", 0};
  for (size_t i = 0; i < closure.files.size(); ++i) {
    for (std::string_view include : quoted_includes(closure.files[i].text)) {
      const std::optional<EmbeddedSource> found = find(include);
      if (found.has_value() && !holds(closure.files, include)) closure.files.push_back(*found);
    }
  }
  std::sort(closure.files.begin() + 1, closure.files.end(),
            [](const EmbeddedSource& a, const EmbeddedSource& b) { return a.path < b.path; });
  Fnv128 hash;
  for (const EmbeddedSource& file : closure.files) hash.add_part(file.path).add_part(file.text);
  closure.hash = hash.hex();
  closure.short_hash = hash.low64();
  return closure;
}

EmbeddedSource root_source(const std::string& path) {
  const EmbeddedSource* root = find_source(path);
  KP_INTERNAL_CHECK(root != nullptr, "jit: ", path,
                    " is not among the embedded device sources; its name must end in .cuh or _cuda.h");
  return *root;
}

SourceClosure make_closure(const std::string& path, const EmbeddedSource* generated = nullptr) {
  return make_closure({root_source(path)}, [&](std::string_view include) -> std::optional<EmbeddedSource> {
    const EmbeddedSource* found = include == kGeneratedPath ? generated : find_source(include);
    return found == nullptr ? std::nullopt : std::optional(*found);
  });
}

}  // namespace

const SourceClosure& closure_of(const std::string& path) {
  static std::mutex mutex;
  static auto* known = new std::map<std::string, std::unique_ptr<const SourceClosure>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<const SourceClosure>& slot = (*known)[path];
  if (slot == nullptr) slot = std::make_unique<const SourceClosure>(make_closure(path));
  return *slot;
}

SourceClosure closure_of(const DeviceCode& code) {
  if (code.generated.empty()) return closure_of(code.source);
  const EmbeddedSource generated{kGeneratedPath, code.generated};
  SourceClosure closure = make_closure(code.source, &generated);
  KP_INTERNAL_CHECK(holds(closure.files, kGeneratedPath), "jit: ", code.source, " has a generated text and does not ",
                    "include \"", kGeneratedPath, "\"");
  return closure;
}

HipClosure hip_closure_of(const DeviceCode& code) {
  HipClosure result;
  result.closure = make_closure({root_source(code.source), root_source(std::string(kAmdWords))},
                                [&](std::string_view include) -> std::optional<EmbeddedSource> {
                                  if (include == kGeneratedPath) {
                                    // HIPRTC refuses an empty header.
                                    if (code.generated.empty()) return std::nullopt;
                                    return EmbeddedSource{kGeneratedPath, code.generated};
                                  }
                                  const std::optional<EmbeddedSource> found = find_amd_source(include);
                                  if (!found.has_value() && include.starts_with(kNvidiaFolder)) {
                                    result.missing = include.substr(kNvidiaFolder.size());
                                  }
                                  return found;
                                });
  return result;
}

uint64_t source_hash(const std::string& source) {
  return closure_of(source).short_hash;
}

}  // namespace kernel_pytorch::jit
