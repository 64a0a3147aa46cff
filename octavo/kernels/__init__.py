"""F2: kernels in CUDA C++, compiled on first use; buffers in, nothing out; seen only by ops."""
