// The Python that belongs to this kpt: KERNEL_PYTORCH_PYTHON (set by `python -m kernel_pytorch` and the wheel's
// script), the checkout's .venv, or python3. `kpt optimize` and `kpt learn` become it; `kpt doctor` asks it what only
// Python can know.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace kernel_pytorch::cli {

struct PythonProgram {
  std::string program;
  std::string path;  // what PYTHONPATH needs in front: the folder that holds the package
};

// Nothing where no Python package lies next to this program: an installation for C++ alone.
std::optional<PythonProgram> find_python();

void add_to_python_path(const std::string& folder);  // of this process, for those it becomes or starts

// Becomes this Python with these words, with our package to import and our cache; `command` is for the error.
[[noreturn]] void become_python(const std::string& command, const PythonProgram& python,
                                std::vector<std::string> words);

// A Python module that runs while this program does something else.
class PythonQuestion {
 public:
  // Starts `python -m words...`; never throws: what went wrong is part of the answer.
  PythonQuestion(const PythonProgram& python, std::vector<std::string> arguments);
  ~PythonQuestion();
  PythonQuestion(const PythonQuestion&) = delete;
  PythonQuestion& operator=(const PythonQuestion&) = delete;

  struct Answer {
    std::vector<std::string> lines;  // of its standard output
    std::string failure;             // empty when it ended with exit code 0 in time
    bool is_late = false;            // the time was up
  };
  // Waits until it ends, at most until `seconds` after its start; then it is killed.
  Answer wait(double seconds);

 private:
  int process_ = -1, output_ = -1;
  double start_seconds_ = 0;
  std::string failure_;
};

}  // namespace kernel_pytorch::cli
