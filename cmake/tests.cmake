# Unit tests sit beside their sources: every *_test.cpp goes into one program, each test case is one ctest.
find_package(GTest REQUIRED)
include(GoogleTest)
file(GLOB_RECURSE test_sources CONFIGURE_DEPENDS kernel_pytorch/*_test.cpp)
list(FILTER test_sources EXCLUDE REGEX "/kernel_pytorch/(torch|jax)/")
add_executable(kernel_pytorch_tests ${test_sources} $<TARGET_OBJECTS:kernel_pytorch_objects> ${KP_ISA_OBJECTS})
target_compile_definitions(kernel_pytorch_tests PRIVATE KP_VERSION="${PROJECT_VERSION}")
target_link_libraries(kernel_pytorch_tests PRIVATE kernel_pytorch_objects GTest::gtest_main)
# One process per suite keeps the whole run short: start-up of the program is most of a small test's time.
add_test(NAME unit COMMAND kernel_pytorch_tests)
