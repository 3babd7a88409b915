#include "kernel_pytorch/jit/ptxas_log.h"

#include <algorithm>
#include <charconv>

namespace kernel_pytorch::jit {
namespace {

int number_at(std::string_view text) {
  int number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

// The number before `suffix` in the line: "..., 16 bytes spill stores" -> 16.
int number_before(std::string_view line, std::string_view suffix) {
  const size_t end = line.find(suffix);
  if (end == std::string_view::npos) return 0;
  size_t start = end;
  while (start > 0 && line[start - 1] >= '0' && line[start - 1] <= '9') --start;
  return number_at(line.substr(start, end - start));
}

bool is_warning(std::string_view line) {
  // C7519 ("warpgroup.arrive is injected") costs nothing; the other C75xx say that wgmma lost its overlap.
  if (line.find("(C75") != std::string_view::npos) return line.find("(C7519)") == std::string_view::npos;
  return line.find("warning") != std::string_view::npos;
}

}  // namespace

PtxasSummary summarize_ptxas_log(std::string_view log) {
  PtxasSummary summary;
  while (!log.empty()) {
    const size_t line_end = std::min(log.find('\n'), log.size());
    const std::string_view line = log.substr(0, line_end);
    log.remove_prefix(std::min(line_end + 1, log.size()));
    if (const size_t used = line.find("Used "); used != std::string_view::npos) {
      summary.registers = std::max(summary.registers, number_at(line.substr(used + 5)));
    }
    summary.spill_bytes += number_before(line, " bytes spill stores");
    if (is_warning(line)) summary.warnings.append(line).append("\n");
  }
  return summary;
}

}  // namespace kernel_pytorch::jit
