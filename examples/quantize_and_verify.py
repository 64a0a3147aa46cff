"""A checkpoint to FP8, verified and compared with the original: what the commands do, from Python.

python examples/quantize_and_verify.py MODEL      a folder, a hub id, or demo
"""

import sys

from octavo.workflows.evaluate import EvaluateConfig, evaluate
from octavo.workflows.quantize import QuantizeConfig, quantize_checkpoint
from octavo.workflows.verify import VerifyConfig, verify

model = sys.argv[1] if len(sys.argv) > 1 else "demo"
done = quantize_checkpoint(QuantizeConfig(model=model, out="example-fp8", scheme="channel"))
print(f"{done.quantized} modules in FP8, {done.bytes_in / done.bytes_out:.2f}x smaller")

checked = verify(VerifyConfig(folder="example-fp8", engine="vllm", gpu="h100"))
print(checked.verdict, checked.engines["vllm"].kernel)

result = evaluate(EvaluateConfig(model="example-fp8", against=model, tokens=512, context=128))
print(f"KL {result.kl:.4f}, {result.verdict}")
