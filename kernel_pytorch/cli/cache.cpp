// kpt cache: what is kept on disk, the measurements (a SQLite store) and the compiled kernels (cubins).

#include "kernel_pytorch/c/names.h"
#include "kernel_pytorch/cli/command.h"
#include "kernel_pytorch/cli/files.h"
#include "kernel_pytorch/cli/format.h"
#include "kernel_pytorch/cli/json_output.h"
#include "kernel_pytorch/cli/problem_arguments.h"
#include "kernel_pytorch/cli/terminal.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/tuning/store.h"

namespace kernel_pytorch::cli {
namespace {

constexpr int64_t kImportLimitBytes = int64_t{64} << 20;

struct CacheArguments {
  std::string file = "-";
  std::string op;
  bool store_only = false;
  bool cubins_only = false;
  bool json = false;
};

int list_cache(const CacheArguments& arguments) {
  if (arguments.json) {
    print_text(cache_json());
    return kSuccess;
  }
  const tuning::StoreInfo store = tuning::store_info();
  const jit::CubinCacheInfo cubins = jit::cubin_cache_info();
  print("measurements: {} ({}, {} rows)\n", store.path, store.state, store.rows);
  Table table({"OP", "PROBLEM", "KERNEL", "CONFIG", ">MEDIAN", "DATE", "DEVICE"});
  for (const tuning::StoredMeasurement& row : tuning::list_store()) {
    table.add({row.key.op,
               row.key.problem,
               row.measurement.kernel,
               row.measurement.config,
               microseconds_text(row.measurement.median_us),
               row.measurement.date,
               {row.key.device, Color::kDim}});
  }
  if (!table.empty()) print("{}", table.text());
  print("cubins: {} ({} files, {}{})\n", cubins.directory, cubins.files, bytes_text(cubins.bytes),
        cubins.writable ? "" : ", not writable");
  return kSuccess;
}

int export_cache(const CacheArguments& arguments) {
  const std::string text = tuning::export_store();
  if (arguments.file == "-") {
    print_text(text + "\n");
  } else {
    write_file(arguments.file, text);
    print("{} measurements written to {}\n", tuning::store_info().rows, arguments.file);
  }
  return kSuccess;
}

int import_cache(const CacheArguments& arguments) {
  const int64_t rows =
      tuning::import_store(read_file(arguments.file, kImportLimitBytes), c_interface::operation_names());
  print("{} measurements imported\n", rows);
  return kSuccess;
}

int verify_cache(const CacheArguments& arguments) {
  std::vector<std::string> problems = tuning::verify_store();
  for (std::string& problem : problems) problem.insert(0, "store: ");
  for (const jit::CubinCheck& check : jit::verify_cubin_cache()) {
    if (!check.problem.empty()) problems.push_back(check.file + ": " + check.problem);
  }
  const int exit_code = problems.empty() ? kSuccess : kFailure;
  if (arguments.json) {
    print_text(cache_problems_json());
    return exit_code;
  }
  for (const std::string& problem : problems) print("{} {}\n", paint(Color::kRed, "✗"), problem);
  if (problems.empty()) {
    print("{} {} measurements and {} cubins are sound\n", paint(Color::kGreen, "✓"), tuning::store_info().rows,
          jit::cubin_cache_info().files);
  } else {
    print("{} problem{}; `kpt cache clear` starts anew\n", problems.size(), problems.size() == 1 ? "" : "s");
  }
  return exit_code;
}

int clear_cache(const CacheArguments& arguments) {
  if (arguments.store_only && arguments.cubins_only) throw UsageError("cache clear: --store or --cubins, not both");
  int64_t rows = 0;
  if (!arguments.cubins_only) {
    if (arguments.op.empty()) {
      rows = tuning::clear_store();
    } else {
      for (const registry::AnyOperation* operation : named_operations(arguments.op)) {
        rows += tuning::clear_store(operation->name);
      }
    }
  }
  const bool clears_cubins = !arguments.store_only && arguments.op.empty();
  const int64_t files = clears_cubins ? jit::clear_cubin_cache() : 0;
  print("{} measurements and {} cubins removed\n", rows, files);
  return kSuccess;
}

using Action = int (*)(const CacheArguments&);
using SharedArguments = std::shared_ptr<CacheArguments>;

Command add_action(Command& cache, const SharedArguments& arguments, const char* name, const char* description,
                   Action action) {
  Command command = cache.subcommand(name, description);
  command.runs([arguments, action] { return action(*arguments); });
  return command;
}

}  // namespace

void add_cache(Command root) {
  Command cache = root.subcommand("cache", "Measurements and compiled kernels on disk", Need::kRequired);
  auto arguments = std::make_shared<CacheArguments>();
  add_action(cache, arguments, "list", "What was measured, and where it is kept", &list_cache)
      .flag("--json", arguments->json, "as JSON");
  add_action(cache, arguments, "export", "The measurements as JSON", &export_cache)
      .text("file", arguments->file, "where to write; - is standard output");
  add_action(cache, arguments, "import", "Take over exported measurements, all or none", &import_cache)
      .text("file", arguments->file, "what to read; - is standard input", Need::kRequired);
  add_action(cache, arguments, "verify", "Look for damage in both caches", &verify_cache)
      .flag("--json", arguments->json, "as JSON");
  add_action(cache, arguments, "clear", "Remove both caches, or a part", &clear_cache)
      .text("op", arguments->op, "only the measurements of this op")
      .flag("--store", arguments->store_only, "only the measurements")
      .flag("--cubins", arguments->cubins_only, "only the compiled kernels");
}

}  // namespace kernel_pytorch::cli
