# Embeds every device source and every header it may include into the library, as text for NVRTC.
file(GLOB_RECURSE device_sources CONFIGURE_DEPENDS RELATIVE ${CMAKE_SOURCE_DIR}
     kernel_pytorch/*.cuh kernel_pytorch/*_cuda.h)
list(APPEND device_sources kernel_pytorch/base/fixed_width.h kernel_pytorch/base/philox.h)
list(TRANSFORM device_sources PREPEND ${CMAKE_SOURCE_DIR}/ OUTPUT_VARIABLE device_source_paths)
add_custom_command(
  OUTPUT ${CMAKE_BINARY_DIR}/embedded_sources.cpp
  COMMAND ${CMAKE_COMMAND} -DROOT=${CMAKE_SOURCE_DIR} "-DSOURCES=${device_sources}"
          -DOUTPUT=${CMAKE_BINARY_DIR}/embedded_sources.cpp -P ${CMAKE_SOURCE_DIR}/cmake/embed_sources.cmake
  DEPENDS ${device_source_paths} ${CMAKE_SOURCE_DIR}/cmake/embed_sources.cmake
  VERBATIM)
