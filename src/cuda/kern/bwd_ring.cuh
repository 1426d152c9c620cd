/* Places of what passes by in shared memory, and what its steps say. */
#pragma once

enum { STEP_MASKED = 1, STEP_END = 2 };

/* A place in a ring of SLOTS, and the parity of its round. */
template <int SLOTS> struct ring {
    u32 slot, parity;
};

template <int SLOTS> DEVICE void ring_next(ring<SLOTS> &r)
{
    r.slot++;
    if (r.slot == SLOTS) {
        r.slot = 0;
        r.parity ^= 1;
    }
}
