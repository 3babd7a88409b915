# The installed tree, the same for `cmake --install` and for the wheel (where the prefix is the Python package's folder):
#   bin/kpt   lib/libkernel_pytorch*.so   lib/cmake/kernel_pytorch/   include/kernel_pytorch/
include(CMakePackageConfigHelpers)
set(KP_CMAKE_DIRECTORY lib/cmake/kernel_pytorch)

# base/version.h names the version of the library it came with.
target_compile_definitions(kernel_pytorch INTERFACE KP_VERSION="${PROJECT_VERSION}")
target_compile_features(kernel_pytorch INTERFACE cxx_std_20)

install(TARGETS kernel_pytorch EXPORT kernel_pytorch_targets LIBRARY DESTINATION lib)
if(TARGET kpt)
  set_target_properties(kpt PROPERTIES INSTALL_RPATH "$ORIGIN/../lib")
  install(TARGETS kpt RUNTIME DESTINATION bin)
endif()
foreach(adapter kernel_pytorch_torch kernel_pytorch_jax)
  if(TARGET ${adapter})
    set_target_properties(${adapter} PROPERTIES INSTALL_RPATH "$ORIGIN")
    install(TARGETS ${adapter} LIBRARY DESTINATION lib)
  endif()
endforeach()

# The headers a C++ user can call: no primitives, no kernel code that several ops share, no adapters, no command line.
install(DIRECTORY kernel_pytorch DESTINATION include
        FILES_MATCHING PATTERN "*.h" PATTERN "*_test.h" EXCLUDE PATTERN "product_sm90*" EXCLUDE
        PATTERN "kernel_pytorch/cpu" EXCLUDE PATTERN "kernel_pytorch/cuda" EXCLUDE
        PATTERN "kernel_pytorch/torch" EXCLUDE PATTERN "kernel_pytorch/jax" EXCLUDE PATTERN "kernel_pytorch/cli" EXCLUDE)

install(EXPORT kernel_pytorch_targets NAMESPACE kernel_pytorch:: DESTINATION ${KP_CMAKE_DIRECTORY})
configure_package_config_file(cmake/kernel_pytorch-config.cmake.in ${CMAKE_BINARY_DIR}/kernel_pytorch-config.cmake
                              INSTALL_DESTINATION ${KP_CMAKE_DIRECTORY})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/kernel_pytorch-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/kernel_pytorch-config.cmake ${CMAKE_BINARY_DIR}/kernel_pytorch-config-version.cmake
        DESTINATION ${KP_CMAKE_DIRECTORY})

if(SKBUILD)
  # A script of a wheel cannot know where the package's libraries lie, so `kpt` on the PATH finds the package and becomes its bin/kpt.
  # The course of `kpt learn`, and the one shipped device header that its kernels need on a CPU.
  install(DIRECTORY learn DESTINATION . PATTERN "__pycache__" EXCLUDE)
  install(FILES kernel_pytorch/cuda/tile/fragment.cuh DESTINATION learn/support/on_cpu/kernel_pytorch/cuda/tile)
  install(PROGRAMS tools/kpt_script.py DESTINATION ${SKBUILD_SCRIPTS_DIR} RENAME kpt)
endif()
