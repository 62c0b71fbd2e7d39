# An environment of its own for another engine, in the user's cache. The scripts beside this file set PEER, the
# package's name, and VERSION, and then source it.

readonly DOWNLOAD_TIMEOUT_S=1800
readonly ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
readonly CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/fastserve/peers
readonly ENVIRONMENT=$CACHE/$PEER-$VERSION
readonly PIP=("$ENVIRONMENT/bin/python" -m pip install --quiet --disable-pip-version-check --retries 1)

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

pip_install() {
    timeout "$DOWNLOAD_TIMEOUT_S" "${PIP[@]}" "$@" || fail "pip could not install: $*"
}

# Runs a function while no other setup runs. Two at once would install into the same place.
alone() {
    mkdir -p "$CACHE"
    exec 9>"$CACHE/.lock"
    flock --wait "$DOWNLOAD_TIMEOUT_S" 9 || fail "another setup holds $CACHE/.lock"
    "$@"
    exec 9>&-
}

# Makes the environment and calls the function that fills it, unless that was done before.
install_once() {
    if [[ ! -e $ENVIRONMENT/.installed ]]; then
        echo "installing $PEER $VERSION into $ENVIRONMENT (minutes)" >&2
        rm -rf "$ENVIRONMENT"
        "${PYTHON:-python3}" -m venv "$ENVIRONMENT"
        "$1"
        touch "$ENVIRONMENT/.installed"
    fi
}

# What a script does that only sets up: `setup` with the function that fills the environment, or `python`, which
# prints the path of the environment's interpreter.
only_set_up() {
    case ${2:-} in
    setup)
        alone install_once "$1"
        ;;
    python)
        [[ -e $ENVIRONMENT/.installed ]] || fail "not set up; run: benchmarks/peers/$(basename "$0") setup"
        echo "$ENVIRONMENT/bin/python"
        ;;
    *)
        fail "got '${2:-}'; must be setup or python"
        ;;
    esac
}
