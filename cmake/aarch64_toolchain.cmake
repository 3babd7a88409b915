# Cross-compiles for arm64 Linux with Debian's compiler; programs run under qemu-user (tools/test_arm64). The target's
# libraries come from Debian's arm64 packages, which lie next to the host's (multiarch): tools/setup --ci installs them.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64)
