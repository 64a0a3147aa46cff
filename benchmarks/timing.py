"""Times on a GPU, shared by the benchmarks of kernels."""

from octavo.workflows.measures.timing import graph_milliseconds

__all__ = ["graph_milliseconds"]
