# Flags of every target, as the interface library saccade_flags.
#   SACCADE_WERROR    warnings are errors; on for the compilers that CI uses
#   SACCADE_ASSERT    keep assert() in Release builds
#   SACCADE_SANITIZE  "", "address,undefined" or "thread"
include(CheckCCompilerFlag)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Release or Debug" FORCE)
endif()
option(SACCADE_ASSERT "keep assertions in release builds" OFF)
set(CMAKE_C_FLAGS_RELEASE "-O2")
if(NOT SACCADE_ASSERT)
  string(APPEND CMAKE_C_FLAGS_RELEASE " -DNDEBUG")
endif()
set(CMAKE_C_STANDARD 17)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

set(KNOWN_COMPILER OFF)
if((CMAKE_C_COMPILER_ID STREQUAL "GNU" AND CMAKE_C_COMPILER_VERSION VERSION_LESS 13)
   OR (CMAKE_C_COMPILER_ID STREQUAL "Clang" AND CMAKE_C_COMPILER_VERSION VERSION_LESS 15))
  set(KNOWN_COMPILER ON)
endif()
option(SACCADE_WERROR "treat warnings as errors" ${KNOWN_COMPILER})
set(SACCADE_SANITIZE "" CACHE STRING "address,undefined or thread")

add_library(saccade_flags INTERFACE)
# Contraction would make a mask's arithmetic differ between engines (docs/design.md, rule 2);
# kernels turn it on per file where the result is downstream of the score.
target_compile_options(saccade_flags INTERFACE -Wall -Wextra -ffp-contract=off -fno-math-errno)
target_compile_definitions(saccade_flags INTERFACE _GNU_SOURCE)
if(SACCADE_WERROR)
  target_compile_options(saccade_flags INTERFACE -Werror)
endif()
if(SACCADE_SANITIZE)
  set(SANITIZE_FLAGS -fsanitize=${SACCADE_SANITIZE} -fno-omit-frame-pointer -g1)
  if(SACCADE_SANITIZE MATCHES "undefined")
    list(APPEND SANITIZE_FLAGS -fno-sanitize-recover=undefined)
  endif()
  target_compile_options(saccade_flags INTERFACE ${SANITIZE_FLAGS})
  target_link_options(saccade_flags INTERFACE ${SANITIZE_FLAGS})
endif()
