// A libnvrtc that compiles device sources for this CPU: g++ makes a shared object of them, which is the "cubin" that
// the emulated libcuda.so.1 loads. PTX functions are replaced by those of device/ptx. It is a HIPRTC too (hiprtc.cpp).
#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tests/emulated_gpu/compiler/program.h"
#include "tests/emulated_gpu/compiler/rewrite.h"

namespace fs = std::filesystem;

namespace emulated {
namespace {

constexpr int kCapabilities[] = {80, 86, 87, 89, 90, 100, 103, 120, 121};
constexpr const char kPtxFolder[] = "kernel_pytorch/cuda/ptx/";
// What the prelude has in its place.
constexpr const char kAmdWords[] = "kernel_pytorch/hip/words.cuh";

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

uint64_t add_to_hash(uint64_t hash, const std::string& text) {
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

// Whatever the compiled object depends on besides the program: the emulated headers, this library, the host compiler.
int minor_version() {
  static const int minor = [] {
    uint64_t hash = 0xcbf29ce484222325u;
    std::vector<fs::path> files;
    for (const auto& item : fs::recursive_directory_iterator(EMULATED_DEVICE_SOURCES)) files.push_back(item.path());
    Dl_info own{};
    dladdr(reinterpret_cast<void*>(&read_file), &own);
    files.emplace_back(own.dli_fname);
    std::sort(files.begin(), files.end());
    for (const fs::path& file : files) {
      if (fs::is_regular_file(file)) hash = add_to_hash(hash, read_file(file));
    }
    return 1000 + static_cast<int>(hash % 100000000);
  }();
  return minor;
}

class Folder {
 public:
  Folder() {
    std::string pattern = (fs::temp_directory_path() / "emulated-nvrtc-XXXXXX").string();
    if (mkdtemp(pattern.data()) != nullptr) path_ = pattern;
  }
  ~Folder() {
    std::error_code error;
    if (!path_.empty()) fs::remove_all(path_, error);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

void write_file(const fs::path& path, const std::string& text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

int run_compiler(const std::vector<std::string>& arguments, const fs::path& log) {
  std::vector<char*> pointers;
  for (const std::string& argument : arguments) pointers.push_back(const_cast<char*>(argument.c_str()));
  pointers.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  // The loader's path is for the program under test: g++ must not meet the libraries of the emulated device.
  std::vector<char*> environment;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (std::strncmp(*variable, "LD_LIBRARY_PATH=", 16) != 0) environment.push_back(*variable);
  }
  environment.push_back(nullptr);
  pid_t child = 0;
  const int error = posix_spawnp(&child, pointers[0], &actions, nullptr, pointers.data(), environment.data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return -1;
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// "sm_90a": 900 and 'a'.
int architecture_of(int count, const char* const* options, bool& is_specific) {
  for (int i = 0; i < count; ++i) {
    const std::string option = options[i];
    const size_t at = option.find("sm_");
    if (option.rfind("--gpu-architecture=", 0) != 0 || at == std::string::npos) continue;
    is_specific = option.back() == 'a';
    return std::atoi(option.c_str() + at + 3) * 10;
  }
  return 0;
}

std::string kernel_table(const _nvrtcProgram& program) {
  return "\nstatic constexpr auto emulated_entry = &" + program.entry +
         ";\nusing EmulatedEntry = EmulatedCall<decltype(+emulated_entry)>;\n"
         "static void emulated_run(void** arguments) { EmulatedEntry::call(emulated_entry, arguments); }\n"
         "extern \"C\" {\n"
         "__attribute__((visibility(\"default\"))) EmulatedKernel emulated_kernel = "
         "{emulated_run, EmulatedEntry::kCount, EmulatedEntry::kBytes, 0, 16};\n"
         "extern __attribute__((visibility(\"default\"))) const char* const emulated_kernel_name = \"" +
         program.lowered_name +
         "\";\n"
         "extern __attribute__((visibility(\"default\"))) const char* const emulated_kernel_entry = R\"text(" +
         program.entry + ")text\";\n}\n";
}

}  // namespace

int compile(_nvrtcProgram& program, int architecture, bool is_specific) {
  const bool is_amd = architecture == kAmdArchitecture;
  const Folder folder;
  if (folder.path().empty()) {
    program.log = "emulated NVRTC: no temporary folder";
    return kCompilation;
  }
  for (const auto& [name, text] : program.headers) {
    if (name.rfind(kPtxFolder, 0) != 0 || is_amd) {
      write_file(folder.path() / name, name == kAmdWords ? "" : rewrite(text));
      continue;
    }
    const fs::path emulated = fs::path(EMULATED_DEVICE_SOURCES) / "ptx" / name.substr(sizeof(kPtxFolder) - 1);
    if (!fs::exists(emulated)) {
      program.log = "emulated NVRTC: " + name + " has no emulated counterpart " + emulated.string();
      return kCompilation;
    }
    write_file(folder.path() / name, read_file(emulated));
  }
  const fs::path main = folder.path() / "main.cpp", object = folder.path() / "kernel.so", log = folder.path() / "log";
  write_file(main, "#include \"prelude.h\"\n#line 1 \"" + program.name + "\"\n" + rewrite(program.source) +
                       kernel_table(program) + program.metadata);
  Dl_info own{};
  dladdr(reinterpret_cast<void*>(&read_file), &own);
  const std::string libraries = fs::absolute(own.dli_fname).parent_path().string();
  std::vector<std::string> arguments = {
      EMULATED_COMPILER, "-std=c++20", "-O1", "-shared", "-fPIC", "-s", "-w", "-nostdinc", "-fno-exceptions",
      "-fno-rtti", "-fno-strict-aliasing", "-fwrapv", "-fno-plt", "-fno-threadsafe-statics", "-fvisibility=hidden",
      "-fno-semantic-interposition", "-fno-asynchronous-unwind-tables", "-fno-stack-protector", "-fno-math-errno",
      "-fconstexpr-ops-limit=2000000000", "-fconstexpr-loop-limit=10000000",
      // As NVRTC: a product and a sum become one instruction where they meet.
      "-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mpopcnt", "-ffp-contract=fast", "-D__CUDACC_RTC__=1",
      "-D__CUDACC__=1", "-I" + folder.path().string(), "-I" EMULATED_DEVICE_SOURCES, main.string(), "-o",
      object.string(), "-L" + libraries, "-l:libcuda.so.1", "-lm"};
  arguments.push_back(is_amd ? "-DEMULATED_AMD=1" : "-D__CUDA_ARCH__=" + std::to_string(architecture));
  if (is_specific) arguments.emplace_back("-D__CUDA_ARCH_FEAT_SM" + std::to_string(architecture / 10) + "_ALL=1");
  if (const char* keep = std::getenv("EMULATED_GPU_KEEP_SOURCES")) {
    fs::copy(folder.path(), fs::path(keep) / program.lowered_name,
             fs::copy_options::recursive | fs::copy_options::overwrite_existing);
  }
  const int status = run_compiler(arguments, log);
  program.log = read_file(log);
  if (status != 0) return kCompilation;
  program.code = read_file(object);
  return kOk;
}

}  // namespace emulated

using namespace emulated;

EMULATED_API const char* nvrtcGetErrorString(int result) {
  switch (result) {
    case kOk:
      return "NVRTC_SUCCESS";
    case kInvalidInput:
      return "NVRTC_ERROR_INVALID_INPUT";
    case kInvalidOption:
      return "NVRTC_ERROR_INVALID_OPTION";
    case kCompilation:
      return "NVRTC_ERROR_COMPILATION";
    case kNameNotValid:
      return "NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID";
    default:
      return "NVRTC_ERROR unknown";
  }
}
EMULATED_API int nvrtcVersion(int* major, int* minor) {
  *major = 12;
  *minor = minor_version();
  return kOk;
}
EMULATED_API int nvrtcGetNumSupportedArchs(int* count) {
  *count = static_cast<int>(std::size(kCapabilities));
  return kOk;
}
EMULATED_API int nvrtcGetSupportedArchs(int* capabilities) {
  std::copy(std::begin(kCapabilities), std::end(kCapabilities), capabilities);
  return kOk;
}
EMULATED_API int nvrtcCreateProgram(_nvrtcProgram** program, const char* source, const char* name, int header_count,
                                    const char* const* headers, const char* const* include_names) {
  *program = new _nvrtcProgram;
  (*program)->source = source;
  (*program)->name = name == nullptr ? "program.cu" : name;
  for (int i = 0; i < header_count; ++i) (*program)->headers.emplace_back(include_names[i], headers[i]);
  return kOk;
}
EMULATED_API int nvrtcDestroyProgram(_nvrtcProgram** program) {
  delete *program;
  *program = nullptr;
  return kOk;
}
EMULATED_API int nvrtcAddNameExpression(_nvrtcProgram* program, const char* name) {
  if (!program->entry.empty()) return kInvalidInput;  // one kernel an object
  program->entry = name;
  program->lowered_name = "emulated_" + std::to_string(add_to_hash(0xcbf29ce484222325u, name));
  return kOk;
}
EMULATED_API int nvrtcCompileProgram(_nvrtcProgram* program, int option_count, const char* const* options) {
  bool is_specific = false;
  const int architecture = architecture_of(option_count, options, is_specific);
  if (architecture == 0) {
    program->log = "emulated NVRTC: no --gpu-architecture=sm_...";
    return kInvalidOption;
  }
  return compile(*program, architecture, is_specific);
}
EMULATED_API int nvrtcGetLoweredName(_nvrtcProgram* program, const char* name, const char** lowered) {
  if (program->entry != name) return kNameNotValid;
  *lowered = program->lowered_name.c_str();
  return kOk;
}
EMULATED_API int nvrtcGetProgramLogSize(_nvrtcProgram* program, size_t* bytes) {
  *bytes = program->log.size() + 1;
  return kOk;
}
EMULATED_API int nvrtcGetProgramLog(_nvrtcProgram* program, char* text) {
  std::memcpy(text, program->log.c_str(), program->log.size() + 1);
  return kOk;
}
EMULATED_API int nvrtcGetCUBINSize(_nvrtcProgram* program, size_t* bytes) {
  *bytes = program->code.size();
  return kOk;
}
EMULATED_API int nvrtcGetCUBIN(_nvrtcProgram* program, char* code) {
  std::memcpy(code, program->code.data(), program->code.size());
  return kOk;
}
EMULATED_API int nvrtcGetPTXSize(_nvrtcProgram*, size_t*) {
  return kInvalidInput;  // there is no PTX
}
EMULATED_API int nvrtcGetPTX(_nvrtcProgram*, char*) {
  return kInvalidInput;
}
