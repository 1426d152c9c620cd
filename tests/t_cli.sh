#!/bin/sh
# The program as a user has it: help, exit codes, one clear line for each mistake, nothing left
# half-written. usage: t_cli.sh SOURCE_DIR BUILD_DIR
set -u
saccade=$2/saccade
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
failed=0

bad() { echo "FAILED: $1"; sed 's/^/    /' out err; failed=1; }

# expect STATUS ARGUMENT...: runs it, leaves its output in out and err
expect() {
    wanted=$1
    shift
    "$saccade" "$@" >out 2>err </dev/null
    status=$?
    [ "$status" = "$wanted" ] || bad "exit status $status, expected $wanted: saccade $*"
}

# refuse WORDS ARGUMENT...: exit 2 and one line "saccade: WHERE: ..." with these words in it
# (texts: two lines more, the excerpt and its caret)
refuse() {
    words=$1
    shift
    expect 2 "$@"
    head -n 1 err | grep -q '^saccade: [^ ].*: .' || bad "no clear first line: saccade $*"
    head -n 1 err | grep -qF -- "$words" || bad "no '$words' in the error of: saccade $*"
    lines=$(wc -l <err)
    [ "$lines" -eq 1 ] || { [ "$lines" -eq 3 ] && tail -n 1 err | grep -q '\^'; } ||
        bad "$lines lines of error: saccade $*"
}

says() { grep -qF -- "$1" out || bad "no '$1' in the output"; }

# npy NAME SHAPE ELEMENTS: an f32 file of zeros
npy() {
    header="{'descr': '<f4', 'fortran_order': False, 'shape': ($2), }"
    printf '\223NUMPY\001\000v\000%-117s\n' "$header" >"$1"
    head -c $((4 * $3)) /dev/zero >>"$1"
}
npy q.npy '1, 2, 8, 4' 64
npy k.npy '1, 1, 8, 4' 32
npy v.npy '1, 1, 8, 4' 32
run="run -q q.npy -k k.npy -v v.npy"

# ---- help ----
expect 0 -h; says "usage: saccade COMMAND"
for command in run mask shard explain check bench demo prelude; do
    expect 0 -h; says "  $command "
    expect 0 $command -h; says "usage: saccade $command"
    expect 0 $command --help; says "usage: saccade $command"
done
expect 0 --version; says "saccade "; says "built with: "; says "CUDA devices: "
expect 0 prelude; says "causal()"
expect 2

# ---- mistyped ----
refuse "did you mean bench" benhc
refuse "saccade -h lists" frobnicate
refuse "did you mean --mask" run --maks 'causal()'
refuse "unknown argument 'x.npy'" run x.npy
refuse "expected O.npy" $run -o
refuse "given twice" $run -o a.npy -o b.npy
refuse "takes no value" check --rmse=1
refuse "whole number from 1" mask --mask 'causal()' --q many
refuse "whole number from 1" mask --mask 'causal()' --q 0
refuse "--q: given twice" mask --mask 'causal()' --q 8 --q 9
refuse "--at-b: got batch 1" mask --mask 'causal()' --q 8 --at-b 1
refuse "each from 1 to 65536" mask --mask 'causal()' --q 8 --block 65537
refuse "finite number" $run -o o.npy --scale inf
refuse "did you mean paper" bench --suite papre
refuse "expected plain" bench --baseline torch
refuse "cannot write" bench --csv no/such/folder.csv
refuse "cannot write" bench --plot no/such/folder.svg
refuse "which --csv writes" bench --csv table --plot ./table
refuse "ending in .svg" bench --plot x.txt
refuse "ending in .svg" ladder -o l.png
[ ! -e l.png ] || bad "a ladder was written to l.png"
refuse "--m: got 4" ladder --m 4
refuse "unknown option '--kv-len'" mask --mask 'causal()' --q 8 --kv-len 4
refuse "unknown option '--kv-len'" shard --mask 'causal()' --q 800 --kv-len 4
refuse "--also: 1:1" shard --mask 'causal()' --q 800 --also '5:'
refuse "--at-h: got head 5" shard --mask 'causal()' --q 800 --at-h 5
refuse "--q-offset: got -2000000000" mask --mask 'causal()' --q 8 --q-offset -2000000000
refuse "--kv-len: got 9" $run -o o.npy --kv-len 9
refuse "--weight: got a rate of 3" explain --problem 'b1 h2 q8 d8 f32' --weight 'dropout(3)'
refuse "--level: got 'x'" explain --problem 'b1 h2 q8 d8 f32' --level x
refuse "--sinks: got i32" $run -o o.npy --sinks 'i32[H]:iota'
refuse "--grad-of: got 'x'" explain --problem 'b1 h2 q8 d8 f32' --grad-of x
refuse "got it with --page-size, expected one" $run -o o.npy --kv-dtype i8 --page-size 4
refuse "got it with --grad, expected one" $run -o o.npy --kv-dtype i8 --grad q.npy
refuse "expected auto, cpu or cuda" check --backend ref --random 1
[ ! -s out ] || bad "check printed a heading without a row"
refuse "expected nothing after it" -V extra
refuse "did you mean run" help rnu
refuse "expected one command" help run mask
expect 0 help run; says "usage: saccade run"
: >x.npy
refuse "x.npy: got an empty file" run -q x.npy -k k.npy -v v.npy -o o.npy
head -c 9 q.npy >x.npy
refuse "x.npy: got a file that ends in its header" run -q x.npy -k k.npy -v v.npy -o o.npy
# a text is read whole or not at all
{ printf 'q >= kv'; head -c 1048560 /dev/zero | tr '\0' ' '; printf '&& q < 5\n'; } >long.txt
sed 's/$/ /' long.txt >longer.txt
expect 0 mask --mask @long.txt --q 9 --block 1; says "full         15 "
refuse "longer.txt: got a text of more than 1048576 bytes" mask --mask @longer.txt --q 9
refuse "cannot read it: got nothing" mask --mask @/dev/null --q 8
refuse "cannot read it: " mask --mask @. --q 8
expect 0 bench --suite compile --csv table.csv --plot table.svg; says "softcap, again"
[ "$(wc -l <table.csv)" -eq 17 ] || bad "table.csv has not 16 rows and a header"
grep -q '</svg>' table.svg || bad "table.svg is no picture"
grep -q "measured on .*, $(date +%Y)-[01][0-9]-[0-3][0-9], [0-9]* threads" table.svg ||
    bad "table.svg does not say where and when"
timeout 0.2 "$saccade" bench --suite dense --csv cut.csv >/dev/null 2>&1
[ -z "$(find . -name 'cut.csv*')" ] || bad "a bench that was ended left a file behind"

# ---- run ----
expect 0 $run -o o.npy --lse l.npy --mask 'causal()'; says "o.npy: [1, 2, 8, 4]"
[ "$(wc -c <o.npy)" -eq 384 ] || bad "o.npy has another size"
[ "$(wc -c <l.npy)" -eq 192 ] || bad "l.npy has another size"
# keys in pages: the same file
expect 0 $run -o o.npy --mask 'causal()'
expect 0 $run -o paged.npy --mask 'causal()' --page-size 3
cmp -s o.npy paged.npy || bad "--page-size 3 changes the output"
expect 0 $run -o paged.npy --mask 'causal()' --page-size 4096
cmp -s o.npy paged.npy || bad "--page-size 4096 changes the output"
refuse "--page-size: got 1073741824, expected at most 4096" $run -o o.npy --page-size 1073741824
# quantised keys: t_cli_numpy has the numbers
refuse "whole number, end or F.npy" $run -o o.npy --q-offset start
refuse "expected e4m3, e5m2, i8 or i4" $run -o o.npy --kv-dtype int3
refuse "expected row, head, channel or tensor" $run -o o.npy --kv-dtype i8 --kv-scale page
refuse "expected --kv-dtype with it" $run -o o.npy --kv-scale row
refuse "expected one of them" $run -o o.npy --kv-dtype i8 --page-size 3
expect 0 $run -o /dev/null
expect 0 run -q q.npy -k k.npy -v v.npy -o bnhd.npy --layout bhnd --mask 'causal()' \
    --block 32x64
says "bnhd.npy: [1, 2, 8, 4], computed in f32"
expect 0 run -q q.npy -k q.npy -v q.npy -o bnhd.npy --layout bnhd
says "bnhd.npy: [1, 2, 8, 4], computed in f32"
refuse "--block: got it without --mask" $run -o o.npy --block 32
refuse "--seed: got it without --weight" $run -o o.npy --seed 0
refuse "expected one" run -q q.npy -k k.npy -v v.npy

# ---- files apart, whatever the paths that lead to them ----
refuse "--lse: got './same.npy' to write, which -o writes" $run -o same.npy --lse ./same.npy
cp k.npy kept.npy
ln -s k.npy link.npy
ln k.npy hard.npy
for name in k.npy ./k.npy "$PWD/k.npy" link.npy hard.npy; do
    refuse "which -k reads, expected another file" $run -o $name
    refuse "--lse: got '$name' to write, which -k reads" $run -o same.npy --lse $name
done
refuse "which --bind reads" run -q q.npy -k q.npy -v q.npy -o k.npy --score 'score + x[kv]' \
    --bind x=k.npy
refuse "which --sinks reads" run -q q.npy -k q.npy -v q.npy -o ./k.npy --sinks k.npy
echo 'causal()' >causal.txt
refuse "which --mask reads" $run -o causal.txt --mask @./causal.txt
cmp -s k.npy kept.npy || bad "k.npy was written over"
rm link.npy hard.npy

# ---- gradients ----
npy do.npy '1, 2, 8, 4' 64
npy bias.npy '2, 8' 16
expect 0 $run -o g.npy --grad do.npy --mask 'causal()' --score 'score + bias[h, kv]' \
    --bind bias=bias.npy --grad-of bias; says "gradients in"
for name in q k v bias; do [ -s g.d$name.npy ] || bad "no g.d$name.npy"; done
grep -qaF "'shape': (2, 8,)" g.dbias.npy || bad "g.dbias.npy has another shape than bias"
grep -qaF "'shape': (1, 1, 8, 4,)" g.dk.npy || bad "g.dk.npy has another shape than K"
expect 0 $run -o p.npy --grad do.npy --mask 'causal()' --score 'score + bias[h, kv]' \
    --bind bias=bias.npy --grad-of bias --page-size 3; says "gradients in"
for name in q k v bias; do
    cmp -s g.d$name.npy p.d$name.npy || bad "--page-size 3 changes d$name"
done
refuse "expected the shape of O" $run -o h.npy --grad k.npy
refuse "to write, which --lse writes" $run -o h.npy --grad do.npy --lse ./h.dq.npy
refuse "which --grad reads" $run -o do.npy --grad do.npy
cp do.npy h.dq.npy
refuse "--grad: got" $run -o h.npy --grad h.dq.npy
cmp -s do.npy h.dq.npy || bad "the gradient that a run reads was written over"
rm h.dq.npy
refuse "empty name, expected one to write" $run -o ''
refuse "empty name, expected one to read" $run -o h.npy --mask @
refuse "without --grad" $run -o h.npy --grad-of bias
for name in ../../evil /evil 3 a/b 'a b' ''; do
    refuse "--grad-of: got '$name', expected a name" $run -o h.npy --grad do.npy \
        --grad-of "$name"
done
refuse "expected a capture of the score" $run -o h.npy --grad do.npy --grad-of bias
expect 0 $run -o plain.npy --grad do.npy --backend plain; says "gradients in"
for name in q k v; do [ -s plain.d$name.npy ] || bad "plain wrote no d$name"; done
[ -z "$(find . -name 'h*.npy*')" ] || bad "left after an error: $(find . -name 'h*.npy*')"
[ ! -e same.npy ] || bad "same.npy was written"
npy q3.npy '2, 8, 4' 64
expect 0 run -q q3.npy -k q3.npy -v q3.npy -o o3.npy; says "o3.npy: [2, 8, 4], computed"
refuse "expected 3 as in q3.npy" run -q q3.npy -k k.npy -v v.npy -o o.npy
refuse "cannot open" run -q none.npy -k k.npy -v v.npy -o o.npy
refuse "bhnd or bnhd" $run -o o.npy --layout dbnh
refuse "f32, f16 or bf16" $run -o o.npy --dtype f8
refuse "like 128 or 128x64" $run -o o.npy --mask 'causal()' --block 0
refuse "expected auto, cpu" $run -o o.npy --backend tpu
refuse "level" $run -o o.npy --level mmx
npy short.npy '1, 1, 7, 4' 28
refuse "expected 8 as in k.npy" run -q q.npy -k k.npy -v short.npy -o o.npy
npy three.npy '1, 3, 8, 4' 96
refuse "expected a multiple" run -q q.npy -k three.npy -v three.npy -o o.npy
npy wide.npy '1, 1, 8, 5' 40
refuse "head dim 5" run -q q.npy -k wide.npy -v v.npy -o o.npy
npy empty.npy '1, 1, 0, 4' 0
refuse "no elements" run -q empty.npy -k k.npy -v v.npy -o o.npy
npy flat.npy '8' 8
refuse "got 1 dimensions" run -q flat.npy -k k.npy -v v.npy -o o.npy

# ---- captures ----
refuse "expected --bind W=NUMBER" $run -o o.npy --mask 'q - kv < W'
refuse "which no text names" $run -o o.npy --bind W=3
expect 0 $run -o o.npy --score 'x = t[q]; score' --bind 't=i32[Q]:iota'
expect 0 $run -o dropped.npy --weight 'dropout(p)' --bind p=0.5 --sinks 'f32[H]:normal' --seed 3
expect 0 $run -o again.npy --weight 'dropout(0.5)' --seed 3 --backend ref
refuse "twice" $run -o o.npy --mask 'q < W' --bind W=3 --bind W=4
refuse "NAME=VALUE" $run -o o.npy --mask 'q < W' --bind W
refuse "a number, F.npy" $run -o o.npy --mask 'q < W' --bind W=three
refuse "32-bit" $run -o o.npy --mask 'q < W' --bind W=3000000000
for c in 1e39 -1e39 3.5e38 1e999; do
    refuse "c: got '$c', expected at most 3.4e38" $run -o o.npy --score 'score + c' --bind c=$c
done
for c in 1e-60 -7e-46 1e-999; do
    refuse "c: got '$c', expected at least 1.4e-45" $run -o o.npy --score 'score + c' \
        --bind c=$c
done
for c in 0.0 1e-40 3.4e38 inf -inf nan 0e999; do
    expect 0 $run -o o.npy --score 'score + 0 * c' --bind c=$c
done
for c in 0x 0x1p3 0x1.8 0x123456789 0xg -0x -x1 00x1; do
    refuse "W: got '$c', expected a number" $run -o o.npy --mask 'q < W' --bind W=$c
done
expect 0 mask --q 9 --mask '(W & 0xf0) == 0x10 && w == -0x12' --bind W=0x1F --bind w=-0x12
says "full         1 (100 %)"
refuse "x: got value 1e+39, expected some of f32" $run -o o.npy --score 'score + x[kv]' \
    --bind 'x=f32[KV]:const(1e39)'
refuse "x: got value 65520, expected some of f16" $run -o o.npy --score 'score + x[0]' \
    --bind 'x=f16[65521]:iota'
expect 0 $run -o o.npy --score 'score + x[0]' --bind 'x=f16[65520]:iota'
refuse "after the ':'" $run -o o.npy --mask 'd[q] == 1' --bind 'd=i32[Q]:sevens'
refuse "expected 1" $run -o o.npy --mask 'd[q] == 1' --bind 'd=i32[Q]:docs'
refuse "cannot open" $run -o o.npy --mask 'd[q] == 1' --bind d=none.npy
expect 0 $run -o o.npy --mask 'd[q] == d[kv] && w' --bind 'd=i32[KV]:docs(3)' --bind w=true

# ---- texts ----
refuse "--mask: 1:" $run -o o.npy --mask 'q >= '
refuse "--mask: 1:" $run -o o.npy --mask 'q + 1'
refuse "--mask: 1:1:" $run -o o.npy --mask 'casual()'
refuse "--score: 1:" $run -o o.npy --score 'score + tanh()'
refuse "--weight: 1:" $run -o o.npy --weight 'dropout(q)'
refuse "weight: got a rate of 2" $run -o o.npy --weight 'dropout(2)'
refuse "sinks: got length" $run -o o.npy --sinks 'f32[3]:normal'
refuse "--mask: 1:" $run -o o.npy --mask ''
refuse "--mask: 1:" mask --q 9 --mask "$(printf 'q \001\033[31m')"
refuse "--mask: 1:" mask --q 9 --mask "$(head -c 3000 /dev/zero | tr '\0' '(')"
printf 'mask far(n) =\n    q - kv > n;\nfar(3) &&\n' >bad.txt
refuse "bad.txt: " mask --q 9 --mask @bad.txt
printf 'mask far(n) =\n    q - kv > n;\nfar(3)\n' >good.txt
expect 0 mask --q 9 --mask @good.txt --block 1; says "sparsity"
refuse "cannot open" mask --q 9 --mask @none.txt
printf 'x = W & 1; x == 0\n' >bits.txt
refuse "bits.txt: 1:7: operand of '&'" mask --q 9 --mask @bits.txt --bind W=0.5
refuse "bits.txt: 1:7: operand of '&'" shard --q 800 --mask 'causal()' --also '2:@bits.txt' \
    --bind W=0.5
printf 'score + t[q]\n' >row.txt
printf 'score + (W & 1)\n' >bit.txt
printf 'score + t\n' >scalar.txt
refuse "bit.txt: 1:12: operand of '&'" $run -o o.npy --score @row.txt --score @bit.txt \
    --bind W=0.5 --bind 't=f32[Q]:iota'
refuse "row.txt: 1:9: got 't' of rank 2" $run -o o.npy --score @bit.txt --score @row.txt \
    --bind W=1 --bind 't=f32[Q,Q]:iota'
refuse "scalar.txt: 1:9: got 't'" $run -o o.npy --score @row.txt --score @scalar.txt
refuse "--score: 1:9: got 't'" $run -o o.npy --score @row.txt --score 'score + t'
expect 1 check --problem 'b1 h2 q20 d8 f32' --score @bit.txt --score @row.txt --bind W=1 \
    --bind 't=f32[4]:iota'
grep -q 'row.txt: 1:9' err || bad "an index outside its tensor is not in its text"
expect 1 check --problem 'b1 h2 q20 d8 f32' --mask 't[q] > 0' --bind 't=f32[4]:iota'
grep -q -e '--mask: 1:1' err || bad "an index outside its tensor is not in its option"
expect 0 $run -o o.npy --score @bit.txt --score @row.txt --bind W=1 --bind 't=f32[Q]:iota'
head -c 200000 /dev/urandom >noise.txt
refuse "noise.txt: " mask --q 9 --mask @noise.txt

# ---- nothing half-written ----
cp o.npy before.npy
refuse "cannot write" $run -o missing/o.npy
refuse "cannot write" $run -o o.npy --lse missing/l.npy
refuse "--mask" $run -o o.npy --mask 'q >'
refuse "cannot write" $run -o /dev/full
npy do.npy '1, 2, 8, 4' 64
rm -f part.npy part.d*.npy
refuse "cannot write" $run -o part.npy --grad do.npy --lse /dev/full
for file in part*; do # all of them or none
    [ ! -e "$file" ] || bad "a failure left $file"
done
"$saccade" $run -o /dev/stdout 2>err | cat >piped.npy # the array alone: words are elsewhere
"$saccade" $run -o piped2.npy >out 2>err || bad "no array beside the piped one"
cmp -s piped.npy piped2.npy || bad "a pipe got other bytes than a file"
"$saccade" $run -o /dev/stdout >redirected.npy 2>err
cmp -s redirected.npy piped2.npy || bad "a redirected output got other bytes than a file"
chmod 600 piped2.npy
expect 0 $run -o piped2.npy
case $(ls -l piped2.npy) in -rw-------*) ;; *) bad "a private file became public" ;; esac
refuse "$(printf '\303\251??2J.npy: cannot open')" run -q "$(printf '\303\251\302\2332J.npy')" \
    -k k.npy -v v.npy -o o.npy
refuse "unknown argument '??2J'" run -q q.npy "$(printf '\302\2332J')"
refuse "_of_all/missing.npy" run -q \
    a_folder_whose_name_is_longer_than_messages_have_room_for_of_all/missing.npy \
    -k k.npy -v v.npy -o o.npy
refuse "a folder" $run -o .
cmp -s o.npy before.npy || bad "a failed run changed o.npy"
[ -z "$(find . -name '*.npy.*')" ] || bad "files left behind: $(find . -name '*.npy.*')"
for words in prelude -h --version 'run -h'; do
    "$saccade" $words >/dev/full 2>err && bad "a full disk went unnoticed by: saccade $words"
    grep -qF 'standard output: cannot write' err || bad "no clear line: saccade $words"
done

# ---- told to stop in the middle ----
npy long.npy '1, 1, 16384, 4' 65536
long="run -q long.npy -k long.npy -v long.npy --backend ref -o stopped.npy --lse lse.npy"
for name in INT TERM HUP; do
    timeout -s $name 1 "$saccade" $long >out 2>err
    [ -z "$(find . -name 'stopped.npy*' -o -name 'lse.npy*')" ] ||
        bad "left by SIG$name: $(find . -name 'stopped.npy*' -o -name 'lse.npy*')"
done
npy big.npy '1, 1, 16384, 8' 131072
npy k1.npy '1, 1, 1, 8' 8
npy v1.npy '1, 1, 1, 8' 8
(ulimit -f 64; "$saccade" run -q big.npy -k k1.npy -v v1.npy -o cut.npy) >out 2>err
[ $? = 2 ] || bad "a file that grew too large is no plain error"
grep -q 'cut.npy: cannot write' err || bad "no clear line for a file that grew too large"
[ -z "$(find . -name 'cut.npy*')" ] || bad "a file that grew too large was left behind"
rm -f long.npy big.npy
# timeout(1) sends its signal twice at once, which is one request to stop
for turn in 1 2 3; do
    timeout -s INT 1 "$saccade" mask --q 1048576 --mask '(q*2654435 + kv*40503) % 7 < 3' \
        >out 2>err
    grep -q 'stopped' err || bad "a block mask that was told to stop says nothing, turn $turn"
done

# ---- pipes ----
mkfifo pipe.npy
refuse "no regular file" run -q pipe.npy -k k.npy -v v.npy -o o.npy
refuse "cannot read" mask --q 9 --mask @pipe.npy
printf 'causal()' | "$saccade" mask --q 9 --mask @/dev/stdin >out 2>err ||
    bad "a text from a pipe is not read"

# ---- mask ----
expect 0 mask --mask 'causal()' --q 1048576 --kv 1048576; says "sparsity     0.4999"
says "evaluated    0"
expect 0 mask --mask 'causal()' --q 512 -o m.svg; says "m.svg"
grep -q '</svg>' m.svg || bad "m.svg is no picture"
refuse ".svg or .png" mask --mask 'causal()' --q 512 -o m.gif
refuse "less than" mask --mask 'causal()' --q 512 --at-h 1
refuse "expected a text" mask --q 512
refuse "number of queries" mask --mask 'causal()'

# ---- shard ----
expect 0 shard --mask 'causal()' --q 4096 --ranks 4; says "imbalance    1.0"
says "0-511 3584-4095"
expect 0 shard --mask 'sliding_window(W)' --problem 'b1 h4/2 q8192 d64 bf16' --ranks 2 \
    --also '2:doc[q] == doc[kv]' --bind W=128 --bind 'doc=i32[KV]:docs(9)' -o s.svg
says "s.svg"; head -c 4 s.svg | grep -q '<svg' || bad "no SVG"
expect 0 shard --q 1000 --ranks 3; says "capital full"
refuse "number of rows" shard --mask 'causal()'
refuse "from 1 to 1024" shard --q 9 --ranks 0
refuse "multiple of the tile" shard --q 999 --chunk 100
refuse "LAYERS:MASK" shard --q 99 --mask 'causal()' --also 'causal()'
refuse "--block: got it without --mask" shard --q 99 --block 32
refuse "before other masks" shard --q 99 --also '2:causal()'
refuse "of a name in a mask" shard --q 99 --mask 'causal()' --bind W=3
refuse "expected --bind W=NUMBER" shard --q 99 --mask 'sliding_window(W)'
refuse "one or the other" shard --q 99 --problem 'b1 h1 q9 d8 f32'
refuse ".svg or .png" shard --q 99 -o s.gif
refuse "did you mean --ranks" shard --rank 3

refuse "a count from 1" mask --mask 'd[kv] == 0' --q 9 --bind 'd=i32[KV]:docs(0)'
refuse "a count from 1" mask --mask 'd[kv] == 0' --q 9 --bind 'd=i32[KV]:randint(nan)'
refuse "a count from 1" mask --mask 'd[kv] == 0' --q 9 --bind 'd=i32[KV]:docs(2.5)'
for made in 'docs(3x)' 'docs(3)(4)' 'docs(3' 'docs()' 'uniform(0, 1, 2)' 'uniform(0,)'; do
    refuse "like i32[KV]:docs(12)" mask --mask 'd[kv] == 0' --q 9 --bind "d=i32[KV]:$made"
done
expect 0 mask --mask 'd[kv] == 0' --q 9 --bind 'd=i32[KV]:uniform( 0 , 3 )'
refuse "some of i8" mask --mask 'd[kv] == 0' --q 300 --bind 'd=i8[KV]:iota'
refuse "some of u8" mask --mask 'd[kv] == 0' --q 9 --bind 'd=u8[KV]:const(-1)'

# ---- explain, check ----
expect 0 explain --problem 'b1 h4/2 q100 d16 bf16' --mask 'causal()' --score 'softcap(5.0)'
says "problem: b1 h4/2 q100 kv100 d16 bf16"
expect 0 explain --problem 'b1073741824 h65536 q1073741824 d64'
says "no run can have these sizes"
expect 0 explain --problem 'b1 h2 q100 kv50 d16 f32' --mask 'kv < 60 && q % 4 * 8 == kv'
says "library: "; says "ranges of mask"; says "n5 0..3"; says "n2 always"
refuse "either --problem or -q" explain
refuse "without files" explain --problem 'b1 h2 q100 d16 f32' --layout bnhd
refuse "expected no mask" check --rmse --dtype bf16
refuse "expected no mask" check --rmse --random 3
refuse "expected words like" explain --problem 'b1 h2 q100 d16 f12'
refuse "at least q and d" explain --problem 'b1'
refuse "each once" explain --problem 'q8 d8 d9'
refuse "each once" explain --problem 'q8 kv0 d8'
refuse "each once" explain --problem 'h8/0 q8 d8'
refuse "each once" explain --problem 'q8 d8 f16 bf16'
refuse "multiple of key heads" explain --problem 'h3/2 q8 d8'
refuse "expected cuda" explain --problem 'b1 h2 q100 d64 bf16' --arch sm_90a --backend cpu
refuse "expected sm_80 or later" explain --problem 'b1 h2 q100 d64 bf16' --arch sm_35
expect 0 check --problem 'b1 h2 q20 d8 f32' --mask 'causal()'; says " ok"
expect 0 check --random 4; says "seed 1"
expect 0 check --backward --random 12; says "of bound"; says "table"
expect 0 check --backward --problem 'b1 h3 q3 kv1 d51 bf16' # one live key: dq and dk are 0
expect 0 check --backward --problem 'b1 h2 q5 d16 f32' --mask 'q == kv'
if ! grep -qw amx_tile /proc/cpuinfo 2>/dev/null; then # nothing checked is nothing proven
    refuse "got amx, expected at most" check --random 1 --level amx
fi
expect 1 check --problem 'b1 h2 q20 d8 f32' --mask 't[q + 1] > 0' --bind 't=i32[Q]:iota'
grep -q 'index' err || bad "an index outside its tensor went unreported"

# ---- demo: seconds, but under sanitizers ----
if [ -z "${SACCADE_TEST_SHORT:-}" ]; then
    expect 0 demo -o demo
    says "document         GQA 8/2"
    [ -s demo/index.html ] || bad "demo wrote no page"
fi

# ---- a lower level by the environment: last, for it stays ----
if grep -qw avx2 /proc/cpuinfo 2>/dev/null; then
    SACCADE_LEVEL=portable
    export SACCADE_LEVEL
    refuse "at most portable, the environment's SACCADE_LEVEL" check --random 1 --level avx2
fi

[ "$failed" = 0 ] && echo "all as expected"
exit $failed
