#!/bin/sh
# The pages are true: command lines of all of them are run, and the tutorial's C and Python
# programs. Blocks of one kind are one program; "sh fails" must be refused with the text of the
# block after it.
# usage: SOURCE_DIR BUILD_DIR
set -eu
source=$1 build=$2
grep -q '^SACCADE_SANITIZE:[A-Z]*=..*' "$build/CMakeCache.txt" &&
    { echo "skipped: a sanitized library wants sanitized programs"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "$page: $1"; exit 1; }
# blocks FENCE FILE: the lines of all blocks that open with it
blocks() {
    sed -n "/^\`\`\`$1\$/,/^\`\`\`\$/{/^\`\`\`/d;p}" "$page" >"$2"
    [ -s "$2" ] || fail "no block '$1'"
}

mkdir "$work/bin" "$work/out"
ln -s "$build/saccade" "$work/bin/saccade"
PATH=$work/bin:$PATH
cd "$work"
# files like those of `make run`, smaller
npy() { # NAME HEADS
    header="{'descr': '<f4', 'fortran_order': False, 'shape': (1, $2, 64, 16), }"
    printf '\223NUMPY\001\000v\000%-117s\n' "$header" >"out/$1.npy"
    head -c $((4 * $2 * 64 * 16)) /dev/zero >>"out/$1.npy"
}
npy q_gqa 8
npy k_gqa 2
npy v_gqa 2

for page in "$source"/docs/*.md; do
    grep -q '^```sh$' "$page" || continue
    blocks sh shown.sh
    sh -eu shown.sh >printed || fail "a command line of the above failed"
done
page=$source/docs/tutorial.md
for file in sinks.svg out/o.npy out/own.npy out/own.dq.npy out/own.dbias.npy; do
    [ -s "$file" ] || fail "the command lines left no $file"
done
for picture in sinks.svg; do # what the page shows is what its command draws
    grep '<rect class' "$source/docs/pictures/$picture" >shown.blocks
    grep '<rect class' "$picture" | cmp -s - shown.blocks || fail "another picture: $picture"
done
blocks 'sh fails' refused.sh
sh refused.sh >/dev/null 2>said && fail "a command line that should be refused was not"
awk '/^```sh fails$/ { armed = 1 } /^```$/ { on = 0 } on
     /^```text$/ && armed { on = 1; armed = 0 }' "$page" >promised
head -n 1 said | cmp -s - promised || { cat said; fail "another message than it promises"; }

blocks c step.c
"${CC:-cc}" -std=c17 -Wall -Wextra -Werror -I"$source/include" step.c -L"$build" -lsaccade \
    -Wl,-rpath,"$build" -lm -o step
./step >losses || fail "the C program failed"

export PYTHONPATH="$source/python" PYTHONDONTWRITEBYTECODE=1
export SACCADE_LIBRARY="$build/libsaccade.so"
with() { # MODULE FENCE: runs these blocks by the first Python that has the module
    blocks "$2" shown.py
    for python in ${PYTHON:-} /usr/bin/python3 python3; do
        if "$python" -c "import $1" 2>/dev/null; then
            "$python" -W ignore shown.py >printed || fail "the $1 program failed"
            return
        fi
    done
    echo "skipped: the Python program (no Python with $1)"
}
with numpy 'python numpy'
with torch python
