# libkernel_pytorch_torch.so: the core's ops under torch.ops.kernel_pytorch, through the LibTorch stable ABI of 2.11 alone
# (TORCH_STABLE_ONLY makes any other header an error), so that one build serves every torch from 2.11 on.
# torch is found as -DKP_TORCH_DIR=<site-packages>/torch, else in the Python that CMake finds (-DPython3_EXECUTABLE=...).
set(KP_TORCH_DIR "" CACHE PATH "torch's package folder: the one with include/ and lib/")
if(NOT KP_TORCH_DIR)
  find_package(Python3 COMPONENTS Interpreter QUIET)
  if(Python3_FOUND)
    execute_process(
      COMMAND ${Python3_EXECUTABLE} -c
              "import importlib.util, os, sysconfig
found = importlib.util.find_spec('torch')
# pip's isolated builds hide the environment they run in from imports, not from sysconfig.
path = found.submodule_search_locations[0] if found else os.path.join(sysconfig.get_path('purelib'), 'torch')
print(path if os.path.isdir(path) else '', end='')"
      OUTPUT_VARIABLE found_torch ERROR_QUIET)
    set(KP_TORCH_DIR "${found_torch}" CACHE PATH "torch's package folder: the one with include/ and lib/" FORCE)
  endif()
endif()

if(NOT EXISTS "${KP_TORCH_DIR}/include/torch/csrc/stable/library.h")
  message(WARNING "No torch found (KP_TORCH_DIR='${KP_TORCH_DIR}', Python '${Python3_EXECUTABLE}'): the PyTorch adapter is "
                  "not built. Give -DKP_TORCH_DIR=<site-packages>/torch, or -DKP_BUILD_TORCH=OFF to silence this.")
  return()
endif()

file(GLOB_RECURSE torch_sources CONFIGURE_DEPENDS kernel_pytorch/torch/*.cpp)
list(FILTER torch_sources EXCLUDE REGEX "_test\\.cpp$")
add_library(kernel_pytorch_torch SHARED ${torch_sources})
target_include_directories(kernel_pytorch_torch SYSTEM PRIVATE ${KP_TORCH_DIR}/include)
file(STRINGS ${KP_TORCH_DIR}/version.py torch_version REGEX "^__version__ = ")
string(REGEX REPLACE "^__version__ = '([^']*)'.*" "\\1" torch_version "${torch_version}")
set_source_files_properties(kernel_pytorch/torch/built_with.cpp PROPERTIES COMPILE_DEFINITIONS
                            "KP_VERSION=\"${PROJECT_VERSION}\";KP_TORCH_VERSION=\"${torch_version}\"" SKIP_PRECOMPILE_HEADERS ON)
target_compile_definitions(kernel_pytorch_torch PRIVATE TORCH_TARGET_VERSION=0x020b000000000000 TORCH_STABLE_ONLY)
# libtorch_cpu carries the whole stable ABI in every build of torch; libtorch_cuda is looked up at run time instead.
target_link_libraries(kernel_pytorch_torch PRIVATE kernel_pytorch ${CMAKE_DL_LIBS})
if(CMAKE_CROSSCOMPILING)
  # The headers are the same everywhere; the library of this machine's torch is not the target's. An empty one of its name
  # leaves the adapter asking for the real one, whose symbols the stable ABI fixes.
  file(WRITE ${CMAKE_BINARY_DIR}/empty.cpp "")
  add_library(empty_torch_cpu SHARED ${CMAKE_BINARY_DIR}/empty.cpp)
  set_target_properties(empty_torch_cpu PROPERTIES OUTPUT_NAME torch_cpu LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/empty)
  target_link_libraries(kernel_pytorch_torch PRIVATE -Wl,--no-as-needed empty_torch_cpu -Wl,--as-needed)
else()
  target_link_libraries(kernel_pytorch_torch PRIVATE ${KP_TORCH_DIR}/lib/libtorch_cpu.so)
  target_link_options(kernel_pytorch_torch PRIVATE -Wl,--no-undefined)
endif()
target_precompile_headers(kernel_pytorch_torch PRIVATE kernel_pytorch/torch/call.h)
target_link_options(kernel_pytorch_torch PRIVATE -Wl,--as-needed -Wl,--gc-sections)
# torch is in the process before this library is loaded, so the loader only has to find the core next to it.
set_target_properties(kernel_pytorch_torch PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN")
