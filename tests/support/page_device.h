/* A problem of page_case.h on a CUDA device, over keys in one piece or in pages. */
#ifndef SACCADE_TESTS_PAGE_DEVICE_H
#define SACCADE_TESTS_PAGE_DEVICE_H

#include "support/page_case.h"

#include <stddef.h>

/* What a run wrote, on the host. Gradients, of Q, K and V: none, or in f32 or the problem's
 * dtype. */
enum { OF_Q, OF_K, OF_V, GRADIENTS };
typedef struct page_results {
    unsigned char *out, *lse;
    size_t out_bytes, lse_bytes;
    saccade_tensor gradient[GRADIENTS];
} page_results;

/* How dK and dV are asked for: their dtype, whether ones lie there that they add to, whether
 * heads share a place. */
typedef struct page_wanted {
    saccade_dtype dtype;
    int is_added, is_of_heads;
} page_wanted;

/* Bytes of all that lies between the first element and the last. */
size_t page_extent(const saccade_tensor *t);
/* A gradient of the shape of `like`, filled with NaN, or with ones where it is added to. */
saccade_tensor page_gradient(const saccade_tensor *like, const page_wanted *wanted);
/* Zeros where K or V in one piece have NaN, past lengths: that makes the forward kernels do
 * rows again with other bits. In pools they do not. */
void page_clear_ends(const page_run *r);
/* wanted: NULL: forward alone. Fails the test where a call does. */
page_results page_run_once(const page_run *r, int is_paged, const page_wanted *wanted);
void page_drop(page_results *x);

/* Page sizes that whole tiles and single rows are copied for. */
enum { PAGE_SIZES = 8 };
extern const int32_t page_sizes[PAGE_SIZES];
/* Case n of some, with pages of so many keys: each form of table, both layouts in turns. */
typedef struct page_problem {
    const char *problem, *mask, *score;
} page_problem;
page_case page_case_of(const page_problem *of, int32_t page, int n);
/* A run of the case with entries that lead out of the pool, n of PAGE_LEAD_OUT: each form, each
 * bad number. What comes out may be anything; nothing outside of the pool is read. */
enum { PAGE_LEAD_OUT = 20 };
void page_lead_out(page_case c, int n, const page_wanted *w);

#endif
