# Compiles sources together, so that their headers are read once: that is most of a build's time. A folder's sources are
# one translation unit. In ops/, the files of one role are (all references, all lists of kernels, all cpu/host.cpp): files
# of one op may define the same names, but every op has a namespace of its own. Of the files whose roles are rare, the
# first of every op are together, then the second of every op, and so on.
# -DKP_UNITY_BUILD=OFF compiles file by file, for work inside one folder.
option(KP_UNITY_BUILD "Compile sources together by folder, in ops by role" ON)

# So many files make a role a translation unit. Kernels of an instruction level: every role, so that inlining in one does not
# depend on another.
set(KP_COMMON_ROLE 3)

function(kp_compile_together target)
  if(NOT KP_UNITY_BUILD)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  get_target_property(sources ${target} SOURCES)
  set(op_sources)
  set(ops)
  set(roles)
  set(rare_ops)
  foreach(source IN LISTS sources)
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY ${CMAKE_SOURCE_DIR} OUTPUT_VARIABLE path)
    if(path MATCHES "^kernel_pytorch/ops/(engines/)?([^/]+)/(.+)\\.cpp$")
      set(op ${CMAKE_MATCH_2})
      string(REGEX REPLACE "^${op}_?" "" role ${CMAKE_MATCH_3})  # ops/rope/cuda/host.cpp: cuda_host
      string(REPLACE "/" "_" role "${role}")
      list(APPEND op_sources ${source})
      list(APPEND ops ${op})
      list(APPEND roles ops_${role})
    elseif(path MATCHES "^kernel_pytorch/(.+)/[^/]+\\.cpp$")
      string(REPLACE "/" "_" group ${CMAKE_MATCH_1})
      set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group})
    endif()  # others are generated
  endforeach()
  foreach(source role op IN ZIP_LISTS op_sources roles ops)
    kp_count(files ${role} ${roles})
    if(files LESS KP_COMMON_ROLE AND NOT target MATCHES "_isa_")
      list(APPEND rare_ops ${op})
      kp_count(place ${op} ${rare_ops})
      set(role ops_rare_${place})
    endif()
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${role})
  endforeach()
endfunction()

# How often `word` is in the list that follows.
function(kp_count result word)
  list(FILTER ARGN INCLUDE REGEX "^${word}$")
  list(LENGTH ARGN count)
  set(${result} ${count} PARENT_SCOPE)
endfunction()
