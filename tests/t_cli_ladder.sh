#!/bin/sh
# saccade ladder on a small problem: every count is its formula, the picture is whole, and what
# cannot be is refused. usage: t_cli_ladder.sh SOURCE BUILD
set -eu
saccade=$2/saccade
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

fail()
{
    echo "t_cli_ladder: $*" >&2
    exit 1
}

"$saccade" ladder --n 48 --d 8 --m 96 -o "$dir/ladder.svg" > "$dir/table" || fail "exit $?"
grep -q '!=' "$dir/table" && fail "a count is not its formula"
rungs=$(grep -c '^ *[0-9].* = .* = ' "$dir/table")
[ "$rungs" -eq 14 ] || fail "got $rungs lines of counts, expected 14"
grep -q '6N^2 - 2N' "$dir/table" || fail "no formula of safe softmax"
[ "$(head -c 4 "$dir/ladder.svg")" = "<svg" ] || fail "the picture does not begin"
[ "$(tail -n 1 "$dir/ladder.svg")" = "</svg>" ] || fail "the picture does not end"
grep -q 'FlashAttention backward' "$dir/ladder.svg" || fail "a name is not in the picture"
if grep -E -q 'nan|inf' "$dir/ladder.svg"; then fail "not a number in the picture"; fi

expect_2()
{
    code=0
    "$saccade" ladder "$@" > "$dir/out" 2> "$dir/error" || code=$?
    [ "$code" -eq 2 ] || fail "ladder $*: got exit $code, expected 2"
    [ "$(wc -l < "$dir/error")" -eq 1 ] || fail "ladder $*: got no single line of error"
}
expect_2 --n 48 --d 8 --m 7 -o "$dir/none.svg"
expect_2 --n 0
expect_2 --n 5000
expect_2 --threads 2
expect_2 --n 16 --d 4 -o "$dir/no/such/folder.svg"
[ ! -e "$dir/none.svg" ] || fail "a failed run left a picture"
