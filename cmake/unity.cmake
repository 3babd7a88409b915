# Compiles sources together, so that their headers are read once: that is most of a build's time. A folder's sources are
# one; of the rooms of ops, the files of the same role are (all references, all lists of kernels, all tests): a room's
# files may use the same names, but every room is a namespace of its own.
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
    if(path MATCHES "^kernel_pytorch/ops/([^/]+)/(.+)\\.cpp$")
      string(REGEX REPLACE "^${CMAKE_MATCH_1}_?" "" role ${CMAKE_MATCH_2})  # ops/rope/rope_cuda.cpp: cuda
      set(group ops_${role})
    elseif(path MATCHES "^kernel_pytorch/(.+)/[^/]+\\.cpp$")
      string(REPLACE "/" "_" group ${CMAKE_MATCH_1})
    else()
      continue()  # generated
    endif()
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group})
  endforeach()
endfunction()
