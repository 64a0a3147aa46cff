// FP8 codes [N, K], rows `pitch` apart -> code * scale in float32, rounded once to 16 bit [N, K]: what torch.matmul then
// reads.
//
// A thread takes 16 codes of a row: one 16-byte load, two 16-byte stores. Compiled per variant with: NAME, OUT_BF16,
// SCALES (0 tensor, 1 row, 2 block 128 x 128, rows of blocks scale_pitch apart), ALIGNED (K and pitch % 16 == 0, codes on
// 16 bytes). NaN codes decode to NaN.
#include "device.cuh"

DEVICE u32 rounded(float low, float high) { return OUT_BF16 ? bf16x2_of_floats(low, high) : fp16x2_of_floats(low, high); }

DEVICE float times_scale(float value, u32 code, float scale) {
    return (code & 0x7Fu) == 0x7Fu ? float_of_bits(0x7FC00000u | (code & 0x80u) << 24) : value * scale;
}

KERNEL(256, 1)
NAME(const u8* codes, const float* scale, u16* out, int N, int K, int row_segments, i64 pitch, int scale_pitch) {
    const u32 segment = blockIdx.x * 256u + threadIdx.x;
    const int row = int(segment / u32(row_segments)), k = int(segment % u32(row_segments)) * 16;
    if (row >= N) return;
    const u8* from = codes + row * pitch + k;
    u16* to = out + i64(row) * K + k;
    const int count = K - k < 16 ? K - k : 16;
    const float s = scale[SCALES == 0 ? 0 : SCALES == 1 ? row : row / 128 * scale_pitch + k / 128];
    u32 word[4] = {0, 0, 0, 0};
#if ALIGNED
    const uint4 loaded = load_once(from);
    word[0] = loaded.x, word[1] = loaded.y, word[2] = loaded.z, word[3] = loaded.w;
#else
#pragma unroll
    for (int i = 0; i < 16; ++i)
        if (i < count) word[i / 4] |= u32(from[i]) << (i % 4 * 8);
#endif
    u32 result[8];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const Pairs pairs = e4m3_to_fp16_units(word[w]);
        const bool nan = (((word[w] & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u) != 0;
#pragma unroll
        for (int p = 0; p < 2; ++p) {
            const u32 pair = p ? pairs.high : pairs.low, two = word[w] >> (16 * p);
            const float low = float_of_fp16(u16(pair)) * E4M3_FP16_UNIT, high = float_of_fp16(u16(pair >> 16)) * E4M3_FP16_UNIT;
            result[2 * w + p] = nan ? rounded(times_scale(low, two & 0xFFu, s), times_scale(high, two >> 8 & 0xFFu, s))
                                    : rounded(low * s, high * s);
        }
    }
#if ALIGNED
    reinterpret_cast<uint4*>(to)[0] = uint4{result[0], result[1], result[2], result[3]};
    reinterpret_cast<uint4*>(to)[1] = uint4{result[4], result[5], result[6], result[7]};
#else
#pragma unroll
    for (int i = 0; i < 16; ++i)
        if (i < count) to[i] = u16(result[i / 2] >> (i % 2 * 16));
#endif
}
