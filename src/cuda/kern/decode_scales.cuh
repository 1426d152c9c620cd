/* Scales of quantised K and V, as the warps that load find them key by key. */
#pragma once

#include "decode_ahead.cuh"

/* What is kept of a key's scale: the scale, or with channels where it has its first. */
#if CFG_K_CHANNELS
typedef long long k_scale_word;
#else
typedef float k_scale_word;
#endif
#if CFG_V_CHANNELS
typedef long long v_scale_word;
#else
typedef float v_scale_word;
#endif

DEVICE float load_scale(const cu_scale &s, long long at)
{
    return s.is_f16 ? half_to_float(__ldg((const u16 *)s.data + at))
                    : __ldg((const float *)s.data + at);
}

/* The scale of a key, or where its channels' begin. */
template <int TOKENS> DEVICE void find_scale(float &x, const cu_scale &s, int g, lane_key at)
{
    x = at.row < 0 ? 0.f : 1.f;
    if (s.data && at.row >= 0)
        x = load_scale(s,
                       at.b * s.b + g * s.h + (TOKENS ? at.row / (TOKENS | !TOKENS) : 0) * s.n);
}

template <int TOKENS>
DEVICE void find_scale(long long &x, const cu_scale &s, int g, lane_key at)
{
    x = at.b * s.b + g * s.h;
    if (TOKENS)
        x += max(0, at.row) / (TOKENS | !TOKENS) * s.n;
}
