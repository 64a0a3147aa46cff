#!/usr/bin/env bash
# scripts/pinned_env.sh DIR LIST FINISH: make a virtual environment from a complete list of pins, once per change of them.
#   PYTHON       interpreter to build with (default: python3.11, else python3)
#   TORCH_INDEX  extra package index for torch's CPU wheels (default: PyTorch's, where it answers)
# LIST names every package with its version: pip resolves nothing (--no-deps) and installs nothing that LIST leaves out.
# FINISH is Python code run in the new environment, so that a list which lacks a package fails here and not in a test.
set -euo pipefail

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() { say "error: $*"; exit 3; }

[ $# -eq 3 ] || die "usage: pinned_env.sh DIR LIST FINISH"
dir=${1%/} list=$2 finish=$3
[ -f "$list" ] || die "there is no list of pins at $list"
python=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2]); sys.exit(sys.version_info < (3, 11))') \
    || die "Python 3.11 or later is needed; set PYTHON=/path/to/python3.11"

mkdir -p "$(dirname "$dir")"
exec 9<"$list"  # of two callers the second waits, then finds the stamp
flock 9 || die "cannot lock $list"
stamp=$(printf '%s\n%s\n' "$finish" "$version" | cat "$list" - | sha256sum | cut -c1-32)
[ "$(cat "$dir/.pins" 2>/dev/null || true)" != "$stamp" ] || exit 0
if [ -e "$dir" ]; then
    [ -f "$dir/pyvenv.cfg" ] || die "$dir exists and is no virtual environment: choose another folder"
    say "$dir is unfinished or has other pins: making it again"
    rm -rf -- "$dir"
fi

start=$SECONDS
"$python" -m venv "$dir" || die "cannot make a virtual environment; on Debian: apt-get install python3-venv"
if [ -z "${TORCH_INDEX:-}" ]; then
    cpu=https://download.pytorch.org/whl/cpu
    if "$dir/bin/python" -c "import urllib.request as u; u.urlopen('$cpu/torch/', timeout=5)" 2>/dev/null; then TORCH_INDEX=$cpu; fi
fi
# --no-compile: importing compiles the modules that are used; compiling all of them takes longer than that saves.
"$dir/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --no-compile \
    ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r "$list" \
    || die "pip could not install $list. If it was torch's '+cpu' build: set TORCH_INDEX to an index of PyTorch's CPU wheels"
"$dir/bin/python" -c "$finish" || die "$dir is installed but does not work (see above): a package is missing in $list"
printf '%s\n' "$stamp" >"$dir/.pins"
say "$dir is ready after $((SECONDS - start)) s"
