"""CUDA C++ sources and the loader that compiles them at run time."""
