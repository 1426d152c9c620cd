/* NumPy's .npy files (numpy.lib.format, versions 1.0 to 3.0). Files are untrusted: the header
 * is bounded and parsed by a grammar of its own, sizes are multiplied with overflow checks and
 * held against the file's length before anything is allocated. Not read: record arrays,
 * objects, strings, complex numbers, Fortran order. */
#include "npy.h"
#include "infile.h"
#include "outfile.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { HEADER_MAX = 65536 };

/* ---- header ---- */

typedef struct header {
    const char *path;
    char text[HEADER_MAX + 1];
    const char *at;
    saccade_dtype dtype;
    bool swapped, fortran;
    int seen; /* bits: descr, fortran_order, shape */
    int32_t rank;
    int64_t shape[SACCADE_MAX_RANK];
} header;

static const struct {
    const char *code;
    saccade_dtype dtype;
} types[] = {
    {"b1", SACCADE_BOOL}, {"i1", SACCADE_I8},  {"u1", SACCADE_U8},  {"i2", SACCADE_I16},
    {"u2", SACCADE_U16},  {"i4", SACCADE_I32}, {"u4", SACCADE_U32}, {"i8", SACCADE_I64},
    {"u8", SACCADE_U64},  {"f2", SACCADE_F16}, {"f4", SACCADE_F32}, {"f8", SACCADE_F64},
    {"V2", SACCADE_BF16},
};
enum { TYPES = sizeof types / sizeof types[0] };

static bool big_endian_host(void)
{
    const uint16_t one = 1;
    return *(const unsigned char *)&one == 0;
}

static void blanks(header *h)
{
    while (*h->at == ' ' || *h->at == '\n')
        h->at++;
}

static bool take(header *h, char c)
{
    blanks(h);
    if (*h->at != c)
        return false;
    h->at++;
    return true;
}

/* A quoted word without escapes. */
static bool quoted(header *h, char *out, size_t bytes)
{
    blanks(h);
    const char quote = *h->at;
    if (quote != '\'' && quote != '"')
        return false;
    const char *end = strchr(h->at + 1, quote);
    const size_t n = end ? (size_t)(end - h->at - 1) : bytes;
    if (n >= bytes)
        return false;
    memcpy(out, h->at + 1, n);
    out[n] = 0;
    h->at = end + 1;
    return true;
}

static saccade_status read_descr(header *h, saccade_error *err)
{
    char word[16];
    blanks(h);
    CLI_FAIL_IF(*h->at == '[', SACCADE_EINVAL, h->path,
                "got an array of records, expected plain numbers");
    CLI_FAIL_IF(!quoted(h, word, sizeof word), SACCADE_EINVAL, h->path,
                "got a header whose descr is no short word");
    const char order = word[0];
    for (int i = 0; i < TYPES && strchr("<>=|", order) && order; i++) {
        if (strcmp(word + 1, types[i].code) != 0)
            continue;
        h->dtype = types[i].dtype;
        h->swapped =
            saccade_dtype_bytes(h->dtype) > 1
            && ((order == '>' && !big_endian_host()) || (order == '<' && big_endian_host()));
        return SACCADE_OK;
    }
    return cli_fail(err, SACCADE_EINVAL, h->path,
                    "got elements '%s', expected bool, int, f16, f32, f64 or bfloat16 (V2)",
                    word);
}

static saccade_status read_order(header *h, saccade_error *err)
{
    blanks(h);
    h->fortran = strncmp(h->at, "True", 4) == 0;
    CLI_FAIL_IF(!h->fortran && strncmp(h->at, "False", 5) != 0, SACCADE_EINVAL, h->path,
                "got a header whose fortran_order is neither True nor False");
    h->at += h->fortran ? 4 : 5;
    return SACCADE_OK;
}

static saccade_status read_length(header *h, saccade_error *err)
{
    int64_t n = 0;
    blanks(h);
    CLI_FAIL_IF(*h->at < '0' || *h->at > '9', SACCADE_EINVAL, h->path,
                "got a header whose shape is no tuple of lengths");
    for (; *h->at >= '0' && *h->at <= '9'; h->at++) {
        CLI_FAIL_IF(n > ((int64_t)1 << 62) / 10 - 1, SACCADE_EINVAL, h->path,
                    "got a length past 2^62 in the shape");
        n = 10 * n + (*h->at - '0');
    }
    CLI_FAIL_IF(h->rank == SACCADE_MAX_RANK, SACCADE_EINVAL, h->path,
                "got more than %d dimensions", SACCADE_MAX_RANK);
    h->shape[h->rank++] = n;
    return SACCADE_OK;
}

static saccade_status read_shape(header *h, saccade_error *err)
{
    CLI_FAIL_IF(!take(h, '('), SACCADE_EINVAL, h->path,
                "got a header whose shape is no tuple of lengths");
    while (!take(h, ')')) {
        CLI_TRY(read_length(h, err));
        if (take(h, ','))
            continue;
        CLI_FAIL_IF(!take(h, ')'), SACCADE_EINVAL, h->path,
                    "got a header whose shape is no tuple of lengths");
        break;
    }
    return SACCADE_OK;
}

static saccade_status read_field(header *h, saccade_error *err)
{
    static const struct {
        const char *key;
        saccade_status (*read)(header *, saccade_error *);
    } fields[] = {{"descr", read_descr}, {"fortran_order", read_order}, {"shape", read_shape}};
    char key[16];
    CLI_FAIL_IF(!quoted(h, key, sizeof key), SACCADE_EINVAL, h->path,
                "got a header that is no dictionary of descr, fortran_order and shape");
    for (int i = 0; i < 3; i++) {
        if (strcmp(key, fields[i].key) != 0 || (h->seen & (1 << i)))
            continue;
        h->seen |= 1 << i;
        CLI_FAIL_IF(!take(h, ':'), SACCADE_EINVAL, h->path,
                    "got no ':' after '%s' in the header", key);
        return fields[i].read(h, err);
    }
    return cli_fail(err, SACCADE_EINVAL, h->path,
                    "got key '%s' in the header, expected descr, fortran_order and shape once",
                    key);
}

static saccade_status parse_header(header *h, saccade_error *err)
{
    h->at = h->text;
    CLI_FAIL_IF(!take(h, '{'), SACCADE_EINVAL, h->path,
                "got a header that is no dictionary of descr, fortran_order and shape");
    while (!take(h, '}')) {
        CLI_TRY(read_field(h, err));
        if (take(h, ','))
            continue;
        CLI_FAIL_IF(!take(h, '}'), SACCADE_EINVAL, h->path,
                    "got a header without its closing brace");
        break;
    }
    blanks(h);
    CLI_FAIL_IF(*h->at || h->seen != 7, SACCADE_EINVAL, h->path,
                "got a header that is no dictionary of descr, fortran_order and shape");
    return SACCADE_OK;
}

/* Those of version 3 are UTF-8 for names of records, which are not read. */
static saccade_status check_ascii(const header *h, uint32_t n, saccade_error *err)
{
    for (uint32_t i = 0; i < n; i++) {
        const unsigned c = (unsigned char)h->text[i];
        CLI_FAIL_IF((c < ' ' && c != '\n') || c > '~', SACCADE_EINVAL, h->path,
                    "got byte 0x%02x in the header, expected ASCII", c);
    }
    return SACCADE_OK;
}

/* Reads magic, version, length and text. */
static saccade_status load_header(FILE *file, header *h, saccade_error *err)
{
    unsigned char fixed[12];
    const size_t got = fread(fixed, 1, 10, file);
    CLI_FAIL_IF(got == 0, SACCADE_EINVAL, h->path, "got an empty file, expected a .npy file");
    CLI_FAIL_IF(memcmp(fixed, "\x93NUMPY", got < 6 ? got : 6) != 0, SACCADE_EINVAL, h->path,
                "got no .npy file (it begins otherwise)");
    CLI_FAIL_IF(got < 10, SACCADE_EINVAL, h->path, "got a file that ends in its header");
    const int version = fixed[6];
    CLI_FAIL_IF(version < 1 || version > 3, SACCADE_EINVAL, h->path,
                "got .npy version %d.%d, expected 1.0 to 3.0", version, fixed[7]);
    uint32_t n = fixed[8] + 256u * fixed[9];
    if (version > 1) {
        CLI_FAIL_IF(fread(fixed + 10, 1, 2, file) != 2, SACCADE_EINVAL, h->path,
                    "got a file that ends in its header");
        n += (uint32_t)fixed[10] << 16 | (uint32_t)fixed[11] << 24;
    }
    CLI_FAIL_IF(n > HEADER_MAX, SACCADE_EINVAL, h->path,
                "got a header of %u bytes, expected at most %d", n, HEADER_MAX);
    CLI_FAIL_IF(fread(h->text, 1, n, file) != n, SACCADE_EINVAL, h->path,
                "got a file that ends in its header");
    h->text[n] = 0;
    CLI_TRY(check_ascii(h, n, err));
    return parse_header(h, err);
}

/* ---- data ---- */

/* count and bytes of the shape; fails when bytes pass 2^62. */
static saccade_status measure(const header *h, int64_t *count, int64_t *bytes,
                              saccade_error *err)
{
    const int64_t most = ((int64_t)1 << 62) / (int64_t)saccade_dtype_bytes(h->dtype);
    int64_t n = 1;
    for (int32_t i = 0; i < h->rank; i++) {
        CLI_FAIL_IF(h->shape[i] && n > most / h->shape[i], SACCADE_EINVAL, h->path,
                    "got a shape of more than 2^62 bytes");
        n *= h->shape[i];
    }
    *count = n;
    *bytes = n * (int64_t)saccade_dtype_bytes(h->dtype);
    return SACCADE_OK;
}

static void swap_bytes(unsigned char *data, int64_t count, size_t width)
{
    for (int64_t i = 0; i < count; i++, data += width) {
        for (size_t j = 0; j < width / 2; j++) {
            const unsigned char t = data[j];
            data[j] = data[width - 1 - j];
            data[width - 1 - j] = t;
        }
    }
}

static saccade_status load_data(FILE *file, const header *h, int64_t left, npy_array *a,
                                saccade_error *err)
{
    int64_t bytes;
    CLI_TRY(measure(h, &a->count, &bytes, err));
    CLI_FAIL_IF(left != bytes, SACCADE_EINVAL, h->path,
                "got %lld bytes of data, expected %lld for its shape and type", (long long)left,
                (long long)bytes);
    if (bytes == 0)
        return SACCADE_OK;
    a->data = aligned_alloc(64, ((size_t)bytes + 63) / 64 * 64);
    CLI_FAIL_IF(!a->data, SACCADE_ENOMEM, h->path, "out of memory for %lld bytes",
                (long long)bytes);
    CLI_FAIL_IF(fread(a->data, 1, (size_t)bytes, file) != (size_t)bytes, SACCADE_EIO, h->path,
                "cannot read all of its data");
    if (h->swapped)
        swap_bytes(a->data, a->count, saccade_dtype_bytes(a->dtype));
    for (int64_t i = 0; a->dtype == SACCADE_BOOL && i < a->count; i++)
        ((uint8_t *)a->data)[i] = ((uint8_t *)a->data)[i] != 0;
    return SACCADE_OK;
}

static saccade_status read_open(FILE *file, header *h, npy_array *a, saccade_error *err)
{
    struct stat info;
    CLI_FAIL_IF(!infile_is_regular(file) || fstat(fileno(file), &info) != 0, SACCADE_EINVAL,
                h->path, "got something that is no regular file");
    CLI_TRY(load_header(file, h, err));
    CLI_FAIL_IF(h->fortran && h->rank > 1, SACCADE_EINVAL, h->path,
                "got Fortran order (columns first), expected C order; "
                "numpy.ascontiguousarray makes it");
    a->dtype = h->dtype;
    a->rank = h->rank;
    memcpy(a->shape, h->shape, sizeof a->shape);
    return load_data(file, h, (int64_t)info.st_size - ftell(file), a, err);
}

saccade_status npy_read(const char *path, npy_array *out, saccade_error *err)
{
    npy_array array = {.data = NULL};
    header *h = calloc(1, sizeof *h);
    CLI_FAIL_IF(!h, SACCADE_ENOMEM, path, "out of memory");
    h->path = path;
    FILE *file = NULL;
    saccade_status status = infile_open(path, &file, err);
    if (status == SACCADE_OK)
        status = read_open(file, h, &array, err);
    if (file)
        fclose(file);
    free(h);
    if (status == SACCADE_OK)
        *out = array;
    else
        npy_free(&array);
    return status;
}

void npy_free(npy_array *array)
{
    free(array->data);
    array->data = NULL;
}

saccade_tensor npy_tensor(const npy_array *array)
{
    return saccade_tensor_of(array->data, array->dtype, array->rank, array->shape);
}

/* ---- writing ---- */

static const char *code_of(saccade_dtype dtype)
{
    for (int i = 0; i < TYPES; i++)
        if (types[i].dtype == dtype)
            return types[i].code;
    return "V1";
}

/* NumPy aligns the data to 64 bytes with spaces; the header's last byte is a newline. */
static void write_header(FILE *file, const saccade_tensor *t)
{
    char text[512];
    const char order = saccade_dtype_bytes(t->dtype) == 1 ? '|' : big_endian_host() ? '>' : '<';
    int n = snprintf(text, sizeof text, "{'descr': '%c%s', 'fortran_order': False, 'shape': (",
                     order, code_of(t->dtype));
    for (int32_t i = 0; i < t->rank; i++)
        n += snprintf(text + n, sizeof text - (size_t)n, "%lld,%s", (long long)t->shape[i],
                      i + 1 < t->rank ? " " : "");
    n += snprintf(text + n, sizeof text - (size_t)n, "), }");
    while ((10 + n + 1) % 64 != 0)
        text[n++] = ' ';
    text[n++] = '\n';
    const unsigned char fixed[10] = {0x93,
                                     'N',
                                     'U',
                                     'M',
                                     'P',
                                     'Y',
                                     1,
                                     0,
                                     (unsigned char)(n % 256),
                                     (unsigned char)(n / 256)};
    fwrite(fixed, 1, sizeof fixed, file);
    fwrite(text, 1, (size_t)n, file);
}

static void write_from(FILE *file, const saccade_tensor *t, int32_t dim, int64_t from)
{
    const size_t width = saccade_dtype_bytes(t->dtype);
    const char *data = (const char *)t->data + from * (int64_t)width;
    if (dim == t->rank) {
        fwrite(data, width, 1, file);
    } else if (dim == t->rank - 1 && t->stride[dim] == 1) {
        fwrite(data, width, (size_t)t->shape[dim], file);
    } else {
        for (int64_t i = 0; i < t->shape[dim]; i++)
            write_from(file, t, dim + 1, from + i * t->stride[dim]);
    }
}

saccade_status npy_write(FILE *file, const saccade_tensor *tensor, saccade_error *err)
{
    CLI_FAIL_IF(tensor->rank > SACCADE_MAX_RANK || tensor->device.kind != SACCADE_CPU,
                SACCADE_EINVAL, "npy", "got a tensor that is not on the CPU");
    write_header(file, tensor);
    write_from(file, tensor, 0, 0);
    return SACCADE_OK;
}

saccade_status npy_save(const char *path, const saccade_tensor *tensor, saccade_error *err)
{
    outfile out;
    CLI_TRY(outfile_begin(path, &out, err));
    const saccade_status status = npy_write(out.file, tensor, err);
    if (status == SACCADE_OK)
        return outfile_commit(&out, err);
    outfile_abandon(&out);
    return status;
}
