"""One tensor to FP8 and back: what each scheme costs in dB, and which kernel would multiply it on which GPU."""

import torch

import octavo
from octavo.formats.measure import sqnr_db

torch.manual_seed(0)
weight = torch.randn(256, 512)
weight[7] *= 20_000  # one loud row spoils a scale that all rows share

for granularity in (octavo.PerTensor(), octavo.PerBlock(128, 128), octavo.PerRow()):
    q = octavo.quantize(weight, octavo.Rule(granularity=granularity))
    quiet = sqnr_db(octavo.dequantize(q)[8:], weight[8:])
    print(f"{granularity!s:>12}: {q.nbytes} bytes, quiet rows {quiet:.1f} dB")

for gpu in ("rtx3090", "h100"):
    print(octavo.why("linear", m=16, n=4096, k=4096, gpu=gpu))
