# Flags of every target, as the interface library saccade_flags.
#   SACCADE_WERROR    warnings are errors; CI turns it on
#   SACCADE_ASSERT    keep assert() in Release builds
#   SACCADE_SANITIZE  "", "address,undefined" or "thread"
include(CheckCCompilerFlag)

if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Release or Debug" FORCE)
endif()
# CMake's own -O3 makes all but the loops larger for nothing (library.cmake names the loops);
# flags that a user set count. Sanitized code takes long to compile, and less long by -O1.
if(CMAKE_C_FLAGS_RELEASE STREQUAL "-O3 -DNDEBUG")
  if(SACCADE_SANITIZE)
    add_compile_options($<$<CONFIG:Release>:-O1>)
  else()
    add_compile_options($<$<CONFIG:Release>:-O2>)
  endif()
endif()
option(SACCADE_ASSERT "keep assertions in release builds" OFF)
if(SACCADE_ASSERT)
  add_compile_options(-UNDEBUG)
endif()
set(CMAKE_C_STANDARD 17)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

option(SACCADE_WERROR "treat warnings as errors" OFF)
set(SACCADE_SANITIZE "" CACHE STRING "address,undefined or thread")

add_library(saccade_flags INTERFACE)
# Contraction would make a mask's arithmetic differ between engines (docs/design.md, rule 3);
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
