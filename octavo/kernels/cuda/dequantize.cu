// FP8 codes [N, K] -> code * scale in float32, rounded once to 16 bit: what torch.matmul then reads.
//
// A thread takes 16 codes of a row: one 16-byte load, two 16-byte stores. Compiled per variant with: NAME, OUT_BF16,
// SCALES (0 tensor, 1 row, 2 block 128 x 128), ALIGNED (K % 16 == 0). NaN codes decode to NaN.
#include "device.cuh"

DEVICE u16 rounded(float value) { return OUT_BF16 ? bf16_of_float(value) : fp16_of_float(value); }

DEVICE float e4m3_value(u32 pair, int upper, u32 code) {
    const float value = float_of_fp16(u16(upper ? pair >> 16 : pair)) * 256.0f;
    return (code & 0x7Fu) == 0x7Fu ? float_of_bits(0x7FC00000u | (code & 0x80u) << 24) : value;
}

KERNEL(256, 1) NAME(const u8* codes, const float* scale, u16* out, i64 N, int K, int row_segments) {
    const i64 segment = i64(blockIdx.x) * 256 + threadIdx.x;
    const i64 row = segment / row_segments;
    const int k = int(segment % row_segments) * 16;
    if (row >= N) return;
    const i64 at = row * K + k;
    const int count = K - k < 16 ? K - k : 16;
    const float s = scale[SCALES == 0 ? 0 : SCALES == 1 ? row : row / 128 * ((K + 127) / 128) + k / 128];
    u32 word[4] = {0, 0, 0, 0};
#if ALIGNED
    const uint4 loaded = load_once(codes + at);
    word[0] = loaded.x, word[1] = loaded.y, word[2] = loaded.z, word[3] = loaded.w;
#else
#pragma unroll
    for (int i = 0; i < 16; ++i)
        if (i < count) word[i / 4] |= u32(codes[at + i]) << (i % 4 * 8);
#endif
    u32 result[8];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const Pairs pairs = e4m3_to_fp16(word[w]);
#pragma unroll
        for (int p = 0; p < 2; ++p) {
            const u32 pair = p ? pairs.high : pairs.low, two = word[w] >> (16 * p);
            const u32 first = rounded(e4m3_value(pair, 0, two & 0xFFu) * s);
            result[2 * w + p] = first | u32(rounded(e4m3_value(pair, 1, two >> 8 & 0xFFu) * s)) << 16;
        }
    }
#if ALIGNED
    uint4* to = reinterpret_cast<uint4*>(out + at);
    to[0] = uint4{result[0], result[1], result[2], result[3]};
    to[1] = uint4{result[4], result[5], result[6], result[7]};
#else
#pragma unroll
    for (int i = 0; i < 16; ++i)
        if (i < count) out[at + i] = u16(result[i / 2] >> (i % 2 * 16));
#endif
}
