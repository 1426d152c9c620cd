/* Elements of a tensor of any rank, counted row by row. */
#pragma once

/* Where number `at` of them lies, in elements from the first. */
DEVICE long long place_in(const cu_shape &s, long long at)
{
    long long place = 0;
    for (int d = s.rank - 1; d > 0; d--) {
        place += at % s.size[d] * s.stride[d];
        at /= s.size[d];
    }
    return s.rank > 0 ? place + at * s.stride[0] : 0;
}
