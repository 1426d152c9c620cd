/* turned_products.h: P^T dO and dS^T Q of the backward kernels, the outer-product micro-kernel
 * of panel_products.h with the strip's operand read by columns: a step's elements of one strip
 * of keys lie side by side, so the tile of weights is never transposed. The rows of a tile are
 * summed by themselves, as values are. */
#ifndef SACCADE_CPU_KERNELS_TURNED_PRODUCTS_H
#define SACCADE_CPU_KERNELS_TURNED_PRODUCTS_H

#include "cpu/kernels/backward_kernels.h"
#include "cpu/kernels/panel_step.h"

static ALWAYS_INLINE void turned_panel(int keys, const packed *a, int32_t a_ld, const packed *b,
                                       const cpu_stretch *of, int32_t n, float *c, int32_t c_ld)
{
    vf acc[STRIP_ROWS][PANEL_VECTORS];
    for (int j = 0; j < keys; j++)
        for (int v = 0; v < PANEL_VECTORS; v++)
            acc[j][v] = vf_set(0);
    for (const cpu_stretch *past = of + n; of < past; of++)
        for (int32_t t = of->from / STEP; t < (of->past + STEP - 1) / STEP; t++) {
            step_vector column[PANEL_VECTORS];
            for (int v = 0; v < PANEL_VECTORS; v++)
                column[v] = load_step(b + ((int64_t)t * PANEL + v * VF) * STEP);
#pragma GCC unroll 16
            for (int j = 0; j < keys; j++) {
                const step_vector x = broadcast_step(&a[((int64_t)t * a_ld + j) * STEP]);
#pragma GCC unroll 4
                for (int v = 0; v < PANEL_VECTORS; v++)
                    acc[j][v] = add_step(acc[j][v], x, column[v]);
            }
        }
    for (int j = 0; j < keys; j++)
        for (int v = 0; v < PANEL_VECTORS; v++)
            vf_store(c + (int64_t)j * c_ld + v * VF,
                     vf_load(c + (int64_t)j * c_ld + v * VF) + acc[j][v]);
}

static NEVER_INLINE void turned_strip(const packed *a, int32_t a_ld, const packed *b,
                                      const cpu_stretch *of, int32_t n, float *c, int32_t c_ld)
{
    turned_panel(STRIP_ROWS, a, a_ld, b, of, n, c, c_ld);
}

static NEVER_INLINE void turned_rest(int32_t keys, const packed *a, int32_t a_ld,
                                     const packed *b, const cpu_stretch *of, int32_t n,
                                     float *c, int32_t c_ld)
{
    int32_t j = 0;
    for (; j + 4 <= keys; j += 4)
        turned_panel(4, a + j * STEP, a_ld, b, of, n, c + (int64_t)j * c_ld, c_ld);
    for (; j < keys; j++)
        turned_panel(1, a + j * STEP, a_ld, b, of, n, c + (int64_t)j * c_ld, c_ld);
}

static CPU_TURNED_OF(turned_of)
{
    const packed *weights = a, *all = b;
    for (int32_t v = 0; v < n_panels; v++) {
        const packed *panel = all + (int64_t)v * block * PANEL;
        float *to = c + v * PANEL;
        int32_t j = 0;
        for (; j + STRIP_ROWS <= keys; j += STRIP_ROWS)
            turned_strip(weights + j * STEP, a_ld, panel, stretches, n_stretches,
                         to + (int64_t)j * c_ld, c_ld);
        turned_rest(keys - j, weights + j * STEP, a_ld, panel, stretches, n_stretches,
                    to + (int64_t)j * c_ld, c_ld);
    }
}

static CPU_TURNED(turned)
{
    const cpu_stretch all = {0, rows, 0};
    turned_of(a, a_ld, b, block, &all, 1, keys, n_panels, c, c_ld);
}

#endif
