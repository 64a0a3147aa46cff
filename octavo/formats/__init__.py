"""F1: number formats, scales, the only carrier of quantized values, and the oracle that all kernels answer to."""
