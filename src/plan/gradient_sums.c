/* Sums of gradients over all places of an element: see gradient_sums.h. */
#include "plan/gradient_sums.h"

#include "base/convert.h"
#include "base/integers.h"
#include "base/parallel.h"
#include "base/status.h"

#include <string.h>

enum { WIDTH = 64, ROWS = 64 }; /* elements summed side by side; rows of an item of work */

/* ---- elements ---- */

/* n elements that follow each other, from element `at` on. */
static void add_each(const saccade_tensor *each, int64_t at, int64_t n, double *sums)
{
    const double *wide = (const double *)each->data + at;
    const float *narrow = (const float *)each->data + at;
    for (int64_t i = 0; i < n; i++)
        sums[i] += each->dtype == SACCADE_F64 ? wide[i] : (double)narrow[i];
}

static void store(const saccade_tensor *to, int64_t at, int64_t step, const double *sums,
                  int64_t n, int is_added)
{
    const int64_t bytes = (int64_t)saccade_dtype_bytes(to->dtype);
    for (int64_t i = 0; i < n; i++) {
        char *place = (char *)to->data + (at + i * step) * bytes;
        convert_to_element(to->dtype,
                           sums[i] + (is_added ? convert_element(to->dtype, place) : 0), place);
    }
}

/* ---- dimensions of stride 0 ---- */

typedef struct repeated_job {
    const saccade_tensor *each, *to;
    int is_added;
    int32_t outer;  /* dimensions in front of those that segments cut */
    int64_t length; /* elements of the last dimension, 1 where it is summed over */
    int64_t segments;
} repeated_job;

static int is_kept(const saccade_tensor *to, int32_t d)
{
    return to->stride[d] != 0;
}

/* Sums over what is repeated, of the segment whose first place is `at`. */
static void add_repeats(const repeated_job *job, int64_t at, int64_t n, double *sums)
{
    const saccade_tensor *to = job->to, *each = job->each;
    int64_t index[SACCADE_MAX_RANK] = {0};
    int32_t d = 0;
    memset(sums, 0, (size_t)n * sizeof *sums);
    while (d >= 0) {
        add_each(each, at, n, sums);
        for (d = to->rank - 1; d >= 0; d--) {
            if (is_kept(to, d))
                continue;
            at += each->stride[d];
            if (++index[d] < to->shape[d])
                break;
            at -= index[d] * each->stride[d];
            index[d] = 0;
        }
    }
}

static void sum_segment(void *arg, int64_t item, int thread)
{
    const repeated_job *job = arg;
    const saccade_tensor *to = job->to, *each = job->each;
    const int64_t first = item % job->segments * WIDTH;
    const int64_t n = smaller(job->length - first, WIDTH);
    const int64_t step = job->outer < to->rank ? to->stride[job->outer] : 1;
    double sums[WIDTH];
    int64_t left = item / job->segments, from = first, place = first * step;
    (void)thread;
    for (int32_t d = job->outer - 1; d >= 0; d--)
        if (is_kept(to, d)) {
            from += left % to->shape[d] * each->stride[d];
            place += left % to->shape[d] * to->stride[d];
            left /= to->shape[d];
        }
    add_repeats(job, from, n, sums);
    store(to, place, step, sums, n, job->is_added);
}

void plan_sum_repeated(const saccade_tensor *each, const saccade_tensor *to, int is_added,
                       int threads)
{
    const int32_t last = to->rank - 1;
    repeated_job job = {.each = each, .to = to, .is_added = is_added, .outer = to->rank};
    int64_t items = 1;
    job.length = 1;
    if (to->rank && is_kept(to, last) && each->stride[last] == 1) {
        job.outer = last;
        job.length = to->shape[last];
    }
    job.segments = (job.length + WIDTH - 1) / WIDTH;
    for (int32_t d = 0; d < job.outer; d++)
        items *= is_kept(to, d) ? to->shape[d] : 1;
    par_for(items * job.segments, threads, sum_segment, &job);
}

/* ---- chunk tables ---- */

size_t plan_sum_room(const saccade_sizes *sizes)
{
    return 2 * (size_t)(sizes->B * sizes->KV) * sizeof(uint64_t);
}

/* Rows of a pool of pages are counted over all its pages. An entry is its first row, or its
 * page, above its place among all: batch by batch, chunk by chunk. */
enum { PLACE_BITS = 32, DIGIT_BITS = 8, DIGITS = 1 << DIGIT_BITS };

typedef struct chunk_job {
    const saccade_tensor *each, *to;
    const plan_chunks *chunks;
    const uint64_t *entries; /* of all batches that share rows, by their first rows */
    int64_t n, heads, rows, row_blocks;
    int64_t batch; /* of `to`: the first that shares these rows */
    int is_added;
} chunk_job;

static int64_t first_of(const chunk_job *job, uint64_t entry)
{
    return (int64_t)(entry >> PLACE_BITS) * (job->chunks->is_paged ? job->chunks->size : 1);
}

/* Elements from the first one of `to` to row r of head h. */
static int64_t place_of(const chunk_job *job, int64_t h, int64_t r)
{
    const saccade_tensor *to = job->to;
    const int64_t size = job->chunks->size, head = h * to->stride[1];
    if (job->chunks->is_paged)
        return r / size * to->stride[0] + head + r % size * to->stride[2];
    return job->batch * to->stride[0] + head + r * to->stride[2];
}

/* By digits from the lowest: stable, so entries of one row stay in their order. */
static uint64_t *sort(uint64_t *entries, uint64_t *other, int64_t n)
{
    for (int shift = PLACE_BITS; shift < 64; shift += DIGIT_BITS) {
        int64_t past[DIGITS] = {0}, sum = 0;
        for (int64_t i = 0; i < n; i++)
            past[entries[i] >> shift & (DIGITS - 1)]++;
        for (int d = 0; d < DIGITS; d++) {
            const int64_t count = past[d];
            past[d] = sum;
            sum += count;
        }
        for (int64_t i = 0; i < n; i++)
            other[past[entries[i] >> shift & (DIGITS - 1)]++] = entries[i];
        uint64_t *const held = entries;
        entries = other;
        other = held;
    }
    return entries;
}

/* Entries of batches [b0, b1) that name rows of KV keys. Pages past the last are the last. */
static int64_t collect(const chunk_job *job, int64_t b0, int64_t b1, uint64_t *entries)
{
    const plan_chunks *c = job->chunks;
    const int64_t needed = (job->each->shape[2] + c->size - 1) / c->size;
    const int64_t last = c->is_paged ? job->to->shape[0] - 1 : INT32_MAX;
    int64_t n = 0;
    for (int64_t b = b0; b < b1; b++) {
        const plan_entries own = plan_entries_of(c, b);
        for (int64_t i = 0; i < smaller(smaller(own.count, c->count), needed); i++)
            if (own.first[i] >= 0)
                entries[n++] = (uint64_t)smaller(own.first[i], last) << PLACE_BITS
                               | (uint64_t)(b * c->count + i);
    }
    return n;
}

/* Adds what rows [at, past) of an entry's chunk hold, of heads that share `to`'s head h. */
static void add_keys(const chunk_job *job, uint64_t entry, int64_t at, int64_t past, int64_t h,
                     int64_t d, int64_t width, double *sums)
{
    const saccade_tensor *each = job->each;
    const int64_t place = (int64_t)(entry & UINT32_MAX), b = place / job->chunks->count;
    const int64_t j0 = place % job->chunks->count * job->chunks->size;
    const int64_t h1 = job->heads == 1 ? each->shape[1] : h + 1;
    for (int64_t j = j0 + at; j < smaller(j0 + past, each->shape[2]); j++)
        for (int64_t g = h; g < h1; g++)
            add_each(each, b * each->stride[0] + g * each->stride[1] + j * each->stride[2] + d,
                     width, sums);
}

/* Row r of head h, elements [d, d + width); entries from *from on may hold it. */
static void sum_row(const chunk_job *job, int64_t from, int64_t h, int64_t r, int64_t d,
                    int64_t width, double *sums)
{
    const int64_t size = job->chunks->size;
    const int is_last = r == job->rows - 1;
    memset(sums, 0, (size_t)width * sizeof *sums);
    for (int64_t n = from; n < job->n; n++) {
        const int64_t first = first_of(job, job->entries[n]), at = r > first ? r - first : 0;
        if (first > r && !is_last)
            break;
        add_keys(job, job->entries[n], at, is_last ? size : at + 1, h, d, width, sums);
    }
}

/* Whether no entry from `from` on, the first that reaches row r or further, holds it. */
static int is_held_by_none(const chunk_job *job, int64_t from, int64_t r)
{
    return from == job->n || (r < job->rows - 1 && first_of(job, job->entries[from]) > r);
}

/* The first entry whose chunk reaches row r or further. */
static int64_t first_entry(const chunk_job *job, int64_t r)
{
    int64_t low = 0, high = job->n;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (first_of(job, job->entries[middle]) + job->chunks->size <= r)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void sum_rows(void *arg, int64_t item, int thread)
{
    const chunk_job *job = arg;
    const int64_t h = item / job->row_blocks, r0 = item % job->row_blocks * ROWS;
    const int64_t r1 = smaller(r0 + ROWS, job->rows), dim = job->to->shape[3];
    const int64_t size = job->chunks->size;
    double sums[WIDTH];
    int64_t from = first_entry(job, r0);
    (void)thread;
    for (int64_t r = r0; r < r1; r++) {
        while (from < job->n && first_of(job, job->entries[from]) + size <= r)
            from++;
        if (job->is_added && is_held_by_none(job, from, r))
            continue; /* sequences of a ragged run add to a pool in turn, each to few rows */
        for (int64_t d = 0; d < dim; d += WIDTH) {
            const int64_t width = smaller(dim - d, WIDTH);
            sum_row(job, from, h, r, d, width, sums);
            store(job->to, place_of(job, h, r) + d, 1, sums, width, job->is_added);
        }
    }
}

void plan_sum_chunks(const saccade_tensor *each, const plan_chunks *chunks, uint64_t *room,
                     const saccade_tensor *to, int is_added, int threads)
{
    const int64_t B = each->shape[0], half = B * each->shape[2];
    const int64_t pools = to->stride[0] && !chunks->is_paged ? B : 1, shared = B / pools;
    chunk_job job = {.each = each, .to = to, .chunks = chunks, .is_added = is_added};
    job.heads = to->stride[1] ? to->shape[1] : 1;
    job.rows = to->shape[2] * (chunks->is_paged ? to->shape[0] : 1);
    job.row_blocks = (job.rows + ROWS - 1) / ROWS;
    for (job.batch = 0; job.batch < pools; job.batch++) {
        job.n = collect(&job, job.batch * shared, (job.batch + 1) * shared, room);
        job.entries = sort(room, room + half, job.n);
        par_for(job.heads * job.row_blocks, threads, sum_rows, &job);
    }
}

saccade_status plan_check_places(const plan_run *run, saccade_error *err)
{
    const plan_chunks *c = run->chunks;
    FAIL_AT(c && c->count && run->sizes.B > UINT32_MAX / c->count, SACCADE_ELIMIT, "chunks", 0,
            0, "got a table of %lld batches of %d chunks, expected at most 2^32 in all",
            (long long)run->sizes.B, c->count);
    return SACCADE_OK;
}

void plan_sum_places(const saccade_tensor *each, const plan_chunks *chunks, uint64_t *room,
                     const saccade_tensor *to, int is_added, int threads)
{
    if (chunks)
        plan_sum_chunks(each, chunks, room, to, is_added, threads);
    else
        plan_sum_repeated(each, to, is_added, threads);
}
