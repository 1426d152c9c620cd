/* Problems whose keys lie in pages, and the same keys in one piece: tables of every form, pools
 * of every layout that end where nothing can be read, garbage behind lengths, NaN wherever no
 * key lies. */
#ifndef SACCADE_TESTS_PAGE_CASE_H
#define SACCADE_TESTS_PAGE_CASE_H

#include "saccade.h"

typedef enum page_form { TABLE, LAST_PAGES, LISTED, CHUNKS, FORMS } page_form;
typedef enum page_layout { NHD, HND, BOTH, VIEW, LAYOUTS } page_layout;

typedef struct page_case {
    const char *problem, *mask, *score, *backend, *level;
    int32_t page;
    page_form form;
    page_layout layout;
    int is_shared;   /* entries name any page; else each page once */
    int is_known;    /* the problem names the page size */
    int32_t dead;    /* keys before this one are live in no row: their pages are absent */
    uint32_t gradients;
} page_case;

enum { PAGE_MOST_B = 4, PAGE_MOST_ENTRIES = 8192 };

/* A problem twice: keys in one piece, and in a pool. */
typedef struct page_run {
    const page_case *c;
    saccade_sizes sizes;
    saccade_dtype dtype;
    int32_t len[PAGE_MOST_B], indptr[PAGE_MOST_B + 1], last[PAGE_MOST_B];
    int32_t table[PAGE_MOST_ENTRIES];
    int32_t most, pages, n_entries;
    saccade_tensor q, k, v, d_out;         /* k, v: in one piece */
    saccade_tensor pool_k, pool_v, lens, tables, starts, lasts;
    void *mapped;
    size_t mapped_bytes;
    saccade_pages at;
    saccade_positions whole_at, pool_at;
} page_run;

/* NaN, or random values. */
void page_fill(const saccade_tensor *t, int64_t n, int is_nan);
saccade_tensor page_tensor(saccade_dtype dtype, int64_t a, int64_t b, int64_t c, int64_t d,
                           int is_nan);
/* A row's address: of batch or page a. */
char *page_row(const saccade_tensor *t, int64_t a, int64_t h, int64_t n);
int page_is_list(const page_run *r);
void page_make(page_run *r, const page_case *c);
void page_free(page_run *r);
/* The case's plan, for keys in one piece or in pages. */
saccade_plan *page_plan(const page_run *r, int is_paged);

#endif
