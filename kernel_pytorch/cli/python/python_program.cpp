#include "kernel_pytorch/cli/python/python_program.h"

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <sstream>

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/cli/format.h"

namespace kernel_pytorch::cli {
namespace {

namespace fs = std::filesystem;

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

[[noreturn]] void become(std::vector<std::string>& arguments, int output) {
  setpgid(0, 0);
  dup2(output, STDOUT_FILENO);
  dup2(output, STDERR_FILENO);
  const int nothing = open("/dev/null", O_RDONLY);
  if (nothing >= 0) dup2(nothing, STDIN_FILENO);
  std::vector<char*> pointers;
  for (std::string& word : arguments) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  execvp(pointers[0], pointers.data());
  _exit(127);
}

// Everything that comes until the other side is closed; false when the time was up before.
bool read_until_closed(int file, double deadline_seconds, std::string& text) {
  char block[4096];
  while (true) {
    const double left = deadline_seconds - now_seconds();
    if (left <= 0) return false;
    pollfd polled{file, POLLIN, 0};
    const int ready = poll(&polled, 1, static_cast<int>(left * 1000) + 1);
    if (ready < 0 && errno != EINTR) return false;
    if (ready <= 0) continue;
    const ssize_t count = read(file, block, sizeof block);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return true;
    text.append(block, static_cast<size_t>(count));
  }
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace

std::optional<PythonProgram> find_python() {
  std::error_code error;
  const fs::path folder = fs::read_symlink("/proc/self/exe", error).parent_path();
  KP_CHECK(!error, "kpt: cannot tell where this program is: ", error.message());
  const std::string named = environment("KERNEL_PYTORCH_PYTHON");
  if (fs::exists(folder.parent_path() / "_optimize")) {  // the package's own bin/
    return PythonProgram{named.empty() ? "python3" : named, folder.parent_path().parent_path().string()};
  }
  const fs::path checkout = folder.parent_path();  // of build/
  if (!fs::exists(checkout / "python" / "kernel_pytorch")) return std::nullopt;
  const fs::path own = checkout / ".venv" / "bin" / "python";
  return PythonProgram{!named.empty()    ? named
                       : fs::exists(own) ? own.string()
                                         : "python3",
                       (checkout / "python").string()};
}

void add_to_python_path(const std::string& folder) {
  const std::string others = environment("PYTHONPATH");
  setenv("PYTHONPATH", (others.empty() ? folder : folder + ":" + others).c_str(), 1);
}

void become_python(const std::string& command, const PythonProgram& python, std::vector<std::string> words) {
  add_to_python_path(python.path);
  const std::string cache = options().cache_directory;
  if (!cache.empty()) setenv("KERNEL_PYTORCH_CACHE_DIR", cache.c_str(), 1);
  words.insert(words.begin(), python.program);
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  execvp(pointers[0], pointers.data());
  fail(ErrorCode::kUnsupported, command, ": cannot run ", python.program, ": ", std::strerror(errno),
       "; KERNEL_PYTORCH_PYTHON names another Python");
}

PythonQuestion::PythonQuestion(const PythonProgram& python, std::vector<std::string> arguments)
    : start_seconds_(now_seconds()) {
  arguments.insert(arguments.begin(), {python.program, "-m"});
  add_to_python_path(python.path);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    failure_ = format("no pipe: {}", std::strerror(errno));
    return;
  }
  process_ = fork();
  if (process_ == 0) become(arguments, ends[1]);
  close(ends[1]);
  output_ = ends[0];
  if (process_ < 0) failure_ = format("no process: {}", std::strerror(errno));
}

PythonQuestion::~PythonQuestion() {
  if (process_ > 0) {
    kill(-process_, SIGKILL);
    kill(process_, SIGKILL);  // its group is its own only once it has said so
    waitpid(process_, nullptr, 0);
  }
  if (output_ >= 0) close(output_);
}

PythonQuestion::Answer PythonQuestion::wait(double seconds) {
  if (!failure_.empty()) return {{}, failure_, false};
  std::string text;
  if (!read_until_closed(output_, start_seconds_ + seconds, text)) {
    return {lines_of(text), format("no answer within {:g} s", seconds), true};
  }
  int status = 0;
  waitpid(process_, &status, 0);
  process_ = -1;
  Answer answer{lines_of(text), "", false};
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return answer;
  if (WIFEXITED(status) && WEXITSTATUS(status) == 127 && text.empty()) return {{}, "there is no such program", false};
  const std::string end = WIFSIGNALED(status) ? format("killed by signal {}", WTERMSIG(status))
                                              : format("exit code {}", WEXITSTATUS(status));
  answer.failure = answer.lines.empty() ? end : end + ": " + answer.lines.back();
  return answer;
}

}  // namespace kernel_pytorch::cli
