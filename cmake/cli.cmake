# kpt, the command line: the library's own headers, CLI11 and {fmt}, the last as headers only and compiled in one file
# (cli/format.cpp), so its target's global define is not taken over. In the build tree kpt finds the library where CMake
# put it; the installed one looks in ../lib (cmake/install.cmake).
find_package(CLI11 REQUIRED)
find_package(fmt REQUIRED)
file(GLOB cli_sources CONFIGURE_DEPENDS kernel_pytorch/cli/*.cpp kernel_pytorch/cli/python/*.cpp)
list(FILTER cli_sources EXCLUDE REGEX "_test\\.cpp$")
add_executable(kpt ${cli_sources})
target_include_directories(kpt PRIVATE $<TARGET_PROPERTY:fmt::fmt-header-only,INTERFACE_INCLUDE_DIRECTORIES>)
target_link_libraries(kpt PRIVATE kernel_pytorch CLI11::CLI11 nlohmann_json::nlohmann_json)
# Nothing here is worth the optimiser's time: the work is in the library.
target_compile_options(kpt PRIVATE -O0)
