// kpt cache: what is kept on disk, the measurements (a SQLite store) and the compiled kernels (cubins).
#include <fmt/format.h>

#include "kernel_pytorch/c/report.h"
#include "kernel_pytorch/c/request.h"
#include "kernel_pytorch/cli/command.h"
#include "kernel_pytorch/cli/files.h"
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
    c_interface::Json json = c_interface::report_cache_info();
    json["measurements"] = c_interface::report_cache_list()["measurements"];
    print_line(c_interface::to_text(json, 2));
    return kSuccess;
  }
  const tuning::StoreInfo store = tuning::store_info();
  const jit::CubinCacheInfo cubins = jit::cubin_cache_info();
  fmt::print("measurements: {} ({}, {} rows)\n", store.path, store.state, store.rows);
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
  if (!table.empty()) fmt::print("{}", table.text());
  fmt::print("cubins: {} ({} files, {}{})\n", cubins.directory, cubins.files, bytes_text(cubins.bytes),
             cubins.writable ? "" : ", not writable");
  return kSuccess;
}

int export_cache(const CacheArguments& arguments) {
  const std::string text = tuning::export_store();
  if (arguments.file == "-") {
    print_line(text);
  } else {
    write_file(arguments.file, text);
    fmt::print(stderr, "{} measurements written to {}\n", tuning::store_info().rows, arguments.file);
  }
  return kSuccess;
}

int import_cache(const CacheArguments& arguments) {
  const int64_t rows =
      tuning::import_store(read_file(arguments.file, kImportLimitBytes), c_interface::operation_names());
  fmt::print("{} measurements imported\n", rows);
  return kSuccess;
}

int verify_cache(const CacheArguments& arguments) {
  const c_interface::Json problems = c_interface::report_cache_problems();
  const size_t count = problems["store"].size() + problems["cubins"].size();
  if (arguments.json) {
    print_line(c_interface::to_text(problems, 2));
    return count == 0 ? kSuccess : kFailure;
  }
  for (const auto& problem : problems["store"]) {
    fmt::print("{} store: {}\n", paint(Color::kRed, "✗"), problem.get<std::string>());
  }
  for (const auto& cubin : problems["cubins"]) {
    fmt::print("{} {}: {}\n", paint(Color::kRed, "✗"), cubin["file"].get<std::string>(),
               cubin["problem"].get<std::string>());
  }
  if (count > 0) {
    fmt::print("{} problem{}; `kpt cache clear` starts anew\n", count, count == 1 ? "" : "s");
    return kFailure;
  }
  fmt::print("{} {} measurements and {} cubins are sound\n", paint(Color::kGreen, "✓"), tuning::store_info().rows,
             jit::cubin_cache_info().files);
  return kSuccess;
}

int clear_cache(const CacheArguments& arguments) {
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
  fmt::print("{} measurements and {} cubins removed\n", rows, files);
  return kSuccess;
}

using Action = int (*)(const CacheArguments&);

CLI::App* add_action(CLI::App& cache, Run& run, const std::shared_ptr<CacheArguments>& arguments, const char* name,
                     const char* description, Action action) {
  CLI::App* command = cache.add_subcommand(name, description);
  command->callback([&run, arguments, action] { run = [arguments, action] { return action(*arguments); }; });
  return command;
}

}  // namespace

void add_cache(CLI::App& app, Run& run) {
  CLI::App* cache = app.add_subcommand("cache", "Measurements and compiled kernels on disk");
  cache->require_subcommand(1);
  auto arguments = std::make_shared<CacheArguments>();
  CLI::App* list = add_action(*cache, run, arguments, "list", "What was measured, and where it is kept", &list_cache);
  list->add_flag("--json", arguments->json, "as JSON");
  CLI::App* to_file = add_action(*cache, run, arguments, "export", "The measurements as JSON", &export_cache);
  to_file->add_option("file", arguments->file, "where to write; - is standard output")->capture_default_str();
  CLI::App* from_file =
      add_action(*cache, run, arguments, "import", "Take over exported measurements, all or none", &import_cache);
  from_file->add_option("file", arguments->file, "what to read; - is standard input")->required();
  CLI::App* verify = add_action(*cache, run, arguments, "verify", "Look for damage in both caches", &verify_cache);
  verify->add_flag("--json", arguments->json, "as JSON");
  CLI::App* clear = add_action(*cache, run, arguments, "clear", "Remove both caches, or a part", &clear_cache);
  clear->add_option("op", arguments->op, "only the measurements of this op");
  CLI::Option* store_only = clear->add_flag("--store", arguments->store_only, "only the measurements");
  clear->add_flag("--cubins", arguments->cubins_only, "only the compiled kernels")->excludes(store_only);
}

}  // namespace kernel_pytorch::cli
