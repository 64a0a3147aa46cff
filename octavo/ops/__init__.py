"""F3: the operations on quantized tensors, as PyTorch custom ops, and the choice of the kernel behind each."""
