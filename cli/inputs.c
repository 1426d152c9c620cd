/* Values of --bind: numbers, .npy files, and synthetic tensors for trying things out. */
#include "inputs.h"
#include "infile.h"
#include "floats.h"
#include "npy.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TEXT_MAX = 1 << 20 };

/* ---- numbers ---- */

static saccade_status scalar(const char *where, saccade_dtype dtype, double value,
                             saccade_tensor *out, saccade_error *err)
{
    const saccade_status status = floats_new(dtype, 0, NULL, out, err);
    if (status == SACCADE_OK)
        floats_set(out->data, dtype, 0, value);
    else
        snprintf(err->where, sizeof err->where, "%s", where);
    return status;
}

saccade_status input_scalar(const char *where, int64_t value, saccade_tensor *out,
                            saccade_error *err)
{
    CLI_FAIL_IF(value < INT32_MIN || value > INT32_MAX, SACCADE_EINVAL, where,
                "got %lld, expected a 32-bit integer", (long long)value);
    return scalar(where, SACCADE_I32, (double)value, out, err);
}

/* As texts have them: 0x and one to eight hexadecimal digits, the bits of an int; with a minus
 * they are negated. */
static bool read_hex(const char *text, int64_t *out)
{
    const bool is_negative = text[0] == '-';
    const char *at = text + is_negative;
    if (strncmp(at, "0x", 2) != 0 && strncmp(at, "0X", 2) != 0)
        return false;
    const size_t n = strspn(at + 2, "0123456789abcdefABCDEF");
    const uint32_t bits = (uint32_t)strtoul(at, NULL, 16);
    *out = (int32_t)(is_negative ? 0u - bits : bits);
    return n >= 1 && n <= 8 && !at[2 + n];
}

/* An f32, read as texts read theirs: what is too large or too small for one is no number. */
static saccade_status real_scalar(const char *where, const char *text, saccade_tensor *out,
                                  saccade_error *err)
{
    errno = 0;
    const float x = strtof(text, NULL);
    CLI_FAIL_IF(errno == ERANGE && isinf(x), SACCADE_EINVAL, where,
                "got '%.60s', expected at most 3.4e38 in size, or inf", text);
    CLI_FAIL_IF(errno == ERANGE && x == 0, SACCADE_EINVAL, where,
                "got '%.60s', expected at least 1.4e-45 in size, or 0", text);
    return scalar(where, SACCADE_F32, (double)x, out, err);
}

/* ---- synthetic ---- */

typedef struct synthetic {
    saccade_dtype dtype;
    int32_t rank;
    int64_t shape[SACCADE_MAX_RANK];
    char kind[16];
    double x, y; /* arguments */
    int n_arguments;
} synthetic;

static bool size_of(const char *word, const saccade_sizes *s, int64_t *out)
{
    const struct {
        const char *name;
        int64_t value;
    } letters[] = {{"B", s->B},   {"H", s->H}, {"Hkv", s->Hkv}, {"Q", s->Q},
                   {"KV", s->KV}, {"D", s->D}, {"Dv", s->Dv}};
    for (int i = 0; i < 7; i++)
        if (strcmp(word, letters[i].name) == 0) {
            *out = letters[i].value;
            return true;
        }
    return cli_parse_int(word, out) && *out >= 1;
}

static bool read_dtype(const char *word, saccade_dtype *out)
{
    for (int d = SACCADE_BOOL; d <= SACCADE_F64; d++) {
        const char *name = saccade_dtype_name((saccade_dtype)d);
        if (saccade_dtype_bytes((saccade_dtype)d) && strcmp(word, name) == 0) {
            *out = (saccade_dtype)d;
            return true;
        }
    }
    return false;
}

static bool read_shape(char *list, const saccade_sizes *sizes, synthetic *s)
{
    char *rest = NULL;
    for (char *word = strtok_r(list, ", ", &rest); word; word = strtok_r(NULL, ", ", &rest))
        if (s->rank == SACCADE_MAX_RANK || !size_of(word, sizes, &s->shape[s->rank++]))
            return false;
    return true;
}

/* "(12)", "(0, 1)" */
static bool read_arguments(const char *at, synthetic *s)
{
    double *const to[] = {&s->x, &s->y};
    char *past = NULL;
    do {
        if (s->n_arguments == 2)
            return false;
        at++;
        *to[s->n_arguments++] = strtod(at, &past);
        if (past == at)
            return false;
        at = past + strspn(past, " ");
    } while (*at == ',');
    return strcmp(at, ")") == 0;
}

/* Cuts "i32[KV]:docs(12)" into its parts. */
static bool read_synthetic(const char *text, const saccade_sizes *sizes, synthetic *s)
{
    char dtype[8], shape[128] = "", kind[64];
    int used = 0;
    if (sscanf(text, "%7[a-z0-9][%127[^]]]:%63[^\n]%n", dtype, shape, kind, &used) != 3
        || text[used])
        return false;
    *s = (synthetic){.rank = 0};
    char *open = strchr(kind, '(');
    if (open) {
        if (!read_arguments(open, s))
            return false;
        *open = 0;
    }
    snprintf(s->kind, sizeof s->kind, "%.15s", kind);
    return strlen(kind) < sizeof s->kind && read_dtype(dtype, &s->dtype)
           && read_shape(shape, sizes, s);
}

typedef void (*fill_fn)(const synthetic *s, uint64_t *seed, double *row, int64_t n);

static void fill_iota(const synthetic *s, uint64_t *seed, double *row, int64_t n)
{
    (void)s, (void)seed;
    for (int64_t i = 0; i < n; i++)
        row[i] = (double)i;
}

static void fill_const(const synthetic *s, uint64_t *seed, double *row, int64_t n)
{
    (void)seed;
    for (int64_t i = 0; i < n; i++)
        row[i] = s->x;
}

static void fill_normal(const synthetic *s, uint64_t *seed, double *row, int64_t n)
{
    (void)s;
    for (int64_t i = 0; i < n; i++)
        row[i] = floats_normal(seed);
}

static void fill_uniform(const synthetic *s, uint64_t *seed, double *row, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        row[i] = s->x + (s->y - s->x) * floats_uniform(seed);
}

static void fill_randint(const synthetic *s, uint64_t *seed, double *row, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        row[i] = floor(s->x * floats_uniform(seed));
}

static void fill_bernoulli(const synthetic *s, uint64_t *seed, double *row, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        row[i] = floats_uniform(seed) < s->x;
}

/* x documents one after another, of random lengths: x - 1 of the n - 1 places between elements
 * are cuts, every choice as likely. */
static void fill_docs(const synthetic *s, uint64_t *seed, double *row, int64_t n)
{
    double cuts = fmin(s->x, (double)n) - 1, id = 0;
    row[0] = 0;
    for (int64_t i = 1; i < n; i++) {
        if (floats_uniform(seed) * (double)(n - i) < cuts) {
            cuts--;
            id++;
        }
        row[i] = id;
    }
}

static const struct {
    const char *name;
    int n_arguments;
    fill_fn fill;
    bool is_count; /* the argument */
} kinds[] = {
    {"iota", 0, fill_iota, false},       {"zeros", 0, fill_const, false},
    {"const", 1, fill_const, false},     {"normal", 0, fill_normal, false},
    {"uniform", 2, fill_uniform, false}, {"randint", 1, fill_randint, true},
    {"docs", 1, fill_docs, true},        {"bernoulli", 1, fill_bernoulli, false},
};
enum { KINDS = sizeof kinds / sizeof kinds[0] };

static uint64_t seed_of(const char *name)
{
    uint64_t h = 0xcbf29ce484222325; /* FNV-1a */
    for (; *name; name++)
        h = (h ^ (unsigned char)*name) * 0x100000001b3;
    return h;
}

/* Can the dtype hold it? Casts of what integers cannot are undefined; no number becomes inf. */
static bool holds(saccade_dtype dtype, double x)
{
    const int bits = 8 * (int)saccade_dtype_bytes(dtype);
    double held;
    if (floats_is_float(dtype)) {
        floats_set(&held, dtype, 0, x);
        return !isfinite(x) || isfinite(floats_get(&held, dtype, 0));
    }
    if (dtype == SACCADE_BOOL)
        return x == x;
    if (dtype == SACCADE_U8 || dtype == SACCADE_U16 || dtype == SACCADE_U32
        || dtype == SACCADE_U64)
        return x > -1 && x < ldexp(1, bits);
    return x >= -ldexp(1, bits - 1) && x < ldexp(1, bits - 1);
}

/* Fills row by row of the last dimension. */
static saccade_status fill(const char *name, const synthetic *s, fill_fn how,
                           saccade_tensor *out, saccade_error *err)
{
    saccade_status status = floats_new(s->dtype, s->rank, s->shape, out, err);
    if (status != SACCADE_OK) {
        snprintf(err->where, sizeof err->where, "%s", name);
        return status;
    }
    const int64_t n = s->rank ? s->shape[s->rank - 1] : 1, count = floats_count(out);
    double *row = malloc((size_t)n * sizeof *row);
    uint64_t seed = seed_of(name);
    if (!row) {
        free(out->data);
        return cli_fail(err, SACCADE_ENOMEM, name, "out of memory");
    }
    for (int64_t at = 0; at < count && status == SACCADE_OK; at += n) {
        how(s, &seed, row, n);
        for (int64_t i = 0; i < n && status == SACCADE_OK; i++)
            if (holds(s->dtype, row[i]))
                floats_set(out->data, s->dtype, at + i, row[i]);
            else
                status =
                    cli_fail(err, SACCADE_EINVAL, name, "got value %g, expected some of %s",
                             row[i], saccade_dtype_name(s->dtype));
    }
    free(row);
    if (status != SACCADE_OK)
        free(out->data);
    return status;
}

static saccade_status make_synthetic(const char *name, const char *text, const synthetic *s,
                                     saccade_tensor *out, saccade_error *err)
{
    for (int i = 0; i < KINDS; i++) {
        if (strcmp(s->kind, kinds[i].name) != 0)
            continue;
        CLI_FAIL_IF(s->n_arguments != kinds[i].n_arguments, SACCADE_EINVAL, name,
                    "got %d arguments in '%.60s', expected %d", s->n_arguments, text,
                    kinds[i].n_arguments);
        const bool is_count = s->x >= 1 && s->x <= INT32_MAX && s->x == floor(s->x);
        CLI_FAIL_IF(kinds[i].is_count && !is_count, SACCADE_EINVAL, name,
                    "got '%.60s', expected a count from 1 to 2147483647", text);
        return fill(name, s, kinds[i].fill, out, err);
    }
    return cli_fail(err, SACCADE_EINVAL, name,
                    "got '%.60s', expected iota, zeros, const(x), normal, uniform(lo, hi), "
                    "randint(n), docs(n) or bernoulli(p) after the ':'",
                    text);
}

static saccade_status from_file(const char *path, saccade_tensor *out, saccade_error *err)
{
    npy_array array;
    CLI_TRY(npy_read(path, &array, err));
    if (array.count == 0) {
        npy_free(&array);
        return cli_fail(err, SACCADE_EINVAL, path, "got no elements, expected one or more");
    }
    *out = npy_tensor(&array);
    return SACCADE_OK;
}

static bool ends_with(const char *text, const char *end)
{
    const size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

const char *input_file_of_value(const char *text)
{
    return text && ends_with(text, ".npy") ? text : NULL;
}

const char *input_file_of_text(const char *text)
{
    return text && text[0] == '@' ? text + 1 : NULL;
}

saccade_status input_value(const char *name, const char *text, const saccade_sizes *sizes,
                           saccade_tensor *out, saccade_error *err)
{
    synthetic s;
    int64_t n;
    double x;
    if (cli_parse_int(text, &n) || read_hex(text, &n))
        return input_scalar(name, n, out, err);
    if (strcmp(text, "true") == 0 || strcmp(text, "false") == 0)
        return scalar(name, SACCADE_BOOL, text[0] == 't', out, err);
    if (!strpbrk(text, "xX") && cli_parse_real(text, &x))
        return real_scalar(name, text, out, err);
    if (read_synthetic(text, sizes, &s))
        return make_synthetic(name, text, &s, out, err);
    if (input_file_of_value(text))
        return from_file(text, out, err);
    return cli_fail(err, SACCADE_EINVAL, name,
                    "got '%.60s', expected a number, F.npy, or like i32[KV]:docs(12)", text);
}

saccade_status input_positions(const char *where, const char *text, saccade_tensor *out,
                               saccade_error *err)
{
    saccade_tensor read = {.data = NULL};
    int64_t n;
    if (cli_parse_int(text, &n))
        return input_scalar(where, n, out, err);
    CLI_FAIL_IF(!input_file_of_value(text), SACCADE_EINVAL, where,
                "got '%.60s', expected a whole number%s or F.npy", text,
                strcmp(where, "--q-offset") == 0 ? ", end" : "");
    CLI_TRY(from_file(text, &read, err));
    saccade_status status = SACCADE_OK;
    if (read.rank > 1 || floats_is_float(read.dtype))
        status = cli_fail(err, SACCADE_EINVAL, where, "got rank %d of %s, expected [B] of i32",
                          read.rank, saccade_dtype_name(read.dtype));
    for (int64_t i = 0; status == SACCADE_OK && i < floats_count(&read); i++) {
        const double x = floats_get(read.data, read.dtype, i);
        if (x < INT32_MIN || x > INT32_MAX)
            status =
                cli_fail(err, SACCADE_EINVAL, where, "got %.0f, expected 32-bit integers", x);
    }
    if (status == SACCADE_OK)
        status = floats_convert(&read, SACCADE_I32, out, err);
    free(read.data);
    return status;
}

saccade_status input_text(const char *where, const char *text, char **out, size_t *bytes,
                          saccade_error *err)
{
    const char *path = input_file_of_text(text);
    if (!path) {
        *out = strdup(text);
        *bytes = strlen(text);
        CLI_FAIL_IF(!*out, SACCADE_ENOMEM, where, "out of memory");
        return SACCADE_OK;
    }
    FILE *file;
    CLI_TRY(infile_open(path, &file, err));
    char *read = malloc(TEXT_MAX + 2);
    errno = 0;
    const size_t n = read ? fread(read, 1, TEXT_MAX + 1, file) : 0;
    const int reason = errno;
    const bool failed = ferror(file) != 0, is_nothing = n == 0 && !infile_is_regular(file);
    fclose(file);
    if (!read || failed || is_nothing || n > TEXT_MAX) {
        free(read);
        CLI_FAIL_IF(!read, SACCADE_ENOMEM, path, "out of memory");
        CLI_FAIL_IF(failed, SACCADE_EIO, path, "cannot read it: %s", strerror(reason));
        CLI_FAIL_IF(n, SACCADE_ELIMIT, path,
                    "got a text of more than %d bytes, expected no more", TEXT_MAX);
        return cli_fail(err, SACCADE_EIO, path, "cannot read it: got nothing, expected a text");
    }
    read[n] = 0;
    *out = read;
    *bytes = n;
    return SACCADE_OK;
}
