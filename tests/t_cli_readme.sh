#!/bin/sh
# The README's C example compiles and holds, its command lines run. usage: SOURCE_DIR BUILD_DIR
set -eu
source=$1 build=$2
grep -q '^SACCADE_SANITIZE:[A-Z]*=..*' "$build/CMakeCache.txt" &&
    { echo "skipped: a sanitized library wants sanitized programs"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# block LANGUAGE: the README's blocks of that kind
block() { sed -n "/^\`\`\`$1\$/,/^\`\`\`\$/{/^\`\`\`/d;p}" "$source/README.md"; }

block c >"$work/readme.c"
[ -s "$work/readme.c" ] || { echo "no C example in the README"; exit 1; }
"${CC:-cc}" -std=c17 -Wall -Wextra -Werror -I"$source/include" "$work/readme.c" \
    -L"$build" -lsaccade -Wl,-rpath,"$build" -lm -o "$work/readme"
"$work/readme"

block sh >"$work/readme.sh"
[ -s "$work/readme.sh" ] || { echo "no command lines in the README"; exit 1; }
mkdir "$work/bin"
ln -s "$build/saccade" "$work/bin/saccade"
cd "$work"
mkdir out
# files like those of `make run`, smaller
npy() { # NAME HEADS
    header="{'descr': '<f4', 'fortran_order': False, 'shape': (1, $2, 64, 16), }"
    printf '\223NUMPY\001\000v\000%-117s\n' "$header" >"out/$1.npy"
    head -c $((4 * $2 * 64 * 16)) /dev/zero >>"out/$1.npy"
}
npy q_gqa 8
npy k_gqa 2
npy v_gqa 2
PATH=$work/bin:$PATH sh -eu readme.sh >/dev/null
[ -s out/o.npy ]
