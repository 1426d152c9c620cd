/* cuda.h: the CUDA back end. Data flow:
 *
 *     problem -> tile -> text (cfg.cuh, mod.cuh, wgmma.cuh and kern/) -> cubin -> launch
 *                tile/   emit/, program/                            program/  run/, backward/
 *
 * driver/ finds libcuda and NVRTC at run time; mask/ has what devices hold of block masks,
 * small/ kernels that no plan owns, ranks/ what attention over ranks asks of a GPU. */
#ifndef SACCADE_CUDA_CUDA_H
#define SACCADE_CUDA_CUDA_H

#include "cuda/mask/device_mask.h"
#include "cuda/program/program.h"
#include "cuda/run/run.h"

/* ---- prepare.c ---- */

saccade_status cu_prepare(const saccade_plan *plan, const saccade_block_mask *mask,
                          saccade_error *err);
/* plan_solver.row_tile */
int64_t cu_row_tile(const saccade_plan *plan, const saccade_sizes *sizes);

/* ---- measure.c ---- */

/* The loop that measures the tensor cores. */
saccade_status cu_compile_peak(const char *arch, cu_image *out, saccade_error *err);

/* ---- explain.c ---- */

saccade_status cu_explain(const saccade_plan *plan, strbuf *out, saccade_error *err);

#endif
