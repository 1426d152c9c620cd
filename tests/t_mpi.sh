#!/bin/sh
# Processes of MPI, more than there are cores: the example's result is one process's, bit for
# bit, on 1 to 4 of them and for uneven lengths; a failing one is an error on others in time.
# Skipped without MPI, and under sanitizers, which MPI's own code does not pass.
# usage: t_mpi.sh SOURCE_DIR BUILD_DIR
set -u
example=$2/examples/context_parallel
command -v mpirun >/dev/null && [ -x "$example" ] || { echo "no MPI here"; exit 77; }
if grep -q '^SACCADE_SANITIZE:[A-Z]*=.' "$2/CMakeCache.txt"; then
    echo "sanitizers"
    exit 77
fi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
export OMPI_MCA_btl_vader_single_copy_mechanism=none
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
failed=0
run() { # PROCESSES PROGRAM ARGUMENT...
    processes=$1
    shift
    timeout 120 mpirun -n "$processes" "$@" >"$work/out" 2>&1 && return
    echo "FAILED on $processes processes: $*"
    sed 's/^/    /' "$work/out"
    failed=1
}
for case in 1:500 2:3000 3:1001 4:97; do
    run "${case%:*}" "$example" "${case#*:}"
    grep -q "bit for bit" "$work/out" || failed=1
done
run 2 "$2/tests/mpi_failures"
[ $failed = 0 ] && echo "all as expected"
exit $failed
