"""Many folders through one vLLM process: importing vLLM takes longer than loading a tiny model.

Runs in vLLM's environment: stdin holds a JSON list of keyword arguments of `probe` (see vllm_probe.py), stdout gets one
JSON line per folder, as soon as it is known. argv[1] is the path of vllm_probe.py, the script under test.
"""

import gc
import importlib.util
import json
import os
import sys
import time

spec = importlib.util.spec_from_file_location("vllm_probe", sys.argv[1])
vllm_probe = importlib.util.module_from_spec(spec)
spec.loader.exec_module(vllm_probe)

# Between two models vLLM walks everything that it ever imported nine times, which is most of the time here.
gc.collect = lambda generation=2: 0

requests = json.load(sys.stdin)
vllm_probe.configure()
with vllm_probe.answers() as stream:
    for request in requests:
        start = time.monotonic()
        answer = vllm_probe.probe(**request)
        answer["seconds"] = round(time.monotonic() - start, 1)
        print(json.dumps(answer, allow_nan=False), file=stream, flush=True)
sys.stderr.flush()
os._exit(0)
