#!/bin/sh
# `saccade run` on NumPy's files against NumPy. usage: t_cli_numpy.sh SOURCE_DIR BUILD_DIR
python=${PYTHON:-python3}
"$python" -c 'import numpy' 2>/dev/null || { echo "skipped: $python has no numpy"; exit 77; }
exec "$python" "$1/tests/numpy/against_numpy.py" "$2/saccade"
