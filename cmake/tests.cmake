# Unit tests are next to their sources: every *_test.cpp goes into one program.
find_package(GTest REQUIRED)
include(GoogleTest)
file(GLOB_RECURSE test_sources CONFIGURE_DEPENDS kernel_pytorch/*_test.cpp)
list(FILTER test_sources EXCLUDE REGEX "/kernel_pytorch/(torch|jax)/")
add_executable(kernel_pytorch_tests ${test_sources} ${KP_CORE_OBJECTS} ${KP_ISA_PROBE_OBJECTS}
               ${CMAKE_BINARY_DIR}/embedded_test_sources.cpp)
target_compile_definitions(kernel_pytorch_tests PRIVATE KP_VERSION="${PROJECT_VERSION}" KP_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
target_link_libraries(kernel_pytorch_tests PRIVATE kernel_pytorch_objects GTest::gtest_main)
# The tests' own code need not be fast to run, only fast to build.
target_compile_options(kernel_pytorch_tests PRIVATE -O1)
target_precompile_headers(kernel_pytorch_tests PRIVATE <gtest/gtest.h>)
kp_compile_together(kernel_pytorch_tests)
# Two processes for all tests, so that two cores are busy: start-up of the program is most of a small test's time.
foreach(shard 0 1)
  add_test(NAME unit_${shard} COMMAND kernel_pytorch_tests)
  set_tests_properties(unit_${shard} PROPERTIES ENVIRONMENT "GTEST_TOTAL_SHARDS=2;GTEST_SHARD_INDEX=${shard}")
endforeach()
# The machine's best level hides the others, which round differently: the ops once more on each of them. A run that caps
# the level itself (tools/sanitize) needs no more of them.
if(NOT KP_SANITIZE AND NOT CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  foreach(isa v2 v3)
    add_test(NAME unit_at_${isa} COMMAND kernel_pytorch_tests --gtest_brief=1
             --gtest_filter=*.MatchesItsReferenceOnTheCpu/*)
    set_tests_properties(unit_at_${isa} PROPERTIES ENVIRONMENT KERNEL_PYTORCH_CPU_ISA=${isa})
  endforeach()
endif()

# No symbol of one instruction level may be merged with another's: "name=object" for each object of each level.
set(isa_objects)
foreach(target IN LISTS KP_ISA_TARGETS)
  string(REGEX REPLACE ".*_isa_" "" isa ${target})
  list(APPEND isa_objects "${isa}=$<JOIN:$<TARGET_OBJECTS:${target}>,$<SEMICOLON>${isa}=>")
endforeach()
find_package(Python3 REQUIRED COMPONENTS Interpreter)
add_test(NAME isa_symbols COMMAND Python3::Interpreter ${CMAKE_SOURCE_DIR}/tests/isa_symbols/check_isa_symbols.py
         --nm ${CMAKE_NM} ${isa_objects} COMMAND_EXPAND_LISTS)
add_test(NAME isa_symbols_catches COMMAND Python3::Interpreter ${CMAKE_SOURCE_DIR}/tests/isa_symbols/check_isa_symbols_test.py
         --nm ${CMAKE_NM} --compiler ${CMAKE_CXX_COMPILER})
