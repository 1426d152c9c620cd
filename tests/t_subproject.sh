#!/bin/sh
# The library inside another project: by FetchContent, built and run, and by add_subdirectory,
# which must leave the outer project's settings alone. usage: t_subproject.sh SOURCE BUILD
set -eu
source=$1 build=$2
if grep -q '^SACCADE_SANITIZE:STRING=.' "$build/CMakeCache.txt"; then
    echo "skipped: a sanitizer build has nothing of its own here"
    exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
CC=$(sed -n 's/^CMAKE_C_COMPILER:[A-Z]*=//p' "$build/CMakeCache.txt")
cat >"$work/main.c" <<'EOF'
#include <saccade.h>
#include <string.h>
int main(void)
{
    return strcmp(saccade_version(), SACCADE_VERSION) != 0;
}
EOF
cat >"$work/CMakeLists.txt" <<EOF
cmake_minimum_required(VERSION 3.21)
project(outer C)
set(before "\${CMAKE_C_FLAGS_RELEASE}|\${CMAKE_MODULE_PATH}|\${BUILD_TESTING}")
if(FETCHED)
  include(FetchContent)
  FetchContent_Declare(saccade SOURCE_DIR $source)
  FetchContent_MakeAvailable(saccade)
else()
  add_subdirectory($source saccade)
endif()
if(NOT before STREQUAL "\${CMAKE_C_FLAGS_RELEASE}|\${CMAKE_MODULE_PATH}|\${BUILD_TESTING}")
  message(FATAL_ERROR "settings of the outer project changed")
endif()
foreach(kind saccade static)
  add_executable(with_\${kind} main.c)
  target_link_libraries(with_\${kind} saccade::\${kind})
endforeach()
EOF
# unoptimised and of one level: it is the project that is tried here
cd "$work"
for fetched in OFF ON; do
    cmake -S . -B "$fetched" -DFETCHED=$fetched -DCMAKE_C_COMPILER="$CC" \
        -DCMAKE_BUILD_TYPE=Debug -DSACCADE_LEVELS=none >log 2>&1 || { cat log; exit 1; }
done
cmake --build ON -j 2 >log 2>&1 || { tail -n 40 log; exit 1; }
ON/with_saccade
ON/with_static
[ ! -e ON/_deps/saccade-build/saccade ] || { echo "the program was built too"; exit 1; }
echo "saccade::saccade and saccade::static work inside another project"
