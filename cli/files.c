/* Q, K, V from files: which dimension is which, sizes that must agree, conversion. */
#include "files.h"
#include "floats.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A file's array as [B, H, N, D]: missing leading dimensions are 1. */
static saccade_status view_of(const char *path, const npy_array *a, bool is_bnhd,
                              saccade_tensor *out, saccade_error *err)
{
    CLI_FAIL_IF(!floats_is_float(a->dtype), SACCADE_EINVAL, path,
                "got elements of %s, expected f32, f16 or bf16", saccade_dtype_name(a->dtype));
    CLI_FAIL_IF(a->rank < 2 || a->rank > 4, SACCADE_EINVAL, path,
                "got %d dimensions, expected 4 (or 3: no batch; 2: one head)", a->rank);
    CLI_FAIL_IF(a->count == 0, SACCADE_EINVAL, path, "got no elements, expected one or more");
    int64_t shape[4] = {1, 1, 1, 1};
    for (int32_t i = 0; i < a->rank; i++)
        shape[4 - a->rank + i] = a->shape[i];
    if (is_bnhd && a->rank == 2) { /* [N, D] */
        shape[1] = shape[2];
        shape[2] = 1;
    }
    saccade_tensor t = saccade_tensor_of(a->data, a->dtype, 4, shape);
    if (is_bnhd) {
        const int64_t n = t.shape[1], step = t.stride[1];
        t.shape[1] = t.shape[2];
        t.stride[1] = t.stride[2];
        t.shape[2] = n;
        t.stride[2] = step;
    }
    *out = t;
    return SACCADE_OK;
}

static saccade_status same(const char *path, const char *what, int64_t got, int64_t expected,
                           const char *other, saccade_error *err)
{
    CLI_FAIL_IF(got != expected, SACCADE_EINVAL, path, "got %s %lld, expected %lld as in %s",
                what, (long long)got, (long long)expected, other);
    return SACCADE_OK;
}

static saccade_status measure(const cli_args *args, file_tensors *f, saccade_error *err)
{
    const int64_t *q = f->t.q.shape, *k = f->t.k.shape, *v = f->t.v.shape;
    CLI_TRY(same(args->k_file, "batch", k[0], q[0], args->q_file, err));
    CLI_TRY(same(args->v_file, "batch", v[0], q[0], args->q_file, err));
    CLI_TRY(same(args->k_file, "head dim", k[3], q[3], args->q_file, err));
    CLI_TRY(same(args->v_file, "heads", v[1], k[1], args->k_file, err));
    CLI_TRY(same(args->v_file, "length", v[2], k[2], args->k_file, err));
    CLI_FAIL_IF(q[1] % k[1] != 0, SACCADE_EINVAL, args->q_file,
                "got %lld heads, expected a multiple of the %lld in %s", (long long)q[1],
                (long long)k[1], args->k_file);
    f->sizes = (saccade_sizes){q[0], q[1], k[1], q[2], k[2], q[3], v[3]};
    return SACCADE_OK;
}

/* One dtype for all three: the files' own, or --dtype. */
static saccade_status convert(const cli_args *args, file_tensors *f, saccade_error *err)
{
    saccade_tensor *tensors[] = {&f->t.q, &f->t.k, &f->t.v};
    const char *paths[] = {args->q_file, args->k_file, args->v_file};
    const bool takes_f64 = args->backend && strcmp(args->backend, "ref") == 0;
    saccade_dtype dtype;
    CLI_TRY(cli_parse_dtype(args->dtype, f->t.q.dtype, &dtype, err));
    CLI_FAIL_IF(dtype == SACCADE_F64 && !takes_f64, SACCADE_EINVAL, args->q_file,
                "got f64, expected f32, f16 or bf16 (--dtype f32 converts)");
    for (int i = 0; i < 3; i++) {
        saccade_tensor converted;
        CLI_FAIL_IF(!args->dtype && tensors[i]->dtype != dtype, SACCADE_EINVAL, paths[i],
                    "got %s, expected %s as in %s (or --dtype to convert)",
                    saccade_dtype_name(tensors[i]->dtype), saccade_dtype_name(dtype),
                    args->q_file);
        if (tensors[i]->dtype == dtype)
            continue;
        CLI_TRY(floats_convert(tensors[i], dtype, &converted, err));
        free(tensors[i]->data);
        *tensors[i] = converted;
    }
    return SACCADE_OK;
}

saccade_status files_room(const file_tensors *f, saccade_dtype dtype, int64_t heads,
                          int64_t length, int64_t dim, saccade_tensor *out, saccade_error *err)
{
    const int64_t B = f->sizes.B, bhnd[] = {B, heads, length, dim};
    const int64_t bnhd[] = {B, length, heads, dim};
    CLI_TRY(floats_new(dtype, 4, f->is_bnhd ? bnhd : bhnd, out, err));
    if (f->is_bnhd) {
        memcpy(out->shape, bhnd, sizeof bhnd);
        out->stride[1] = dim;
        out->stride[2] = heads * dim;
    }
    return SACCADE_OK;
}

void files_shape(const file_tensors *f, const saccade_tensor *t, int64_t *shape)
{
    const int64_t *n = t->shape;
    const int64_t all[] = {n[0], f->is_bnhd ? n[2] : n[1], f->is_bnhd ? n[1] : n[2], n[3]};
    const int64_t flat[] = {n[2], n[3]};
    const int64_t *given = f->rank == 2 ? flat : all + 4 - f->rank;
    memcpy(shape, given, (size_t)f->rank * sizeof *shape);
}

saccade_status files_write(const file_tensors *f, const saccade_tensor *t, FILE *file,
                           saccade_error *err)
{
    int64_t shape[4];
    saccade_tensor converted;
    files_shape(f, t, shape);
    const saccade_tensor rows = saccade_tensor_of(t->data, t->dtype, f->rank, shape);
    if (rows.dtype == f->file_dtype)
        return npy_write(file, &rows, err);
    CLI_TRY(floats_convert(&rows, f->file_dtype, &converted, err));
    const saccade_status status = npy_write(file, &converted, err);
    free(converted.data);
    return status;
}

/* Room for O and lse. */
static saccade_status make_results(file_tensors *f, saccade_error *err)
{
    const saccade_sizes *s = &f->sizes;
    const int64_t rows[] = {s->B, s->H, s->Q};
    const saccade_dtype dtype = f->t.q.dtype;
    CLI_TRY(files_room(f, dtype, s->H, s->Q, s->Dv, &f->t.out, err));
    return floats_new(dtype == SACCADE_F64 ? SACCADE_F64 : SACCADE_F32, 3, rows, &f->t.lse,
                      err);
}

static saccade_status load(const cli_args *args, file_tensors *f, saccade_error *err)
{
    const char *paths[] = {args->q_file, args->k_file, args->v_file};
    static const char *const options[] = {"-q", "-k", "-v"};
    saccade_tensor *tensors[] = {&f->t.q, &f->t.k, &f->t.v};
    f->is_bnhd = args->layout && strcmp(args->layout, "bnhd") == 0;
    CLI_FAIL_IF(args->layout && !f->is_bnhd && strcmp(args->layout, "bhnd") != 0,
                SACCADE_EINVAL, "--layout", "got '%.40s', expected bhnd or bnhd", args->layout);
    for (int i = 0; i < 3; i++) {
        npy_array array;
        CLI_FAIL_IF(!paths[i], SACCADE_EINVAL, options[i], "got no file, expected one");
        CLI_TRY(npy_read(paths[i], &array, err));
        const saccade_status status = view_of(paths[i], &array, f->is_bnhd, tensors[i], err);
        if (status != SACCADE_OK) {
            npy_free(&array);
            return status;
        }
        f->rank = i == 0 ? array.rank : f->rank;
        CLI_FAIL_IF(array.rank != f->rank, SACCADE_EINVAL, paths[i],
                    "got %d dimensions, expected %d as in %s", array.rank, f->rank, paths[0]);
    }
    f->file_dtype = f->t.q.dtype;
    CLI_TRY(measure(args, f, err));
    CLI_TRY(convert(args, f, err));
    return make_results(f, err);
}

saccade_status files_load_out(const char *path, const file_tensors *f, saccade_tensor *out,
                              saccade_error *err)
{
    const int64_t *n = f->t.out.shape;
    npy_array array;
    saccade_tensor t = {.data = NULL}, converted;
    CLI_TRY(npy_read(path, &array, err));
    saccade_status status = view_of(path, &array, f->is_bnhd, &t, err);
    if (status == SACCADE_OK && memcmp(t.shape, n, 4 * sizeof *n) != 0)
        status = cli_fail(err, SACCADE_EINVAL, path,
                          "got [%lld, %lld, %lld, %lld], expected the shape of O, "
                          "[%lld, %lld, %lld, %lld]",
                          (long long)t.shape[0], (long long)t.shape[1], (long long)t.shape[2],
                          (long long)t.shape[3], (long long)n[0], (long long)n[1],
                          (long long)n[2], (long long)n[3]);
    if (status == SACCADE_OK && t.dtype != f->t.q.dtype) {
        status = floats_convert(&t, f->t.q.dtype, &converted, err);
        npy_free(&array);
        t = converted;
    } else if (status != SACCADE_OK) {
        npy_free(&array);
    }
    if (status == SACCADE_OK)
        *out = t;
    return status;
}

saccade_status files_load(const cli_args *args, file_tensors *out, saccade_error *err)
{
    file_tensors made = {.rank = 0};
    const saccade_status status = load(args, &made, err);
    if (status == SACCADE_OK)
        *out = made;
    else
        files_free(&made);
    return status;
}

void files_free(file_tensors *files)
{
    job_tensors_free(&files->t);
}

saccade_status files_engine_options(const cli_args *args, engine_options *out,
                                    saccade_error *err)
{
    const char *backend = args->arch && !args->backend ? "cuda" : args->backend;
    CLI_FAIL_IF(args->arch && strcmp(backend, "cuda") != 0, SACCADE_EINVAL, "--arch",
                "got it with --backend %.20s, expected cuda", backend);
    CLI_FAIL_IF(args->layout && !args->q_file, SACCADE_EINVAL, "--layout",
                "got it without files, expected -q, -k and -v");
    *out = (engine_options){
        .backend = backend,
        .arch = args->arch,
        .level = args->level,
        .threads = (int32_t)args->threads,
        .scale = args->scale,
        .page = args->page_size,
        .batch_invariant = args->batch_invariant,
    };
    CLI_TRY(code_groups_of(args->kv_dtype, args->kv_scale, &out->codes, err));
    CLI_FAIL_IF(args->kv_dtype && (args->page_size || args->d_out_file), SACCADE_EINVAL,
                "--kv-dtype", "got it with %s, expected one of them",
                args->page_size ? "--page-size" : "--grad");
    return cli_parse_block(args->block, &out->block_q, &out->block_kv, err);
}
