#!/bin/sh
# What the README shows is true: its C and Python examples hold, its command lines run, the
# texts of its table are in the language, its picture is what the program draws.
# usage: SOURCE_DIR BUILD_DIR
set -eu
source=$1 build=$2
grep -q '^SACCADE_SANITIZE:[A-Z]*=..*' "$build/CMakeCache.txt" &&
    { echo "skipped: a sanitized library wants sanitized programs"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "README: $1"; exit 1; }
# block LANGUAGE: the README's blocks of that kind
block() { sed -n "/^\`\`\`$1\$/,/^\`\`\`\$/{/^\`\`\`/d;p}" "$source/README.md"; }

block c >"$work/readme.c"
[ -s "$work/readme.c" ] || fail "no C example"
# every value is 1 there and weights add up to 1, so that every output has to be 1
sed 's/^int main(void)$/int example(void);\nint example(void)/' "$work/readme.c" \
    >"$work/tried.c"
cat >>"$work/tried.c" <<'END'
int main(void)
{
    for (int i = 0; i < HKV * N * D; i++)
        v[i] = 1;
    if (example())
        return 1;
    for (int i = 0; i < H * N * D; i++)
        if (!(o[i] > 0.999f && o[i] < 1.001f))
            return 2;
    return 0;
}
END
for program in readme tried; do
    "${CC:-cc}" -std=c17 -Wall -Wextra -Werror -I"$source/include" "$work/$program.c" \
        -L"$build" -lsaccade -Wl,-rpath,"$build" -lm -o "$work/$program"
    "$work/$program" || fail "the C example gives something else"
done

# the texts of the table "| text | what it does |"
awk '/^\| text \|/ { on = 1; getline; next } !/^\|/ { on = 0 } on' "$source/README.md" |
    sed 's/^| `\([^`]*\)` | a \([a-z]*\):.*/\2 \1/; s/\\|/|/g' >"$work/texts"
[ "$(wc -l <"$work/texts")" -ge 3 ] || fail "no table of texts"
while read -r kind text; do
    case $text in *slope*) set -- --bind 'slope=f32[H]:normal' ;; *) set -- ;; esac
    "$build/saccade" explain --problem 'b1 h4 q1024 d64 f32' "--$kind" "$text" "$@" \
        >/dev/null </dev/null || fail "'$text' is no $kind"
done <"$work/texts"

# the picture: its blocks are those of the text beside it
text=$(tr '\n' ' ' <"$source/README.md" | sed 's/.*The picture is `\([^`]*\)`.*/\1/')
"$build/saccade" mask --mask "$text" --q 2048 --bind 'doc=i32[KV]:docs(5)' --block 32 \
    -o "$work/packed.svg" >/dev/null
grep -o '<rect class=.*' "$work/packed.svg" >"$work/blocks"
grep -o '<rect class=.*' "$source/docs/pictures/packed.svg" | cmp -s - "$work/blocks" ||
    fail "docs/pictures/packed.svg is not the mask '$text'"

block sh >"$work/readme.sh"
[ -s "$work/readme.sh" ] || fail "no command lines"
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

block python >"$work/readme.py"
[ -s "$work/readme.py" ] || fail "no Python example"
cat >>"$work/readme.py" <<'END'

from torch.nn.attention import flex_attention as theirs
want = theirs.flex_attention(
    q, k, v, lambda score, b, h, q, kv: torch.where(q >= kv, score + (kv - q) / 64, -torch.inf))
assert (out - want).abs().max() < 1e-5, "not what FlexAttention gives"
END
for python in ${PYTHON:-} /usr/bin/python3 python3; do
    if "$python" -c 'import torch' 2>/dev/null; then
        export PYTHONPATH="$source/python" PYTHONDONTWRITEBYTECODE=1
        export SACCADE_LIBRARY="$build/libsaccade.so"
        "$python" -W ignore "$work/readme.py"
        exit 0
    fi
done
echo "skipped: the Python example (no Python with PyTorch)"
