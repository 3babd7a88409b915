# kpt, the command line: the library's own headers, CLI11 and {fmt}, the last as headers only. In the build tree it finds
# the library where CMake put it; the installed one looks in ../lib (cmake/install.cmake).
find_package(CLI11 REQUIRED)
find_package(fmt REQUIRED)
file(GLOB cli_sources CONFIGURE_DEPENDS kernel_pytorch/cli/*.cpp)
list(FILTER cli_sources EXCLUDE REGEX "_test\\.cpp$")
add_executable(kpt ${cli_sources})
target_link_libraries(kpt PRIVATE kernel_pytorch CLI11::CLI11 fmt::fmt-header-only nlohmann_json::nlohmann_json)
