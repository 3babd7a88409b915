#include "kernel_pytorch/device/cpu/topology.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <sstream>
#include <string_view>

#include "kernel_pytorch/device/cpu/system_files.h"

namespace kernel_pytorch::cpu_device {
namespace {

constexpr int kMostCpus = 1 << 16;

std::optional<int64_t> number_in(std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return number;
}

std::vector<std::string> words_of(const std::string& line) {
  std::istringstream stream(line);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

bool lists(std::string_view names, std::string_view wanted) {  // "cpu,cpuacct"
  while (!names.empty()) {
    const size_t comma = std::min(names.find(','), names.size());
    if (names.substr(0, comma) == wanted) return true;
    names.remove_prefix(std::min(comma + 1, names.size()));
  }
  return false;
}

// mountinfo writes spaces and the like as three octal digits.
std::string unescaped(const std::string& text) {
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i) {
    int code = 0;
    const bool is_escape = text[i] == '\\' && i + 3 < text.size() &&
                           std::from_chars(&text[i + 1], &text[i + 1] + 3, code, 8).ptr == &text[i + 1] + 3;
    plain.push_back(is_escape ? static_cast<char>(code) : text[i]);
    if (is_escape) i += 3;
  }
  return plain;
}

// ---------------------------------------------------------------- control groups

struct Hierarchy {  // where a controller's files are
  bool is_v2 = false;
  std::string root;   // the group that is mounted
  std::string point;  // where
  std::string group;  // this process's
};

std::string relative_group(const Hierarchy& hierarchy) {
  const std::string root = hierarchy.root == "/" ? "" : hierarchy.root;
  const std::string& group = hierarchy.group;
  // A container may see its own group mounted as the root of the files, and the host's name of it in /proc.
  if (!group.starts_with(root) || group.find("/..") != std::string::npos) return "";
  const std::string below = group.substr(root.size());
  return below.empty() || below.front() != '/' || below == "/" ? "" : below;
}

// The hierarchies that may limit `controller`: version 2's, version 1's, or both on machines that mount both.
std::vector<Hierarchy> hierarchies_of(std::string_view controller, const std::string& root) {
  std::string group_v1, group_v2;
  bool has_v1 = false, has_v2 = false;
  std::ifstream groups(root + "/proc/self/cgroup");  // "4:cpu,cpuacct:/a/b", "0::/a/b"
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first == std::string::npos ? first : first + 1);
    if (second == std::string::npos) continue;
    const std::string names = line.substr(first + 1, second - first - 1);
    if (names.empty()) {
      group_v2 = line.substr(second + 1);
      has_v2 = true;
    } else if (lists(names, controller)) {
      group_v1 = line.substr(second + 1);
      has_v1 = true;
    }
  }
  std::vector<Hierarchy> found;
  std::ifstream mounts(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    const std::vector<std::string> words =
        words_of(line);  // id parent device root point options ... - type source options
    const auto dash = std::find(words.begin(), words.end(), "-");
    if (words.size() < 5 || words.end() - dash < 4) continue;
    const bool is_v2 = dash[1] == "cgroup2";
    if (is_v2 ? !has_v2 : !(has_v1 && dash[1] == "cgroup" && lists(dash[3], controller))) continue;
    found.push_back({is_v2, unescaped(words[3]), unescaped(words[4]), is_v2 ? group_v2 : group_v1});
  }
  return found;
}

// Calls visit(folder) for the process's group and every one above it: a limit of any of them holds.
template <class Visit>
void visit_groups(std::string_view controller, const std::string& root, const Visit& visit) {
  for (const Hierarchy& hierarchy : hierarchies_of(controller, root)) {
    for (std::string below = relative_group(hierarchy);; below.resize(below.rfind('/'))) {
      visit(hierarchy.is_v2, hierarchy.point + below);
      if (below.empty()) break;
    }
  }
}

void read_quota(Topology& topology, const std::string& root) {
  visit_groups("cpu", root, [&](bool is_v2, const std::string& folder) {
    const std::string file = folder + (is_v2 ? "/cpu.max" : "/cpu.cfs_quota_us");
    const std::vector<std::string> words = words_of(first_line(root + file));  // "150000 100000", "max 100000", "-1"
    const std::optional<int64_t> time = number_in(words.empty() ? "" : words[0]);
    const std::optional<int64_t> period = !is_v2 ? number_in(first_line(root + folder + "/cpu.cfs_period_us"))
                                          : words.size() > 1 ? number_in(words[1])
                                                             : 100000;
    if (!time || !period || *time <= 0 || *period <= 0) return;
    const double quota = static_cast<double>(*time) / static_cast<double>(*period);
    if (topology.quota > 0 && topology.quota <= quota) return;
    topology.quota = quota;
    topology.quota_file = file;
  });
}

void read_memory_limit(Topology& topology, const std::string& root) {
  constexpr int64_t kUnlimited = int64_t{1} << 60;  // version 1 says a page below 2^63
  visit_groups("memory", root, [&](bool is_v2, const std::string& folder) {
    const std::string file = folder + (is_v2 ? "/memory.max" : "/memory.limit_in_bytes");
    const std::optional<int64_t> bytes = number_in(first_line(root + file));
    if (!bytes || *bytes <= 0 || *bytes >= kUnlimited) return;
    if (topology.memory_limit > 0 && topology.memory_limit <= *bytes) return;
    topology.memory_limit = *bytes;
    topology.memory_file = file;
  });
}

// ---------------------------------------------------------------- cores

std::vector<int> siblings_of(const std::string& folder) {
  for (const char* name : {"core_cpus_list", "thread_siblings_list"}) {
    const std::vector<int> siblings = parse_cpu_list(first_line(folder + name));
    if (!siblings.empty()) return siblings;
  }
  return {};
}

// The CPUs that are slower than the machine's fastest: by capacity where the kernel tells it, or as Intel's hybrid
// machines list them.
std::set<int> slow_cpus(const std::vector<int>& allowed, const std::string& root) {
  const std::string devices = root + "/sys/devices/";
  std::map<int, int64_t> capacity;
  int64_t most = 0;
  for (int cpu : allowed) {
    const auto known = number_in(first_line(devices + "system/cpu/cpu" + std::to_string(cpu) + "/cpu_capacity"));
    if (!known) continue;
    capacity[cpu] = *known;
    most = std::max(most, *known);
  }
  std::set<int> slow;
  for (const auto& [cpu, value] : capacity) {
    if (value * 10 < most * 9) slow.insert(cpu);  // cores of one kind differ by a few percent
  }
  if (!slow.empty()) return slow;
  const std::vector<int> fast = parse_cpu_list(first_line(devices + "cpu_core/cpus"));
  const bool any_fast = std::any_of(allowed.begin(), allowed.end(),
                                    [&](int cpu) { return std::find(fast.begin(), fast.end(), cpu) != fast.end(); });
  if (!any_fast) return {};
  for (const char* kind : {"cpu_atom/cpus", "cpu_lowpower/cpus"}) {
    for (int cpu : parse_cpu_list(first_line(devices + kind))) slow.insert(cpu);
  }
  return slow;
}

void read_cores(Topology& topology, const std::vector<int>& allowed, const std::string& root) {
  std::set<int> cores, slow_cores, sockets;
  const std::set<int> slow = slow_cpus(allowed, root);
  for (int cpu : allowed) {
    const std::string folder = root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
    const std::vector<int> siblings = siblings_of(folder);
    const int core = siblings.empty() ? cpu : siblings.front();
    cores.insert(core);
    if (slow.contains(cpu)) slow_cores.insert(core);
    topology.threads_per_core = std::max(topology.threads_per_core, static_cast<int>(siblings.size()));
    sockets.insert(
        static_cast<int>(std::max<int64_t>(number_in(first_line(folder + "physical_package_id")).value_or(0), 0)));
  }
  topology.cpus = static_cast<int>(allowed.size());
  topology.cores = static_cast<int>(cores.size());
  topology.slow_cores = static_cast<int>(slow_cores.size());
  topology.sockets = static_cast<int>(sockets.size());
}

void read_nodes(Topology& topology, const std::vector<int>& allowed, const std::string& root) {
  const std::string folder = root + "/sys/devices/system/node/";
  for (int node : parse_cpu_list(first_line(folder + "online"))) {
    std::vector<int> cpus;
    for (int cpu : parse_cpu_list(first_line(folder + "node" + std::to_string(node) + "/cpulist"))) {
      if (std::find(allowed.begin(), allowed.end(), cpu) != allowed.end()) cpus.push_back(cpu);
    }
    if (!cpus.empty()) topology.nodes.push_back(std::move(cpus));  // nodes of memory alone have none
  }
}

// The node of each CPU, by its number.
const std::vector<uint8_t>& nodes_by_cpu() {
  static const auto* table = [] {
    auto* nodes = new std::vector<uint8_t>;
    const std::vector<std::vector<int>>& all = topology().nodes;
    for (size_t node = 0; node < all.size(); ++node) {
      for (int cpu : all[node]) {
        if (static_cast<size_t>(cpu) >= nodes->size()) nodes->resize(static_cast<size_t>(cpu) + 1);
        (*nodes)[static_cast<size_t>(cpu)] = static_cast<uint8_t>(std::min<size_t>(node, 255));
      }
    }
    return nodes;
  }();
  return *table;
}

}  // namespace

int Topology::threads() const {
  const int of_quota = quota > 0 ? static_cast<int>(std::ceil(std::min(quota, 1e6))) : cores;
  return std::max(1, std::min(cores, of_quota));
}

std::vector<int> allowed_cpus() {
  // The mask must be as wide as the kernel's, which the first sizes may not be on large machines.
  for (int cpus = 1024; cpus <= 1 << 20; cpus *= 4) {
    std::vector<cpu_set_t> mask(CPU_ALLOC_SIZE(cpus) / sizeof(cpu_set_t) + 1);
    const size_t bytes = mask.size() * sizeof(cpu_set_t);
    if (sched_getaffinity(0, bytes, mask.data()) != 0) continue;
    std::vector<int> allowed;
    for (int cpu = 0; cpu < cpus; ++cpu) {
      if (CPU_ISSET_S(cpu, bytes, mask.data())) allowed.push_back(cpu);
    }
    if (!allowed.empty()) return allowed;
  }
  std::vector<int> all(static_cast<size_t>(std::max<long>(1, sysconf(_SC_NPROCESSORS_ONLN))));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

Topology read_topology(const std::vector<int>& allowed, const std::string& root) {
  Topology topology;
  if (!allowed.empty()) read_cores(topology, allowed, root);
  read_nodes(topology, allowed, root);
  read_quota(topology, root);
  read_memory_limit(topology, root);
  return topology;
}

const Topology& topology() {
  static const auto* found = new Topology(read_topology(allowed_cpus()));
  return *found;
}

int node_count() {
  static const int count = std::max<int>(1, static_cast<int>(topology().nodes.size()));
  return count;
}

int current_node() {
  const std::vector<uint8_t>& nodes = nodes_by_cpu();
  const int cpu = sched_getcpu();
  return cpu < 0 || static_cast<size_t>(cpu) >= nodes.size() ? 0 : nodes[static_cast<size_t>(cpu)];
}

std::vector<int> parse_cpu_list(const std::string& text) {
  std::vector<int> cpus;
  std::string_view rest = text;
  while (!rest.empty()) {
    const size_t comma = std::min(rest.find(','), rest.size());
    const std::string_view range = rest.substr(0, comma);
    const size_t dash = range.find('-');
    const std::optional<int64_t> first = number_in(range.substr(0, dash));
    const std::optional<int64_t> last = dash == std::string_view::npos ? first : number_in(range.substr(dash + 1));
    if (!first || !last || *first < 0 || *last < *first || *last >= kMostCpus) return cpus;
    for (int64_t cpu = *first; cpu <= *last; ++cpu) cpus.push_back(static_cast<int>(cpu));
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
  return cpus;
}

}  // namespace kernel_pytorch::cpu_device
