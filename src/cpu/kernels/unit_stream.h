/* unit_stream.h: what a stream of strips keeps. Each strip goes by units of 32 x 32 scores,
 * whose S and dP lie in a small ring: the weights of a unit are made between the products of
 * the next ones, so that scores never leave the nearest cache. */
#ifndef SACCADE_CPU_KERNELS_UNIT_STREAM_H
#define SACCADE_CPU_KERNELS_UNIT_STREAM_H

#include <stdint.h>

enum { CPU_UNIT_ROWS = 32, CPU_UNIT = CPU_UNIT_ROWS * CPU_UNIT_ROWS };
/* Of a unit S, dP - delta and, where a score mod has one, the slope, [32][32] each; units of
 * the ring; strips whose rows are known: more than have units in the ring. */
enum { CPU_UNIT_TILES = 3, CPU_RING_UNITS = 2, CPU_STREAM_STRIPS = 4 };

/* A unit whose weights are due, from `row` on. */
typedef struct cpu_unit_weights {
    const float *s, *base; /* base: -lse log2 e of its rows */
    void *p, *ds, *rows;   /* where its weights begin, rows: dS by rows */
    int64_t stride;        /* bytes between two pairs of rows of weights, and two rows of dS */
    int32_t row;
} cpu_unit_weights;

typedef struct cpu_stream {
    float *ring; /* [CPU_RING_UNITS][CPU_UNIT_TILES][CPU_UNIT] */
    /* Changes a unit's scores, those of keys from j on in the strip, and makes its slopes;
     * NULL: nothing to do. */
    void (*change)(void *arg, float *unit, int32_t j);
    void *arg;
    const int32_t *first, *past; /* live keys of the strip's rows; NULL: all */
    int64_t key;                 /* the number of the strip's first key among those */
    int32_t n_keys;              /* of the strip: others of its last unit are dead */
    int is_open;                 /* the rest is the kernel's */
    cpu_unit_weights last, before;
    int32_t slot, strip, has_slope;
    float factor;
    float base[CPU_STREAM_STRIPS][CPU_UNIT_ROWS], delta[CPU_UNIT_ROWS * CPU_UNIT_ROWS / 2];
} cpu_stream;

#endif
