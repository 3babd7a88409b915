#include "kernel_pytorch/cli/terminal.h"
#include "kernel_pytorch/cli/format.h"

#include <algorithm>
#include <cstdio>

#include <sys/ioctl.h>
#include <unistd.h>

#include "kernel_pytorch/base/options.h"

namespace kernel_pytorch::cli {
namespace {

bool color_is_on() {
  static const bool on = isatty(STDOUT_FILENO) != 0 && !options().no_color && environment("TERM") != "dumb";
  return on;
}

std::string_view code_of(Color color) {
  switch (color) {
    case Color::kBold:
      return "1";
    case Color::kDim:
      return "2";
    case Color::kRed:
      return "31";
    case Color::kGreen:
      return "32";
    case Color::kYellow:
      return "33";
    case Color::kPlain:
      break;
  }
  return "";
}

bool starts_character(char byte) {
  return (static_cast<unsigned char>(byte) & 0xc0) != 0x80;
}

size_t character_count(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), starts_character));
}

std::string_view first_characters(std::string_view text, size_t count) {
  size_t end = 0;
  for (; end < text.size(); ++end) {
    if (starts_character(text[end]) && count-- == 0) break;
  }
  return text.substr(0, end);
}

size_t terminal_columns() {
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

std::string paint(Color color, std::string_view text) {
  if (color == Color::kPlain || !color_is_on()) return std::string(text);
  return format("\033[{}m{}\033[0m", code_of(color), text);
}

Table::Table(std::vector<std::string> headings) : headings_(std::move(headings)) {
  for (std::string& heading : headings_) {
    right_aligned_.push_back(heading.starts_with('>'));
    if (right_aligned_.back()) heading.erase(0, 1);
  }
}

void Table::add(std::vector<Cell> row) {
  row.resize(headings_.size(), Cell(""));
  rows_.push_back(std::move(row));
}

std::string Table::line(const std::vector<Cell>& row, const std::vector<size_t>& widths) const {
  std::string text = "  ";
  for (size_t column = 0; column < row.size(); ++column) {
    const std::string padding(widths[column] - character_count(row[column].text), ' ');
    const std::string painted = paint(row[column].color, row[column].text);
    text += right_aligned_[column] ? padding + painted : painted + padding;
    if (column + 1 < row.size()) text += "  ";
  }
  text.erase(text.find_last_not_of(' ') + 1);
  return text + "\n";
}

std::string Table::text() const {
  std::vector<Cell> headings;
  std::vector<size_t> widths;
  for (const std::string& heading : headings_) {
    headings.emplace_back(heading, Color::kDim);
    widths.push_back(character_count(heading));
  }
  for (const auto& row : rows_) {
    for (size_t column = 0; column < row.size(); ++column) {
      widths[column] = std::max(widths[column], character_count(row[column].text));
    }
  }
  std::string text = line(headings, widths);
  for (const auto& row : rows_) text += line(row, widths);
  return text;
}

ProgressLine::ProgressLine() : is_terminal_(isatty(STDERR_FILENO) != 0), start_(std::chrono::steady_clock::now()) {}

double ProgressLine::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

void ProgressLine::show(std::string_view label, int done, int total, std::string_view note, double seconds_left) {
  if (!is_terminal_) return show_plainly(label, done, total, note);
  constexpr int kBarColumns = 20;
  const int filled = total > 0 ? std::clamp(kBarColumns * done / total, 0, kBarColumns) : 0;
  double estimate = done > 0 ? seconds() / done * (total - done) : seconds_left;
  if (seconds_left >= 0) estimate = std::min(estimate, seconds_left);
  const std::string line =
      format("{} [{}{}] {}/{}  {}{}", label, std::string(filled, '#'), std::string(kBarColumns - filled, '-'), done,
             total, estimate >= 0 ? "eta " + duration_text(estimate) + "  " : "", note);
  std::fputs(format("\r{}\033[K", first_characters(line, terminal_columns() - 1)).c_str(), stderr);
  std::fflush(stderr);
  shown_ = true;
}

void ProgressLine::show_plainly(std::string_view label, int done, int total, std::string_view note) {
  constexpr double kSecondsBetween = 10;
  if (seconds() < next_plain_seconds_) return;
  next_plain_seconds_ = seconds() + kSecondsBetween;
  if (next_plain_seconds_ < 2 * kSecondsBetween) return;  // whatever ends soon needs no line
  std::fputs(format("{} {}/{}  {}\n", label, done, total, note).c_str(), stderr);
}

void ProgressLine::clear() {
  if (!shown_) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
  shown_ = false;
}

std::string bytes_text(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double amount = static_cast<double>(bytes);
  int unit = 0;
  while (amount >= 1024 && unit < 4) {
    amount /= 1024;
    ++unit;
  }
  return amount == static_cast<int64_t>(amount) || amount >= 100 ? format("{:.0f} {}", amount, kUnits[unit])
                                                                 : format("{:.1f} {}", amount, kUnits[unit]);
}

std::string microseconds_text(double microseconds) {
  if (microseconds <= 0) return "-";
  if (microseconds < 1e3) return format("{:.2f} us", microseconds);
  if (microseconds < 1e6) return format("{:.2f} ms", microseconds / 1e3);
  return format("{:.2f} s", microseconds / 1e6);
}

std::string duration_text(double seconds) {
  const int64_t whole = static_cast<int64_t>(seconds + 0.5);
  return whole < 60 ? format("{} s", whole) : format("{} min {:02} s", whole / 60, whole % 60);
}

}  // namespace kernel_pytorch::cli
