# Every third-party package, found once. What is optional says what is lost without it.
find_package(PkgConfig QUIET)
find_package(Threads REQUIRED)
# All that is missing is named at once, by Debian's names, rather than one after another.
set(_missing "")
if(PKG_CONFIG_FOUND)
  pkg_check_modules(XXHASH QUIET IMPORTED_TARGET libxxhash)
  pkg_check_modules(HWY QUIET IMPORTED_TARGET libhwy)
else()
  list(APPEND _missing pkg-config)
endif()
foreach(pair IN ITEMS
    "fmt libfmt-dev" "nlohmann_json nlohmann-json3-dev" "spdlog libspdlog-dev" "CLI11 libcli11-dev"
    "tomlplusplus libtomlplusplus-dev")
  separate_arguments(pair)
  list(GET pair 0 _package)
  list(GET pair 1 _debian)
  find_package(${_package} QUIET)
  if(NOT ${_package}_FOUND)
    list(APPEND _missing ${_debian})
  endif()
endforeach()
if(NOT XXHASH_FOUND)
  list(APPEND _missing libxxhash-dev)
endif()
if(NOT HWY_FOUND)
  list(APPEND _missing libhwy-dev)
endif()
if(_missing)
  list(JOIN _missing " " _missing)
  message(FATAL_ERROR
    "smartinf needs libraries that are not installed here. On Debian 12 or Ubuntu 24.04:\n"
    "    sudo apt-get install ${_missing} liburing-dev libhwloc-dev\n"
    "(the last two are optional). From a checkout scripts/setup.sh does that and more. Elsewhere "
    "install the packages of the same names, then run this again.")
endif()
pkg_check_modules(URING IMPORTED_TARGET liburing)
pkg_check_modules(HWLOC IMPORTED_TARGET hwloc)
if(NOT URING_FOUND)
  message(STATUS "liburing not found: the thread ring serves all I/O")
endif()
if(NOT HWLOC_FOUND)
  message(STATUS "hwloc not found: device threads are not pinned near their drive")
endif()
if(SMARTINF_TESTS)
  find_package(GTest REQUIRED)
  find_package(benchmark REQUIRED)
  find_package(rapidcheck REQUIRED)
endif()

# libtorch comes from the installed PyTorch wheel as plain shared libraries. find_package(Torch) is
# not used: it demands a CUDA toolkit even where the GPU is not wanted.
set(SMARTINF_TORCH_FOUND OFF)
if(NOT SMARTINF_TORCH STREQUAL "OFF")
  include(cmake/torch.cmake)
endif()
