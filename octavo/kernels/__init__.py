"""F2: kernels. Buffers in, nothing out; seen only by ops."""
