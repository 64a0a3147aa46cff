"""Out of memory, in all the words that libraries have for it."""

from __future__ import annotations

import re

# torch's allocators, the CUDA runtime under it, libraries that allocate by themselves, NCCL around them, the host.
_FORMS = re.compile(
    r"(CUDA|HIP|XPU)\w*\]?( (driver |runtime )?(error|failure|failed))?( \d+)?:? '?out of memory"
    r"|(cuda|hip)ErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"
    r"|OutOfMemoryError"
    r"|CU(BLAS|DNN|SOLVER|SPARSE)\w*_STATUS_\w*ALLOC(ATION)?_FAILED|CUFFT_ALLOC_FAILED"
    r"|nccl\w*Error[\s\S]{0,400}(out of memory|Failed to CUDA [cm]alloc)"
    r"|DefaultCPUAllocator: (can't|not enough)"
    r"|\bMemoryError\b|std::bad_alloc|Cannot allocate memory|unable to allocate"
    r"|memory allocation of \d+ bytes failed"
    r"|\[enforce fail at alloc_cpu"
    r"|Thread creation failed: Resource temporarily unavailable|can't start new thread",
    re.IGNORECASE,
)


def out_of_memory(text: str) -> bool:
    """Whether an error's text, or the end of a log, says that memory ran out."""
    return _FORMS.search(text) is not None
