#!/bin/sh
# The manual page is well formed and has every command and option, each with its value as the
# help shows it; bash, zsh and fish complete what the help lists. usage: SOURCE_DIR BUILD_DIR
set -eu
saccade=$2/saccade
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
fail() { echo "FAILED: $1"; exit 1; }

# "COMMAND OPTION" for every option that the help of every command shows
"$saccade" -h | sed -n '/^usage/,/^exit/s/^  \([a-z]*\)  *[a-z].*/\1/p' >commands
[ "$(wc -l <commands)" -ge 10 ] || fail "no commands in the help"
while read -r command; do
    "$saccade" "$command" -h | sed -n "s/^  \(-[a-z-]*\)\( .*\)*\$/$command \1/p"
done <commands | sort -u >options

"$saccade" man >saccade.1
while read -r command option; do
    dashed=$(printf '%s\n' "$option" | sed 's/-/\\-/g')
    awk -v wanted="$command" '/^\.SS / { on = $3 == wanted } on' saccade.1 |
        grep -qF ".B $dashed" || fail "no $command $option in the manual page"
done <options
# "COMMAND OPTION VALUE" of the manual page: the help shows each value whole
awk '{ gsub(/\\-/, "-") }
    /^\.SS saccade / { command = $3 }
    /^\.B .* \\fI/ { gsub(/\\f[IR]/, ""); print command, $2, $3 }' saccade.1 >values
[ "$(wc -l <values)" -ge 50 ] || fail "no values in the manual page"
while read -r command option value; do
    "$saccade" "$command" -h | awk -v left="  $option $value" '
        index($0 " ", left " ") == 1 { found = 1 } END { exit !found }' ||
        fail "the help of $command does not show $option $value whole"
done <values
if command -v mandoc >/dev/null; then
    mandoc -T lint -W warning saccade.1 | grep -v 'missing date' >said || true
    [ ! -s said ] || { cat said; fail "mandoc warns"; }
elif command -v man >/dev/null && man -w man >/dev/null 2>&1; then
    man --warnings -l saccade.1 >/dev/null 2>said
    [ ! -s said ] || { cat said; fail "man warns"; }
else
    echo "skipped: the form of the manual page (no mandoc, no man)"
fi

for shell in bash zsh fish; do
    "$saccade" completions $shell >words.$shell
    if ! command -v $shell >/dev/null; then
        echo "skipped: completions of $shell, which is not there"
        continue
    fi
    $shell -n words.$shell || fail "$shell does not read its completions"
done

if command -v bash >/dev/null; then
    cat >ask.bash <<'END'
. ./words.bash
candidates() { # WORD...: what bash would offer for the last one
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
    _saccade
    printf '%s\n' "${COMPREPLY[@]}"
}
candidates saccade '' | grep -v '^--' | sort >offered
sort commands | cmp - offered || { echo "commands"; exit 1; }
while read -r command; do
    candidates saccade "$command" '-' | sort -u | sed "s/^/$command /"
done <commands | LC_ALL=C sort -u >offered
LC_ALL=C sort -u options | cmp - offered || { echo "options"; exit 1; }
[ "$(candidates saccade run --dtype '' | tr '\n' ' ')" = 'f32 f16 bf16 ' ] || exit 1
[ "$(candidates saccade bench --level avx | tr '\n' ' ')" = 'avx2 avx512 ' ] || exit 1
[ "$(candidates saccade run --back)" = --backend ] || exit 1
[ "$(candidates saccade completions f)" = fish ] || exit 1
[ -z "$(candidates saccade run -q '')" ] || exit 1 # files, which bash completes by itself
END
    bash ask.bash || fail "bash offers something else than the help"
fi
if command -v fish >/dev/null; then
    export HOME="$work" XDG_CONFIG_HOME="$work" XDG_DATA_HOME="$work"
    fish --no-config -c 'source words.fish; complete -C "saccade "' >offered
    while read -r command; do
        grep -qw "^$command" offered || fail "fish does not offer $command"
    done <commands
    fish --no-config -c 'source words.fish; complete -C "saccade run --dtype "' >offered
    grep -q '^bf16' offered || fail "fish does not offer bf16"
fi
