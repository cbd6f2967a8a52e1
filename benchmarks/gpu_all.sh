#!/usr/bin/env bash
# Check and measure scalelatent on a machine with a GPU, within a fixed time. Run it from any folder:
#   benchmarks/gpu_all.sh wheels             download to .whl/ the Python packages that such a machine lacks
#   benchmarks/gpu_all.sh check [options]    compare results with those of a processor; at most 7 minutes
#   benchmarks/gpu_all.sh measure [options]  measure speed; at most 5 minutes
#
# The machine needs Linux, Python 3.12, a CuPy that fits its CUDA version, numpy, scipy, numba and pytest, but no
# network. Install the wheels there, then run this script with their folder on PYTHONPATH:
#   python3 -m pip install --no-index --no-deps --target site .whl/*.whl
#   PYTHONPATH=$PWD/site benchmarks/gpu_all.sh check
#
# Options of check and measure:
#   --out FOLDER   folder of the results; $OUT by default, otherwise benchmarks/results/gpu
#   --seconds N    end after N seconds: kill the running program, and skip the others
#   --emulate      rehearse without a GPU: use tiny sizes, and run the CUDA text on the processor
#
# Results are JSON lines (check.jsonl, measure.jsonl). Each line is written when its part ends, so that an interrupted
# run keeps its results. Exit code: 0 if everything passed, 1 if something failed, 3 without a GPU.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
python=${PYTHON:-python3}

# Packages that the tests and benchmarks import and that such a machine lacks. pydantic-core comes later, in the
# version that the metadata of pydantic requires.
names=(annotated-types attrs click cloudpickle crc32c dask distributed donfig execnet fsspec google-crc32c hypothesis
    jinja2 joblib locket markupsafe msgpack msgspec narwhals numcodecs partd psutil pydantic pytest-timeout
    pytest-xdist pyyaml scikit-learn sortedcontainers tblib threadpoolctl toolz tornado typing-extensions
    typing-inspection urllib3 zarr zict)

download() {
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
        --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --dest "$wheels" "$@"
}

command=${1:-}
[[ $# -eq 0 ]] || shift
case $command in
    wheels)
        wheels=${1:-$root/.whl}
        mkdir -p "$wheels"
        rm -f "$wheels"/*.whl
        download "${names[@]}"
        core=$("$python" - "$wheels" <<'EOF'
import sys, zipfile
from pathlib import Path
(wheel,) = Path(sys.argv[1]).glob("pydantic-*.whl")
with zipfile.ZipFile(wheel) as archive:
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    lines = archive.read(name).decode().splitlines()
print(next(line.split(": ")[1].replace(" ", "") for line in lines if line.startswith("Requires-Dist: pydantic-core")))
EOF
        )
        download "$core"
        echo "$(find "$wheels" -name '*.whl' | wc -l) wheels in $wheels, $(du -sh "$wheels" | cut -f 1)"
        ;;
    check | measure)
        export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
        exec "$python" "$here/gpu_$command.py" "$@"
        ;;
    *)
        sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" >&2
        exit 2
        ;;
esac
