# libkernel_pytorch_jax.so: the core's ops as XLA FFI handlers. It needs XLA's headers and no library. A runtime drops
# handlers that were built with newer headers than its own, so they are those of the oldest jaxlib that is supported:
# tools/setup lays them into .venv. Else those of the jaxlib in the Python that CMake finds, whose adapter then serves that
# version and later ones; -DKP_XLA_INCLUDE_DIR=<folder with xla/ffi/api> names others.
set(KP_XLA_INCLUDE_DIR "" CACHE PATH "The folder with xla/ffi/api/ffi.h")
if(NOT KP_XLA_INCLUDE_DIR)
  set(found_xla "${CMAKE_SOURCE_DIR}/.venv/xla/include")
  find_package(Python3 COMPONENTS Interpreter QUIET)
  if(NOT EXISTS "${found_xla}" AND Python3_FOUND)
    execute_process(
      COMMAND ${Python3_EXECUTABLE} -c "import os, sysconfig
print(os.path.join(sysconfig.get_path('platlib'), 'jaxlib', 'include'), end='')"
      OUTPUT_VARIABLE found_xla ERROR_QUIET)
  endif()
  set(KP_XLA_INCLUDE_DIR "${found_xla}" CACHE PATH "The folder with xla/ffi/api/ffi.h" FORCE)
endif()
if(NOT EXISTS "${KP_XLA_INCLUDE_DIR}/xla/ffi/api/ffi.h")
  message(WARNING "No XLA headers in '${KP_XLA_INCLUDE_DIR}': the JAX adapter is not built. Run tools/setup, give "
                  "-DKP_XLA_INCLUDE_DIR=<folder with xla/ffi/api>, or -DKP_BUILD_JAX=OFF to silence this.")
  return()
endif()

file(GLOB_RECURSE jax_sources CONFIGURE_DEPENDS kernel_pytorch/jax/*.cpp)
add_library(kernel_pytorch_jax SHARED ${jax_sources})
target_include_directories(kernel_pytorch_jax SYSTEM PRIVATE ${KP_XLA_INCLUDE_DIR})
target_link_libraries(kernel_pytorch_jax PRIVATE kernel_pytorch)
target_link_options(kernel_pytorch_jax PRIVATE -Wl,--as-needed -Wl,--no-undefined -Wl,--gc-sections)
set_target_properties(kernel_pytorch_jax PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN")
