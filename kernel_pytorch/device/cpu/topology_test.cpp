// Machines made of files: /sys and /proc as kernels write them, under a folder of the test's own.
#include "kernel_pytorch/device/cpu/topology.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>
#include <thread>

#include "kernel_pytorch/device/task_queue.h"

namespace kernel_pytorch::cpu_device {
namespace {

namespace fs = std::filesystem;

class FakeMachine {
 public:
  FakeMachine() {
    std::string pattern = (fs::temp_directory_path() / "kp_machine_XXXXXX").string();
    root_ = mkdtemp(pattern.data());
  }
  ~FakeMachine() { fs::remove_all(root_); }
  FakeMachine(const FakeMachine&) = delete;
  FakeMachine& operator=(const FakeMachine&) = delete;

  FakeMachine& write(const std::string& path, const std::string& text) {
    const fs::path file = root_ + path;
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
    return *this;
  }
  // CPU numbers of each core; core by core of one socket after another.
  FakeMachine& cores(const std::vector<std::vector<int>>& cores, int sockets = 1) {
    for (size_t core = 0; core < cores.size(); ++core) {
      std::string list;
      for (int cpu : cores[core]) list += (list.empty() ? "" : ",") + std::to_string(cpu);
      for (int cpu : cores[core]) {
        const std::string folder = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
        write(folder + "core_cpus_list", list);
        write(folder + "physical_package_id", std::to_string(core * static_cast<size_t>(sockets) / cores.size()));
      }
    }
    return *this;
  }
  FakeMachine& version2(const std::string& group, const std::string& mounted = "/") {
    write("/proc/self/cgroup", "0::" + group);
    return write("/proc/self/mountinfo",
                 "22 1 0:2 / /proc rw shared:2 - proc proc rw\n"
                 "30 23 0:26 " +
                     mounted + " /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate");
  }
  FakeMachine& version1(const std::string& group, const std::string& mounted = "/") {
    write("/proc/self/cgroup",
          "4:memory:" + group + "\n3:cpu,cpuacct:" + group + "\n2:cpuset:/elsewhere\n1:name=systemd:/");
    return write("/proc/self/mountinfo",
                 "31 30 0:27 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
                 "32 30 0:28 " +
                     mounted +
                     " /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
                     "33 30 0:29 " +
                     mounted + " /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory");
  }
  Topology read(const std::vector<int>& allowed) const { return read_topology(allowed, root_); }

 private:
  std::string root_;
};

std::vector<int> first_cpus(int count) {
  std::vector<int> cpus(static_cast<size_t>(count));
  std::iota(cpus.begin(), cpus.end(), 0);
  return cpus;
}

TEST(Topology, WithoutAnyFileEveryCpuIsACore) {
  const Topology machine = FakeMachine().read({0, 1, 5});
  EXPECT_EQ(machine.cpus, 3);
  EXPECT_EQ(machine.cores, 3);
  EXPECT_EQ(machine.threads_per_core, 1);
  EXPECT_EQ(machine.sockets, 1);
  EXPECT_EQ(machine.slow_cores, 0);
  EXPECT_TRUE(machine.nodes.empty());
  EXPECT_EQ(machine.quota, 0);
  EXPECT_EQ(machine.memory_limit, 0);
  EXPECT_EQ(machine.threads(), 3);
  EXPECT_EQ(FakeMachine().read({}).threads(), 1);
}

TEST(Topology, OneThreadPerPhysicalCore) {
  FakeMachine machine;
  machine.cores({{0, 4}, {1, 5}, {2, 6}, {3, 7}});
  EXPECT_EQ(machine.read(first_cpus(8)).threads(), 4);
  EXPECT_EQ(machine.read(first_cpus(8)).threads_per_core, 2);
  EXPECT_EQ(machine.read({0, 4}).threads(), 1) << "a mask of two threads of one core";
  EXPECT_EQ(machine.read({0, 1, 6}).threads(), 3) << "a mask of one thread of each";
  EXPECT_EQ(machine.read({3}).threads_per_core, 2) << "SMT is on, whatever the mask holds";
  // The older name of the file.
  FakeMachine older;
  older.write("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0-1");
  older.write("/sys/devices/system/cpu/cpu1/topology/thread_siblings_list", "0-1");
  EXPECT_EQ(older.read({0, 1}).cores, 1);
}

TEST(Topology, SlowCoresOfHybridMachines) {
  FakeMachine intel;  // two fast cores of two threads, four slow ones, one of low power
  intel.cores({{0, 1}, {2, 3}, {4}, {5}, {6}, {7}, {8}});
  intel.write("/sys/devices/cpu_core/cpus", "0-3").write("/sys/devices/cpu_atom/cpus", "4-7");
  intel.write("/sys/devices/cpu_lowpower/cpus", "8");
  EXPECT_EQ(intel.read(first_cpus(9)).cores, 7);
  EXPECT_EQ(intel.read(first_cpus(9)).slow_cores, 5);
  EXPECT_EQ(intel.read({0, 1, 4}).slow_cores, 1);
  EXPECT_EQ(intel.read({4, 5}).slow_cores, 0) << "none is slower than another";
  FakeMachine arm;
  arm.cores({{0}, {1}, {2}, {3}});
  for (int cpu = 0; cpu < 4; ++cpu) {
    arm.write("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cpu_capacity", cpu == 3   ? "1024"
                                                                                     : cpu == 2 ? "1000"
                                                                                                : "446");
  }
  EXPECT_EQ(arm.read(first_cpus(4)).slow_cores, 2);
  EXPECT_EQ(arm.read({0, 1}).slow_cores, 0);
}

TEST(Topology, SocketsAndNodes) {
  FakeMachine machine;
  machine.cores({{0, 4}, {1, 5}, {2, 6}, {3, 7}}, 2);
  machine.write("/sys/devices/system/node/online", "0-2");
  machine.write("/sys/devices/system/node/node0/cpulist", "0-1,4-5");
  machine.write("/sys/devices/system/node/node1/cpulist", "2-3,6-7");
  machine.write("/sys/devices/system/node/node2/cpulist", "");  // memory alone
  const Topology all = machine.read(first_cpus(8));
  EXPECT_EQ(all.sockets, 2);
  EXPECT_EQ(all.nodes, (std::vector<std::vector<int>>{{0, 1, 4, 5}, {2, 3, 6, 7}}));
  EXPECT_EQ(machine.read({2, 3}).sockets, 1);
  EXPECT_EQ(machine.read({2, 3}).nodes, (std::vector<std::vector<int>>{{2, 3}}));
}

TEST(Topology, QuotaOfVersion2AndOfEveryGroupAbove) {
  FakeMachine machine;
  machine.version2("/pod/container");
  machine.write("/sys/fs/cgroup/pod/container/cpu.max", "max 100000");
  EXPECT_EQ(machine.read(first_cpus(8)).quota, 0);
  EXPECT_EQ(machine.read(first_cpus(8)).threads(), 8);
  machine.write("/sys/fs/cgroup/pod/cpu.max", "250000 100000");
  EXPECT_DOUBLE_EQ(machine.read(first_cpus(8)).quota, 2.5);
  EXPECT_EQ(machine.read(first_cpus(8)).quota_file, "/sys/fs/cgroup/pod/cpu.max");
  EXPECT_EQ(machine.read(first_cpus(8)).threads(), 3) << "a last thread uses the fraction";
  EXPECT_EQ(machine.read({0}).threads(), 1) << "the mask is narrower";
  machine.write("/sys/fs/cgroup/pod/container/cpu.max", "5000 10000");
  EXPECT_DOUBLE_EQ(machine.read(first_cpus(8)).quota, 0.5);
  EXPECT_EQ(machine.read(first_cpus(8)).threads(), 1);
  machine.write("/sys/fs/cgroup/cpu.max", "150000");  // the period's default is 100 ms
  machine.write("/sys/fs/cgroup/pod/container/cpu.max", "rubbish");
  EXPECT_DOUBLE_EQ(machine.read(first_cpus(8)).quota, 1.5);
}

TEST(Topology, QuotaOfVersion1) {
  FakeMachine machine;
  machine.version1("/docker/abc");
  const std::string folder = "/sys/fs/cgroup/cpu,cpuacct/docker/abc/";
  machine.write(folder + "cpu.cfs_quota_us", "-1").write(folder + "cpu.cfs_period_us", "100000");
  EXPECT_EQ(machine.read(first_cpus(4)).quota, 0);
  machine.write(folder + "cpu.cfs_quota_us", "150000");
  EXPECT_DOUBLE_EQ(machine.read(first_cpus(4)).quota, 1.5);
  EXPECT_EQ(machine.read(first_cpus(4)).threads(), 2);
  machine.write(folder + "cpu.cfs_period_us", "0");
  EXPECT_EQ(machine.read(first_cpus(4)).quota, 0) << "no division by what a broken file says";
}

TEST(Topology, AContainersOwnGroupIsMountedAsTheRoot) {
  FakeMachine docker;  // version 1 without a namespace: /proc has the host's name, the mount its group
  docker.version1("/docker/abc/inner", "/docker/abc");
  docker.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "200000");
  docker.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000");
  EXPECT_DOUBLE_EQ(docker.read(first_cpus(4)).quota, 2);
  docker.write("/sys/fs/cgroup/cpu,cpuacct/inner/cpu.cfs_quota_us", "100000");
  docker.write("/sys/fs/cgroup/cpu,cpuacct/inner/cpu.cfs_period_us", "100000");
  EXPECT_DOUBLE_EQ(docker.read(first_cpus(4)).quota, 1);
  FakeMachine moved;  // a process outside of its namespace's root
  moved.version2("/../sibling");
  moved.write("/sys/fs/cgroup/cpu.max", "300000 100000");
  EXPECT_DOUBLE_EQ(moved.read(first_cpus(4)).quota, 3);
  FakeMachine namespaced;
  namespaced.version2("/");
  namespaced.write("/sys/fs/cgroup/cpu.max", "100000 100000");
  EXPECT_DOUBLE_EQ(namespaced.read(first_cpus(4)).quota, 1);
}

TEST(Topology, BothVersionsMounted) {
  FakeMachine machine;
  machine.write("/proc/self/cgroup", "3:cpu:/a\n0::/b");
  machine.write("/proc/self/mountinfo",
                "32 30 0:28 / /cgroups\\040of/cpu rw - cgroup cgroup rw,cpu\n"
                "41 30 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
                "broken line");
  machine.write("/cgroups of/cpu/a/cpu.cfs_quota_us", "400000").write("/cgroups of/cpu/a/cpu.cfs_period_us", "100000");
  EXPECT_DOUBLE_EQ(machine.read(first_cpus(8)).quota, 4);
  machine.write("/sys/fs/cgroup/unified/b/cpu.max", "300000 100000");
  EXPECT_DOUBLE_EQ(machine.read(first_cpus(8)).quota, 3);
}

TEST(Topology, MemoryLimits) {
  FakeMachine two;
  two.version2("/pod/container");
  two.write("/sys/fs/cgroup/pod/container/memory.max", "max").write("/sys/fs/cgroup/pod/memory.max", "1073741824");
  EXPECT_EQ(two.read({0}).memory_limit, 1 << 30);
  EXPECT_EQ(two.read({0}).memory_file, "/sys/fs/cgroup/pod/memory.max");
  FakeMachine one;
  one.version1("/docker/abc");
  one.write("/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "9223372036854771712");  // no limit
  EXPECT_EQ(one.read({0}).memory_limit, 0);
  one.write("/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "536870912");
  EXPECT_EQ(one.read({0}).memory_limit, 512 << 20);
}

TEST(Topology, ListsOfCpus) {
  EXPECT_EQ(parse_cpu_list("0-2,7,9-10"), (std::vector<int>{0, 1, 2, 7, 9, 10}));
  for (const char* nothing : {"", "\n", "x", "-1", "3-1", "99999999999999", "0-99999999"}) {
    EXPECT_TRUE(parse_cpu_list(nothing).empty()) << nothing;
  }
}

TEST(Topology, OfThisMachine) {
  cpu_set_t mask;
  ASSERT_EQ(sched_getaffinity(0, sizeof(mask), &mask), 0);
  EXPECT_EQ(static_cast<int>(allowed_cpus().size()), CPU_COUNT(&mask));
  const Topology& machine = topology();
  EXPECT_GE(machine.threads(), 1);
  EXPECT_LE(machine.threads(), machine.cores);
  EXPECT_LE(machine.cores, machine.cpus);
  EXPECT_LE(machine.sockets, machine.cores);
  EXPECT_GE(current_node(), 0);
  EXPECT_LT(current_node(), node_count());
  int seen = 0;
  std::thread([&] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(allowed_cpus().back(), &one);
    sched_setaffinity(0, sizeof(one), &one);
    seen = read_topology(allowed_cpus()).threads();
  }).join();
  EXPECT_EQ(seen, 1);
}

TEST(TaskQueue, EveryNumberOnceWhateverTheNodes) {
  for (const int nodes : {1, 2, 3, 8, 100}) {
    for (const int64_t tasks : {0, 1, 2, 7, 1000}) {
      TaskQueue queue(tasks, nodes);
      std::multiset<int64_t> taken;
      int node = 0;
      for (int64_t task; (task = queue.take(node)) >= 0; node = (node + 1) % std::max(nodes, 1)) taken.insert(task);
      EXPECT_EQ(taken.size(), static_cast<size_t>(tasks));
      EXPECT_EQ(std::set<int64_t>(taken.begin(), taken.end()).size(), static_cast<size_t>(tasks));
      if (tasks > 0) EXPECT_EQ(*taken.rbegin(), tasks - 1);
      for (int again = 0; again < nodes; ++again) EXPECT_EQ(queue.take(again), -1);
    }
  }
}

TEST(TaskQueue, ANodeBeginsWithItsOwnRangeAndThenHelps) {
  TaskQueue queue(10, 2);
  EXPECT_EQ(queue.take(1), 5);
  EXPECT_EQ(queue.take(0), 0);
  for (int64_t task = 6; task < 10; ++task) EXPECT_EQ(queue.take(1), task);
  EXPECT_EQ(queue.take(1), 1) << "node 0's, where numbers are left";
  queue.drop();
  EXPECT_EQ(queue.take(0), -1);
  EXPECT_EQ(queue.take(1), -1);
}

TEST(TaskQueue, ASlowThreadDelaysByOneTaskAtMost) {
  // A slow core takes few tasks; the others do not wait for a share that was cut for it beforehand.
  TaskQueue queue(64, 1);
  std::atomic<int64_t> slow{0}, fast{0};
  std::thread slow_core([&] {
    while (queue.take() >= 0) {
      ++slow;
      while (fast.load() < 60 && slow.load() == 1)
        std::this_thread::yield();  // its first task takes nearly all the time
    }
  });
  while (slow.load() == 0) std::this_thread::yield();
  while (queue.take() >= 0) ++fast;
  slow_core.join();
  EXPECT_EQ(slow + fast, 64);
  EXPECT_GE(fast.load(), 60);
}

}  // namespace
}  // namespace kernel_pytorch::cpu_device
