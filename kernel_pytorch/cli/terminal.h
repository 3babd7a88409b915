// Output for people: colour only on a terminal and without NO_COLOR, tables aligned by characters, and one line of
// progress that rewrites itself on a terminal; elsewhere long work says where it is every ten seconds.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kernel_pytorch::cli {

enum class Color { kPlain, kBold, kDim, kRed, kGreen, kYellow };

// For standard output; the text itself where colour is off.
std::string paint(Color color, std::string_view text);

struct Cell {
  std::string text;
  Color color = Color::kPlain;
  Cell(std::string text, Color color = Color::kPlain) : text(std::move(text)), color(color) {}
  Cell(const char* text, Color color = Color::kPlain) : text(text), color(color) {}
};

class Table {
 public:
  // A column whose heading begins with '>' is aligned to the right.
  explicit Table(std::vector<std::string> headings);
  void add(std::vector<Cell> row);
  bool empty() const { return rows_.empty(); }
  std::string text() const;  // two spaces in front of each line

 private:
  std::string line(const std::vector<Cell>& row, const std::vector<size_t>& widths) const;
  std::vector<std::string> headings_;
  std::vector<bool> right_aligned_;
  std::vector<std::vector<Cell>> rows_;
};

// On standard error, so that output can be piped while it runs.
class ProgressLine {
 public:
  ProgressLine();
  ~ProgressLine() { clear(); }
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;
  // "label [#####-----] 3/12  eta 4s  note", cut to the terminal's width. At most `seconds_left`, where that is known.
  void show(std::string_view label, int done, int total, std::string_view note, double seconds_left = -1);
  void clear();
  double seconds() const;  // since it was made

 private:
  void show_plainly(std::string_view label, int done, int total, std::string_view note);
  bool is_terminal_;
  bool shown_ = false;
  double next_plain_seconds_ = 0;
  std::chrono::steady_clock::time_point start_;
};

std::string bytes_text(int64_t bytes);               // "32 KiB", "1.5 GiB"
std::string microseconds_text(double microseconds);  // "12.3 us", "4.56 ms"
std::string duration_text(double seconds);           // "4 s", "2 min 05 s"

}  // namespace kernel_pytorch::cli
