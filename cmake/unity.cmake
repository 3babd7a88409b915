# Compiles the sources of a folder as one, so that its headers are read once: that is most of a build's time. The rooms of
# ops are left out: their kernels are alike by intent, and may use the same names.
# -DKP_UNITY_BUILD=OFF compiles file by file, for work inside one folder.
option(KP_UNITY_BUILD "Compile the sources of a folder together" ON)

function(kp_compile_by_folder target)
  if(NOT KP_UNITY_BUILD)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  get_target_property(sources ${target} SOURCES)
  foreach(source IN LISTS sources)
    if(source MATCHES "/kernel_pytorch/(base|device|jit|tuning|registry|c|cli)/(.*/)?[^/]+\\.cpp$")
      get_filename_component(folder ${source} DIRECTORY)
      string(REGEX REPLACE "^.*/kernel_pytorch/" "" folder ${folder})
      string(REPLACE "/" "_" group ${folder})
      set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group})
    endif()
  endforeach()
endfunction()
