# One libFuzzer program per *_fuzz.cpp, built by clang, whichever compiler builds the rest. The file names the
# sources that it needs in a line of its own: "// kp-fuzz-with: a.cpp b.cpp". Run one with
#   fuzzers/import_fuzz -max_total_time=600 -max_len=2048 -len_control=0 -dict=tests/fuzz_corpus/import.dict NEW_CORPUS tests/fuzz_corpus/import
find_program(KP_FUZZ_COMPILER NAMES clang++-14 clang++ REQUIRED)
file(GLOB_RECURSE fuzz_sources CONFIGURE_DEPENDS kernel_pytorch/*_fuzz.cpp)
set(fuzz_programs)
foreach(source IN LISTS fuzz_sources)
  get_filename_component(name ${source} NAME_WE)
  file(STRINGS ${source} with REGEX "^// kp-fuzz-with: " LIMIT_COUNT 1)
  string(REGEX REPLACE "^// kp-fuzz-with: " "" with "${with}")
  separate_arguments(with)
  list(TRANSFORM with PREPEND ${CMAKE_SOURCE_DIR}/)
  set(program ${CMAKE_BINARY_DIR}/fuzzers/${name})
  add_custom_command(
    OUTPUT ${program}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/fuzzers
    COMMAND ${KP_FUZZ_COMPILER} -std=c++20 -g1 -O1 -fsanitize=fuzzer,address -fno-omit-frame-pointer
            -DKP_VERSION=\"${PROJECT_VERSION}\" -I${CMAKE_SOURCE_DIR} ${source} ${with} -o ${program}
    DEPENDS ${source} ${with}
    VERBATIM)
  list(APPEND fuzz_programs ${program})
endforeach()
add_custom_target(fuzzers ALL DEPENDS ${fuzz_programs})
