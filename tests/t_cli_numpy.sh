#!/bin/sh
# `saccade run` on NumPy's files against NumPy. usage: t_cli_numpy.sh SOURCE_DIR BUILD_DIR
for python in ${PYTHON:-} python3 /usr/bin/python3 /usr/local/bin/python3; do
    if "$python" -c 'import numpy' 2>/dev/null; then
        exec "$python" "$1/tests/numpy/against_numpy.py" "$2/saccade"
    fi
done
echo "skipped: no python3 with NumPy"
exit 77
