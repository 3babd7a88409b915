# Compiles sources together, so that their headers are read once: that is most of a build's time. A folder's sources are
# one translation unit. In ops/, the files of one role are (all references, all lists of kernels, all cpu/host.cpp): files
# of one op may define the same names, but every op has a namespace of its own.
# -DKP_UNITY_BUILD=OFF compiles file by file, for work inside one folder.
option(KP_UNITY_BUILD "Compile sources together by folder, in ops by role" ON)

function(kp_compile_together target)
  if(NOT KP_UNITY_BUILD)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  get_target_property(sources ${target} SOURCES)
  foreach(source IN LISTS sources)
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY ${CMAKE_SOURCE_DIR} OUTPUT_VARIABLE path)
    if(path MATCHES "^kernel_pytorch/ops/(engines/)?([^/]+)/(.+)\\.cpp$")
      string(REGEX REPLACE "^${CMAKE_MATCH_2}_?" "" role ${CMAKE_MATCH_3})  # ops/rope/cuda/host.cpp: cuda_host
      string(REPLACE "/" "_" role "${role}")
      set(group ops_${role})
    elseif(path MATCHES "^kernel_pytorch/(.+)/[^/]+\\.cpp$")
      string(REPLACE "/" "_" group ${CMAKE_MATCH_1})
    else()
      continue()  # generated
    endif()
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group})
  endforeach()
endfunction()
