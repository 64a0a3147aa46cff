"""All that the tests ask of vLLM, through one process: importing vLLM takes longer than loading twenty tiny models.

Runs in vLLM's environment. One JSON line on stdin is a question, one on stdout its answer: `[name, arguments]` with a
name of `ANSWERS`. argv[1] is the path of vllm_probe.py, the script under test.
"""

import gc
import importlib.util
import json
import os
import sys

import groups_oracle
import matching_oracle

spec = importlib.util.spec_from_file_location("vllm_probe", sys.argv[1])
vllm_probe = importlib.util.module_from_spec(spec)
spec.loader.exec_module(vllm_probe)

ANSWERS = {
    "probe": vllm_probe.probe,
    "strategies": groups_oracle.strategies,
    "quantized": matching_oracle.quantized,
}

# Between two models vLLM walks everything that it ever imported nine times, which is most of the time here.
gc.collect = lambda generation=2: 0

vllm_probe.configure()
with vllm_probe.answers() as stream:
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(ANSWERS[name](**arguments), allow_nan=False), file=stream, flush=True)
sys.stderr.flush()
os._exit(0)
