/* drop.h: which weights of a row dropout keeps, as words to be and-ed. */
#ifndef SACCADE_CPU_KERNELS_DROP_H
#define SACCADE_CPU_KERNELS_DROP_H

#include "base/convert.h"
#include "plan/plan.h"

/* keep [16 squares] gets 0xffff for weights that are kept and 0 for others: of squares of 16
 * keys from number `column` / 4 on, in the half of their patches that words 0 and 2 have, or 1
 * and 3 (is_second). Written are whole multiples of CPU_DROP_SQUARES. */
enum { CPU_DROP_SQUARES = 4 };
#define CPU_DROP(name)                                                                   \
    void name(const dropout_words *head, uint32_t row, uint32_t column, int32_t squares, \
              int is_second, uint32_t threshold, uint16_t *keep)

/* drop_tmpl.c */
CPU_DROP(cpu_drop_squares_portable);
CPU_DROP(cpu_drop_squares_avx2);
CPU_DROP(cpu_drop_squares_avx512);

/* A head's. */
typedef struct cpu_drop {
    dropout_words head;
    uint32_t threshold;
    CPU_DROP((*squares));
} cpu_drop;

cpu_drop cpu_drop_of(const saccade_plan *plan, const plan_run *run, int64_t b, int64_t h);

/* Lengths of inner loops, fixed so that compilers turn them into vectors. */
enum { CPU_DROP_BLOCK = 16 };
static inline float cpu_drop_one(float p, uint16_t keep)
{
    return f32_from_bits(f32_bits(p) & (uint32_t)(int32_t)(int16_t)keep);
}

/* Weights in f32, of the keys that keep begins with. */
static inline void cpu_drop_f32(float *p, const uint16_t *keep, int32_t n)
{
    int32_t j = 0;
    for (; j + CPU_DROP_BLOCK <= n; j += CPU_DROP_BLOCK)
        for (int32_t i = 0; i < CPU_DROP_BLOCK; i++)
            p[j + i] = cpu_drop_one(p[j + i], keep[j + i]);
    for (; j < n; j++)
        p[j] = cpu_drop_one(p[j], keep[j]);
}

/* Room for a row of n keys that begin anywhere in a square. */
#define CPU_DROP_ROOM(n) (((n) + 16 + 63) / 64 * 64)
/* What is kept of keys at positions [kv, kv + n) in the row at position q: lies in room. */
const uint16_t *cpu_drop_row(const cpu_drop *drop, int32_t q, int32_t kv, int32_t n,
                             uint16_t *room);

#endif
