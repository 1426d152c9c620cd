/* npy.h: NumPy's .npy files, versions 1 to 3, read as hostile input. */
#ifndef SACCADE_CLI_NPY_H
#define SACCADE_CLI_NPY_H

#include "cli.h"

/* Owned, row-major, in this machine's byte order, whatever the file had. */
typedef struct npy_array {
    saccade_dtype dtype; /* bool, ints, f16, f32, f64; V2 is bf16, as ml_dtypes writes it */
    int32_t rank;
    int64_t shape[SACCADE_MAX_RANK];
    int64_t count; /* elements */
    void *data;    /* 64-aligned; NULL when count is 0 */
} npy_array;

/* The file must end where its data end. */
saccade_status npy_read(const char *path, npy_array *out, saccade_error *err);
void npy_free(npy_array *array);
saccade_tensor npy_tensor(const npy_array *array);
/* Writes header and elements of any CPU tensor, row-major. */
saccade_status npy_write(FILE *file, const saccade_tensor *tensor, saccade_error *err);
saccade_status npy_save(const char *path, const saccade_tensor *tensor, saccade_error *err);

#endif
