#!/usr/bin/env bash
# scripts/rival_env.sh DIR: llm-compressor, the converter that the benchmarks compare with, in an environment of its own,
# because it pins its own transformers. Environment variables: see pinned_env.sh.
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: scripts/rival_env.sh DIR" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec bash "$here/pinned_env.sh" "$1" "$here/rival-requirements.txt" '
from llmcompressor import model_free_ptq
'
