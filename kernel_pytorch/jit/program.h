// One program of a compiler at run time, NVRTC or HIPRTC, whose functions are alike: an entry's source and all its
// headers from memory, one name expression, machine code out. Destroyed on every way out.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/jit/sources.h"

namespace kernel_pytorch::jit {

// Programs that this process has handed to a compiler.
inline std::atomic<int64_t> programs_compiled{0};
inline int64_t compile_count() {
  return programs_compiled.load(std::memory_order_relaxed);
}

// `Library` has the functions, their results 0 where all is well, and `description()`: "NVRTC 13.0 (its path)".
template <class Library>
class Program {
 public:
  // `main` is compiled; `headers` are what it can include.
  Program(const Library& library, const EmbeddedSource& main, std::span<const EmbeddedSource> headers,
          const std::string& entry)
      : library_(library), entry_(entry) {
    std::vector<std::string> texts;  // a view need not end in a zero
    std::vector<const char*> text_pointers, name_pointers;
    texts.reserve(2 * headers.size());
    for (const EmbeddedSource& file : headers) {
      text_pointers.push_back(texts.emplace_back(file.text).c_str());
      name_pointers.push_back(texts.emplace_back(file.path).c_str());
    }
    require(library_.create(&program_, std::string(main.text).c_str(), std::string(main.path).c_str(),
                            static_cast<int>(text_pointers.size()), text_pointers.data(), name_pointers.data()),
            "creating a program");
  }
  ~Program() { library_.destroy(&program_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void require(int result, std::string_view what) const {
    if (result != 0) fail(ErrorCode::kDevice, "jit: ", entry_, ": ", what, ": ", library_.error_string(result));
  }
  void compile(const std::vector<std::string>& options, const std::string& architecture) {
    require(library_.add_name(program_, entry_.c_str()), "adding its name");
    std::vector<const char*> pointers;
    for (const std::string& option : options) pointers.push_back(option.c_str());
    programs_compiled.fetch_add(1, std::memory_order_relaxed);
    const int result = library_.compile(program_, static_cast<int>(pointers.size()), pointers.data());
    if (result != 0) {
      fail(ErrorCode::kDevice, "jit: compiling ", entry_, " for ", architecture, " with ", library_.description(),
           " failed: ", library_.error_string(result), "\n", log());
    }
  }
  std::string log() const {
    size_t bytes = 0;
    require(library_.log_size(program_, &bytes), "reading the log");
    std::string text(bytes, '\0');
    if (bytes > 0) require(library_.log(program_, text.data()), "reading the log");
    while (!text.empty() && text.back() == '\0') text.pop_back();
    return text;
  }
  std::string lowered_name() const {
    const char* name = nullptr;
    require(library_.lowered_name(program_, entry_.c_str(), &name), "reading its lowered name");
    return name;
  }
  // By the library's functions for the kind of code that is wanted.
  template <class Size, class Copy>
  std::string code(Size size, Copy copy) const {
    size_t bytes = 0;
    require(size(program_, &bytes), "reading the compiled code");
    std::string code(bytes, '\0');
    require(copy(program_, code.data()), "reading the compiled code");
    return code;
  }

 private:
  const Library& library_;
  const std::string& entry_;
  typename Library::Handle program_ = nullptr;
};

}  // namespace kernel_pytorch::jit
