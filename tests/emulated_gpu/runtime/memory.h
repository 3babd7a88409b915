// Memory of the emulated device. What is fresh holds 0xff bytes: NaN as a float of any width, -1 as an integer. An
// allocation ends at a page that cannot be touched, and the bytes up to there are checked when it is freed.
#pragma once

#include <csignal>
#include <cstddef>
#include <string>

namespace emulated {

inline constexpr unsigned char kPoison = 0xff;

void* allocate(size_t bytes);  // null where the machine has none
// What was wrong with it, or nothing.
std::string release(void* memory);
// The same of all allocations: after a launch it is known who wrote.
std::string check_canaries();
// "16 bytes past the end of an allocation of 4096 bytes at 0x..."
std::string describe_address(const void* address);
size_t allocated_bytes();

// A block's shared memory, with a canary on both sides.
char* take_shared(size_t bytes);
std::string give_shared(char* shared, size_t bytes);

// While it lives, a fault of a fiber ends the launch instead of the process.
class FaultHandler {
 public:
  FaultHandler();
  ~FaultHandler();
  FaultHandler(const FaultHandler&) = delete;
  FaultHandler& operator=(const FaultHandler&) = delete;

 private:
  struct sigaction segmentation_ {
  }, bus_{}, arithmetic_{};
  stack_t stack_{};
};

}  // namespace emulated
