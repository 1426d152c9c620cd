/* Counting for the ladder, at the place where a thing is done. An algorithm has a ladder_run
 * named `run` in scope and writes its formulas as usual:
 *     WRITE(y[j], FLOP(2, expf(READ(x[j]) - m)));     one read, one write, two FLOPs
 * With LADDER_TIMED nothing is counted and the names change, so both fit in one library. */
#ifndef SACCADE_REF_LADDER_OPS_H
#define SACCADE_REF_LADDER_OPS_H

#include "ref/ladder.h"

#include <assert.h>
#include <math.h>

#ifdef LADDER_TIMED
#define LADDER(name) ladder_timed_##name
#define COUNT(what, n) ((void)run)
#define PEAK(what, n) ((void)run)
#else
#define LADDER(name) ladder_##name
#define COUNT(what, n) ((void)(run->count.what += (n)))
#define PEAK(what, n) ((void)(run->count.what = run->count.what > (n) ? run->count.what : (n)))
#endif

#define READ(place) (COUNT(reads, 1), (place))
#define WRITE(place, value) ((void)((place) = (value)), COUNT(writes, 1))
#define FLOP(n, value) (COUNT(flops, n), (value))
#define AGAIN(value) (COUNT(repeats, 1), (value)) /* an exponential already counted */
#define VISIT(pairs) COUNT(visits, pairs)

static inline float larger(float x, float y)
{
    return x > y ? x : y;
}

static inline float *take(ladder_memory *memory, int64_t n)
{
    float *taken = memory->at;
    assert(memory->end - memory->at >= n);
    memory->at += n;
    return taken;
}

/* n elements on the chip, until chip_reset(run, what the chip was before). */
static inline float *on_chip(ladder_run *run, int64_t n)
{
    float *taken = take(&run->chip, n);
    PEAK(chip, run->chip.at - run->chip.start);
    return taken;
}

static inline void chip_reset(ladder_run *run, ladder_memory before)
{
    run->chip = before;
}

/* n elements of slow memory besides inputs and outputs. */
static inline float *in_slow(ladder_run *run, int64_t n)
{
    COUNT(extra, n);
    return take(&run->slow, n);
}

static inline void load(ladder_run *run, float *chip, const float *slow, int64_t n)
{
    for (int64_t e = 0; e < n; e++)
        chip[e] = READ(slow[e]);
}

static inline void store(ladder_run *run, float *slow, const float *chip, int64_t n)
{
    for (int64_t e = 0; e < n; e++)
        WRITE(slow[e], chip[e]);
}

static inline void fill(ladder_run *run, float *slow, float value, int64_t n)
{
    for (int64_t e = 0; e < n; e++)
        WRITE(slow[e], value);
}

static inline void clear(float *chip, int64_t n)
{
    for (int64_t e = 0; e < n; e++)
        chip[e] = 0;
}

/* x . y, both on the chip: 2n FLOPs. */
static inline float dot(ladder_run *run, const float *x, const float *y, int64_t n)
{
    float sum = 0;
    for (int64_t e = 0; e < n; e++)
        sum = FLOP(2, sum + x[e] * y[e]);
    return sum;
}

/* to += a x, both on the chip: 2n FLOPs. */
static inline void accumulate(ladder_run *run, float *to, float a, const float *x, int64_t n)
{
    for (int64_t e = 0; e < n; e++)
        to[e] = FLOP(2, to[e] + a * x[e]);
}

/* m_j = max(m_{j-1}, x_j);  d_j = d_{j-1} e^{m_{j-1} - m_j} + e^{x_j - m_j}
 * One of the two exponents is 0, so one exponential serves both: 5 FLOPs. Starts from
 * m = -inf, d = 0. */
static inline void online_update(ladder_run *run, float *m, float *d, float x)
{
    const float e = FLOP(2, expf(-fabsf(x - *m)));
    const int is_new = x > *m;
    *d = FLOP(2, *d * (is_new ? e : 1) + (is_new ? 1 : e));
    *m = FLOP(1, larger(*m, x));
}

#endif
