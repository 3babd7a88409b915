# Cross-compiles for arm64 Linux with Debian's compiler; programs run under qemu-user (tools/test_arm64). tools/arm64_options
# fetches the target's libraries.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
