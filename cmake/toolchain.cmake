# Warnings, arithmetic and sanitizers: one interface target that every module links.
add_library(smartinf_options INTERFACE)
target_include_directories(smartinf_options INTERFACE ${PROJECT_SOURCE_DIR})
target_compile_options(smartinf_options INTERFACE
  -Wall -Wextra -Wconversion -Wshadow -Wnon-virtual-dtor
  # The update is bit-exact on every instruction set: a*b+c is never contracted (docs/numerics.md).
  -ffp-contract=off)
if(SMARTINF_WERROR)
  target_compile_options(smartinf_options INTERFACE -Werror)
endif()
if(SMARTINF_SANITIZE)
  target_compile_options(smartinf_options INTERFACE
    -fsanitize=${SMARTINF_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(smartinf_options INTERFACE -fsanitize=${SMARTINF_SANITIZE})
endif()
if(SMARTINF_FUZZ)
  # Modules report their branches to the fuzzer; only its targets link its main().
  target_compile_options(smartinf_options INTERFACE
    -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all)
  target_link_options(smartinf_options INTERFACE -fsanitize=address,undefined)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # g++ 12 reports false positives from inlined standard containers.
  target_compile_options(smartinf_options INTERFACE -Wno-restrict -Wno-maybe-uninitialized)
endif()
