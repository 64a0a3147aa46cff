// The tokens of a decoding step's attention and how the splits share them: what both of its kernels compute alike.
#pragma once
#include "device.cuh"

// Tokens [first, last) of the cache take part; a split has `size` of them in a row, the last one fewer.
struct Splits {
    int first, last, size, count;
};

// length: tokens in the cache, on the device, where a captured graph finds it; null where `added` says it all.
// window: only so many last ones, 0 for all. block: what a block takes at once.
DEVICE Splits splits_of(const int* length, int added, int window, int most, int block) {
    Splits s;
    s.last = (length != nullptr ? *length : 0) + added;
    s.first = window > 0 && s.last > window ? s.last - window : 0;
    const int tokens = s.last - s.first;
    s.size = ((tokens + most - 1) / most + block - 1) / block * block;
    s.count = tokens > 0 ? (tokens + s.size - 1) / s.size : 0;
    return s;
}
