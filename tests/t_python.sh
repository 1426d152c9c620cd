#!/bin/sh
# The Python package over the library just built, by pytest. usage: t_python.sh SOURCE BUILD
set -eu
source=$1 build=$2
if grep -q '^SACCADE_SANITIZE:STRING=.' "$build/CMakeCache.txt"; then
    echo "skipped: Python would have to be started inside the sanitizer"
    exit 77
fi
if [ ! -d "$source/tests/python" ]; then
    echo "skipped: no tests/python"
    exit 77
fi
for python in ${PYTHON:-} /usr/bin/python3 python3; do
    if "$python" -c 'import numpy, pytest' 2>/dev/null; then
        export PYTHONPATH="$source/python" PYTHONDONTWRITEBYTECODE=1
        export SACCADE_LIBRARY="$build/libsaccade.so"
        exec "$python" -m pytest -q -rs -p no:cacheprovider "$source/tests/python"
    fi
done
echo "skipped: no Python with numpy and pytest"
exit 77
