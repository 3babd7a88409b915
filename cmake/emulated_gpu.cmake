# The emulated GPU (tests/emulated_gpu): a libcuda.so.1 and an NVRTC that run kernels on the CPU, for machines without a
# GPU. Nothing links to them; tools/emulate names them to the loader.
set(emulated_directory ${CMAKE_BINARY_DIR}/emulated_gpu)
file(GLOB emulated_runtime CONFIGURE_DEPENDS tests/emulated_gpu/runtime/*.cpp)
file(GLOB emulated_compiler CONFIGURE_DEPENDS tests/emulated_gpu/compiler/*.cpp)
add_library(emulated_cuda SHARED ${emulated_runtime})
set_target_properties(emulated_cuda PROPERTIES OUTPUT_NAME cuda SOVERSION 1 CXX_VISIBILITY_PRESET default LIBRARY_OUTPUT_DIRECTORY ${emulated_directory})
target_compile_options(emulated_cuda PRIVATE -O3 -mavx2 -mfma -mf16c -ffp-contract=fast)
add_library(emulated_nvrtc SHARED ${emulated_compiler})
set_target_properties(emulated_nvrtc PROPERTIES OUTPUT_NAME nvrtc_emulated LIBRARY_OUTPUT_DIRECTORY ${emulated_directory})
target_compile_definitions(emulated_nvrtc PRIVATE
  EMULATED_DEVICE_SOURCES="${CMAKE_SOURCE_DIR}/tests/emulated_gpu/device" EMULATED_COMPILER="${CMAKE_CXX_COMPILER}")
foreach(library emulated_cuda emulated_nvrtc)
  target_include_directories(${library} PRIVATE ${CMAKE_SOURCE_DIR})
  target_link_libraries(${library} PRIVATE ${CMAKE_DL_LIBS} Threads::Threads)
  target_link_options(${library} PRIVATE -Wl,--no-undefined)
endforeach()
# The same library is the HIP of an emulated AMD GPU.
add_custom_command(TARGET emulated_cuda POST_BUILD
  COMMAND ${CMAKE_COMMAND} -E create_symlink libcuda.so.1 ${emulated_directory}/libamdhip64.so)
