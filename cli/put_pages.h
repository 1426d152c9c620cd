/* Keys of a run put into pages, as --page-size asks. */
#ifndef SACCADE_CLI_PUT_PAGES_H
#define SACCADE_CLI_PUT_PAGES_H

#include "cli.h"

typedef struct paged {
    saccade_tensor k, v, table; /* pools on the host, and [B, pages of a batch] */
} paged;

/* k and v: [B, Hkv, KV, dim] on the host. */
saccade_status paged_make(const saccade_tensor *k, const saccade_tensor *v, int64_t page,
                          paged *out, saccade_error *err);
void paged_free(paged *p);
/* Room for a gradient of a pool, full of zeros and laid out as it is; owned. */
saccade_status paged_room(const saccade_tensor *pool, saccade_tensor *out, saccade_error *err);
/* The keys that lie in `pool`, one of p's or like it, to where they were taken from. */
void paged_take_out(const paged *p, const saccade_tensor *pool, const saccade_tensor *to);

#endif
