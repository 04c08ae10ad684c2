# smartinf_module(NAME base
#                 [SOURCES a.cc ...] [DEPENDS base kernels ...] [LIBRARIES fmt::fmt ...]
#                 [TESTS a_test.cc ...] [TEST_LIBRARIES ...] [BENCHES a_bench.cc ...]
#                 [CAPABILITIES io_uring=*/uring ...])
#
# Declares the static library smartinf_<NAME> (alias smartinf::<NAME>) with every source of its
# folder, one gtest executable <NAME>_tests and one executable per benchmark. DEPENDS names modules;
# tests/module_includes_test.py holds them to the table in docs/architecture.md. CAPABILITIES are what a
# machine may lack: the cases that its gtest filter selects are a ctest entry <NAME>.<capability> of
# their own, which ctest shows as "Skipped" where they skipped themselves.
function(smartinf_module)
  cmake_parse_arguments(MODULE "" "NAME"
    "SOURCES;DEPENDS;LIBRARIES;TESTS;TEST_LIBRARIES;BENCHES;CAPABILITIES" ${ARGN})
  if(MODULE_UNPARSED_ARGUMENTS OR NOT MODULE_NAME)
    message(FATAL_ERROR "smartinf_module: unexpected ${MODULE_UNPARSED_ARGUMENTS}")
  endif()
  set(library smartinf_${MODULE_NAME})
  list(TRANSFORM MODULE_DEPENDS PREPEND smartinf_)
  if(MODULE_SOURCES)
    add_library(${library} STATIC ${MODULE_SOURCES})
    smartinf_precompile_module_headers(${library})
    smartinf_unity(${library})
    set(scope PUBLIC)
  else()
    add_library(${library} INTERFACE)
    set(scope INTERFACE)
  endif()
  add_library(smartinf::${MODULE_NAME} ALIAS ${library})
  target_link_libraries(${library} ${scope}
    smartinf_options ${MODULE_DEPENDS} ${MODULE_LIBRARIES} Threads::Threads)

  if(SMARTINF_TESTS AND MODULE_TESTS)
    add_executable(${MODULE_NAME}_tests ${MODULE_TESTS})
    target_link_libraries(${MODULE_NAME}_tests PRIVATE
      ${library} ${MODULE_TEST_LIBRARIES} GTest::gmock GTest::gtest_main)
    # Matchers take twice as long to compile with -O3; what is tested is compiled as for users.
    target_compile_options(${MODULE_NAME}_tests PRIVATE $<$<CONFIG:Release>:-O1>)
    smartinf_precompile_test_headers(${MODULE_NAME}_tests)
    smartinf_unity(${MODULE_NAME}_tests)
    include(GoogleTest)
    # One ctest entry per module and capability, not per case: a case is selected with --gtest_filter.
    set(test_name ${MODULE_NAME})
    if(SMARTINF_SANITIZE)  # scripts/test.sh runs several builds in one summary
      string(REPLACE "," "+" sanitizers ${SMARTINF_SANITIZE})
      set(test_name "${MODULE_NAME}.${sanitizers}")
    endif()
    # COST, here and elsewhere: about the seconds that a test takes. ctest begins with the longest, so that
    # no core waits for one at the end.
    set(cost 10)
    if(MODULE_NAME MATCHES "^(engine|serve)$")
      set(cost 50)
    endif()
    if(SMARTINF_SANITIZE)
      math(EXPR cost "5 * ${cost}")
    endif()
    set(elsewhere "")
    foreach(capability IN LISTS MODULE_CAPABILITIES)
      string(REGEX MATCH "^([a-z0-9_]+)=(.+)$" _ ${capability})
      set(entry ${test_name}.${CMAKE_MATCH_1})
      string(APPEND elsewhere "${CMAKE_MATCH_2}:")
      add_test(NAME ${entry} COMMAND ${MODULE_NAME}_tests --gtest_filter=${CMAKE_MATCH_2})
      # A match outranks the exit status, so only a summary that ends with what was skipped is one:
      # failures would be listed after it. No cases at all: what they need was not built.
      set_tests_properties(${entry} PROPERTIES TIMEOUT 900 COST ${cost}
        SKIP_REGULAR_EXPRESSION "\\[  SKIPPED \\] [^ \n]+\n*$;Running 0 tests")
    endforeach()
    add_test(NAME ${test_name} COMMAND ${MODULE_NAME}_tests --gtest_filter=-${elsewhere})
    set_tests_properties(${test_name} PROPERTIES TIMEOUT 900 COST ${cost})
    if(MODULE_NAME STREQUAL "storage")  # on a drive, wherever the states of other tests are
      set_tests_properties(${test_name} PROPERTIES
        ENVIRONMENT_MODIFICATION SMARTINF_TEST_FOLDER=unset:)
    endif()
  endif()
  if(SMARTINF_TESTS AND SMARTINF_BENCHES)
    foreach(bench IN LISTS MODULE_BENCHES)
      get_filename_component(bench_name ${bench} NAME_WE)
      add_executable(${bench_name} ${bench})
      target_link_libraries(${bench_name} PRIVATE ${library} benchmark::benchmark_main)
    endforeach()
  endif()
endfunction()

# Headers that many sources include are parsed once for all of them. Tried with GCC; not under a compiler
# launcher, whose cache finds more without.
set(SMARTINF_PRECOMPILE OFF)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(SMARTINF_PRECOMPILE ON)
endif()

# Several sources of a target are compiled as one, which parses the headers that they share once. For those
# who build once: with a compiler launcher, or to work on the code (preset dev), each is compiled alone.
set(SMARTINF_UNITY_DEFAULT OFF)
if(CMAKE_BUILD_TYPE STREQUAL "Release" AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(SMARTINF_UNITY_DEFAULT ON)
endif()
option(SMARTINF_UNITY "Compile several sources as one" ${SMARTINF_UNITY_DEFAULT})
function(smartinf_unity target)
  if(NOT SMARTINF_UNITY)
    return()
  endif()
  # What Highway compiles once for each instruction set includes itself, inside of namespaces.
  get_target_property(sources ${target} SOURCES)
  if(NOT sources MATCHES "_simd\\.cc")
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 10)
  endif()
endfunction()

# For all sources of a target.
function(smartinf_precompile_headers target)
  if(SMARTINF_PRECOMPILE)
    target_precompile_headers(${target} PRIVATE ${ARGN})
  endif()
endfunction()

# What most sources of modules include, once for all modules.
function(smartinf_precompile_module_headers target)
  if(NOT SMARTINF_PRECOMPILE)
    return()
  endif()
  if(NOT TARGET smartinf_module_headers)
    file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/module_headers.cc CONTENT "")
    add_library(smartinf_module_headers STATIC EXCLUDE_FROM_ALL ${PROJECT_BINARY_DIR}/module_headers.cc)
    target_link_libraries(smartinf_module_headers PRIVATE smartinf_options fmt::fmt)
    target_precompile_headers(smartinf_module_headers PRIVATE
      <algorithm> <array> <atomic> <chrono> <condition_variable> <deque> <filesystem> <functional> <map> <memory>
      <mutex> <optional> <span> <string> <string_view> <thread> <utility> <variant> <vector> <fmt/format.h>)
  endif()
  target_precompile_headers(${target} REUSE_FROM smartinf_module_headers)
endfunction()

# What every test includes, once for all modules.
function(smartinf_precompile_test_headers target)
  if(NOT SMARTINF_PRECOMPILE)
    return()
  endif()
  if(NOT TARGET smartinf_test_headers)
    # An executable as the tests are: precompiled headers serve only what is compiled like them.
    file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/test_headers.cc CONTENT "int main() {}\n")
    add_executable(smartinf_test_headers EXCLUDE_FROM_ALL ${PROJECT_BINARY_DIR}/test_headers.cc)
    target_link_libraries(smartinf_test_headers PRIVATE smartinf_options GTest::gmock)
    target_compile_options(smartinf_test_headers PRIVATE $<$<CONFIG:Release>:-O1>)
    target_precompile_headers(smartinf_test_headers PRIVATE <gmock/gmock.h> <gtest/gtest.h>)
  endif()
  target_precompile_headers(${target} REUSE_FROM smartinf_test_headers)
endfunction()
