#!/bin/sh
# Installs into a fresh folder, moves it, and builds an outside project against it: by CMake
# (shared and static) and by pkg-config (shared, static, all of it static).
# usage: t_install.sh SOURCE BUILD
set -eu
build=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if grep -q '^SACCADE_SANITIZE:STRING=.' "$build/CMakeCache.txt"; then
    echo "skipped: a sanitizer build is not for installing"
    exit 77
fi
CC=$(sed -n 's/^CMAKE_C_COMPILER:[A-Z]*=//p' "$build/CMakeCache.txt")

cmake --install "$build" --prefix "$work/first" >"$work/log"
mv "$work/first" "$work/moved"
mkdir "$work/user"
cat >"$work/user/main.c" <<'EOF'
#include <saccade.h>
#include <string.h>
int main(void)
{
    saccade_error err;
    saccade_mod *mod = NULL;
    const char *text = "q >= kv";
    if (saccade_mod_parse(SACCADE_MASK, text, strlen(text), &mod, &err) != SACCADE_OK)
        return 1;
    saccade_mod_destroy(mod);
    /* a score that would be compiled, as a plan */
    saccade_problem problem;
    saccade_plan *plan = NULL;
    saccade_mod *bound = NULL;
    text = "score + 0.5 * q";
    saccade_problem_init(&problem);
    if (saccade_mod_parse(SACCADE_SCORE, text, strlen(text), &mod, &err) != SACCADE_OK
        || saccade_mod_bind(mod, NULL, 0, &bound, &err) != SACCADE_OK)
        return 2;
    problem.score = bound;
    if (saccade_plan_create(NULL, &problem, &plan, &err) != SACCADE_OK)
        return 3;
    saccade_plan_destroy(plan);
    saccade_mod_destroy(bound);
    saccade_mod_destroy(mod);
    return strcmp(saccade_version(), SACCADE_VERSION) != 0;
}
EOF
cat >"$work/user/CMakeLists.txt" <<'EOF'
cmake_minimum_required(VERSION 3.20)
project(user C)
find_package(saccade 0.2 REQUIRED)
add_executable(with_shared main.c)
target_link_libraries(with_shared saccade::saccade)
add_executable(with_static main.c)
target_link_libraries(with_static saccade::static)
EOF
echo "CMake package"
cmake -S "$work/user" -B "$work/user/build" -DCMAKE_PREFIX_PATH="$work/moved" \
    -DCMAKE_C_COMPILER="$CC" >>"$work/log"
cmake --build "$work/user/build" >>"$work/log"
"$work/user/build/with_shared"
"$work/user/build/with_static"

if command -v pkg-config >/dev/null; then
    echo "pkg-config"
    lib=$(dirname "$(find "$work/moved" -name libsaccade.so)")
    export PKG_CONFIG_PATH="$lib/pkgconfig"
    "$CC" "$work/user/main.c" -o "$work/a" $(pkg-config --cflags --libs saccade)
    LD_LIBRARY_PATH=$lib "$work/a"
    "$CC" "$work/user/main.c" -o "$work/b" $(pkg-config --cflags --libs-only-L saccade) \
        "$lib/libsaccade.a" $(pkg-config --static --libs-only-other saccade) \
        $(pkg-config --static --libs-only-l saccade | sed 's/-lsaccade //')
    "$work/b"
    "$CC" -static "$work/user/main.c" -o "$work/c" \
        $(pkg-config --static --cflags --libs saccade) 2>>"$work/log" ||
        { cat "$work/log"; exit 1; }
    "$work/c"
    ! ldd "$work/c" >/dev/null 2>&1 || { echo "-static made a dynamic program"; exit 1; }
else
    echo "pkg-config not found: not tried"
fi
if [ -x "$build/saccade" ]; then
    "$work/moved/bin/saccade" -h >"$work/help"
    for file in man/man1/saccade.1 bash-completion/completions/saccade \
        zsh/site-functions/_saccade fish/vendor_completions.d/saccade.fish; do
        [ -s "$work/moved/share/$file" ] || { echo "no share/$file"; exit 1; }
    done
fi
echo "installed tree works"
