# Embeds device sources and every header they may include as text for NVRTC: in the library those of its kernels, in the
# tests also the tests' own (*_probe.cuh, *_probe_cuda.h).
file(GLOB_RECURSE device_sources CONFIGURE_DEPENDS RELATIVE ${CMAKE_SOURCE_DIR}
     kernel_pytorch/*.cuh kernel_pytorch/*_cuda.h)
list(APPEND device_sources kernel_pytorch/base/fixed_width.h kernel_pytorch/base/philox.h)

function(kp_embed_sources output)
  list(TRANSFORM ARGN PREPEND ${CMAKE_SOURCE_DIR}/ OUTPUT_VARIABLE paths)
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} -DROOT=${CMAKE_SOURCE_DIR} "-DSOURCES=${ARGN}" -DOUTPUT=${output}
            -P ${CMAKE_SOURCE_DIR}/cmake/embed_sources.cmake
    DEPENDS ${paths} ${CMAKE_SOURCE_DIR}/cmake/embed_sources.cmake
    VERBATIM)
endfunction()

set(library_sources ${device_sources})
list(FILTER library_sources EXCLUDE REGEX "_probe(_cuda)?\\.(cuh|h)$")
kp_embed_sources(${CMAKE_BINARY_DIR}/embedded_sources.cpp ${library_sources})
if(KP_BUILD_TESTS)
  kp_embed_sources(${CMAKE_BINARY_DIR}/embedded_test_sources.cpp ${device_sources})
endif()
