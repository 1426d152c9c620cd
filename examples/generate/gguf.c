/* gguf.c: reading the head of a GGUF file by one cursor that never passes the end. The layout:
 * "GGUF", version u32, tensors u64, values u64; values: key, type u32, value; tensors: name,
 * rank u32, shape u64 each, type u32, offset u64; then data, aligned. A text is its length u64
 * and its bytes. */
#include "gguf.h"

#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static const int type_bytes[GGUF_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

typedef struct cursor {
    const gguf *g;
    uint64_t at;
    trouble *t;
} cursor;

/* n bytes from where the cursor stands, which it passes; NULL where there are fewer. */
static const uint8_t *take(cursor *c, uint64_t n, const char *what)
{
    const uint64_t left = c->g->size - c->at;
    if (n > left) {
        refuse(c->t, "%s: byte %llu: got %llu bytes up to the end, expected %llu for %s",
               c->g->file, (unsigned long long)c->at, (unsigned long long)left,
               (unsigned long long)n, what);
        return NULL;
    }
    const uint8_t *found = c->g->bytes + c->at;
    c->at += n;
    return found;
}

static uint64_t little(const uint8_t *p, int bytes)
{
    uint64_t x = 0;
    for (int i = bytes; i-- > 0;)
        x = x << 8 | p[i];
    return x;
}

static int take_integer(cursor *c, int bytes, const char *what, uint64_t *out)
{
    const uint8_t *p = take(c, (uint64_t)bytes, what);
    if (!p)
        return -1;
    *out = little(p, bytes);
    return 0;
}

static int take_text(cursor *c, const char *what, gguf_text *out)
{
    if (take_integer(c, 8, what, &out->size))
        return -1;
    out->data = (const char *)take(c, out->size, what);
    return out->data ? 0 : -1;
}

static int take_name(cursor *c, const char *what, gguf_text *out)
{
    const uint64_t at = c->at;
    if (take_text(c, what, out))
        return -1;
    if (out->size == 0 || out->size > GGUF_NAME || memchr(out->data, 0, out->size))
        return refuse(
            c->t, "%s: byte %llu: got %s of %llu bytes, expected 1 to %d, none of them 0",
            c->g->file, (unsigned long long)at, what, (unsigned long long)out->size, GGUF_NAME);
    return 0;
}

static int is_same(gguf_text a, gguf_text b)
{
    return a.size == b.size && memcmp(a.data, b.data, a.size) == 0;
}

/* ---- values ---- */

static int take_type(cursor *c, const gguf_value *v, int most, gguf_type *out)
{
    uint64_t type;
    if (take_integer(c, 4, "a value's type", &type))
        return -1;
    if (type >= GGUF_TYPES || (most == GGUF_TEXT && type == GGUF_ARRAY))
        return refuse(c->t, "%s: %.*s: got type %llu, expected one of GGUF's%s", c->g->file,
                      (int)v->key.size, v->key.data, (unsigned long long)type,
                      most == GGUF_TEXT ? " that is no array" : "");
    *out = (gguf_type)type;
    return 0;
}

static int take_elements(cursor *c, gguf_value *v)
{
    gguf_text text;
    if (v->type != GGUF_TEXT) {
        const uint64_t each = (uint64_t)type_bytes[v->type];
        if (v->count > UINT64_MAX / each)
            return refuse(c->t, "%s: %.*s: got %llu elements, more than any file holds",
                          c->g->file, (int)v->key.size, v->key.data,
                          (unsigned long long)v->count);
        v->at = take(c, v->count * each, "a value");
        return v->at ? 0 : -1;
    }
    v->at = c->g->bytes + c->at;
    for (uint64_t i = 0; i < v->count; i++) /* each takes 8 bytes at least: the file ends it */
        if (take_text(c, "a text", &text))
            return -1;
    return 0;
}

static int take_value(cursor *c, gguf_value *v)
{
    v->count = 1;
    if (take_name(c, "a key", &v->key) || take_type(c, v, GGUF_TYPES, &v->type))
        return -1;
    for (const gguf_value *before = c->g->values; before < v; before++)
        if (is_same(before->key, v->key))
            return refuse(c->t, "%s: %.*s: got the key twice, expected once", c->g->file,
                          (int)v->key.size, v->key.data);
    v->is_array = v->type == GGUF_ARRAY;
    if (v->is_array
        && (take_type(c, v, GGUF_TEXT, &v->type) || take_integer(c, 8, "a count", &v->count)))
        return -1;
    return take_elements(c, v);
}

/* ---- tensors ---- */

/* Elements of a block, bytes of a block. */
static int block_of(uint32_t type, int *elements, int *bytes)
{
    static const struct {
        uint32_t type;
        int elements, bytes;
    } known[] = {{0, 1, 4}, {1, 1, 2}, {2, 32, 18}, {3, 32, 20}, {8, 32, 34}, {30, 1, 2}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].type == type) {
            *elements = known[i].elements;
            *bytes = known[i].bytes;
            return 0;
        }
    return -1;
}

const char *gguf_type_name(uint32_t type)
{
    switch (type) {
    case 0:
        return "F32";
    case 1:
        return "F16";
    case 2:
        return "Q4_0";
    case 3:
        return "Q4_1";
    case 8:
        return "Q8_0";
    case 30:
        return "BF16";
    default:
        return NULL;
    }
}

static int take_shape(cursor *c, gguf_tensor *x)
{
    uint64_t rank, extent;
    if (take_integer(c, 4, "a tensor's rank", &rank))
        return -1;
    if (rank < 1 || rank > GGUF_RANK)
        return refuse(c->t, "%s: tensor %.*s: got rank %llu, expected 1 to %d", c->g->file,
                      (int)x->name.size, x->name.data, (unsigned long long)rank, GGUF_RANK);
    x->rank = (int32_t)rank;
    x->elements = 1;
    for (int i = 0; i < GGUF_RANK; i++) {
        extent = 1;
        if (i < x->rank && take_integer(c, 8, "a tensor's shape", &extent))
            return -1;
        if (extent < 1 || extent > (uint64_t)(INT64_C(1) << 40) / (uint64_t)x->elements)
            return refuse(c->t, "%s: tensor %.*s: got extent %llu, expected 1 to 2^40 elements",
                          c->g->file, (int)x->name.size, x->name.data,
                          (unsigned long long)extent);
        x->shape[i] = (int64_t)extent;
        x->elements *= (int64_t)extent;
    }
    return 0;
}

/* Its offset stands in `bytes` until the data's begin is known. */
static int take_tensor(cursor *c, gguf_tensor *x)
{
    uint64_t type;
    if (take_name(c, "a tensor's name", &x->name) || take_shape(c, x)
        || take_integer(c, 4, "a tensor's type", &type)
        || take_integer(c, 8, "a tensor's offset", &x->bytes))
        return -1;
    x->type = (uint32_t)type;
    for (const gguf_tensor *before = c->g->tensors; before < x; before++)
        if (is_same(before->name, x->name))
            return refuse(c->t, "%s: tensor %.*s: got it twice, expected once", c->g->file,
                          (int)x->name.size, x->name.data);
    return 0;
}

static int place_tensor(cursor *c, gguf_tensor *x, uint64_t begin, uint64_t alignment)
{
    const gguf *g = c->g;
    const uint64_t offset = x->bytes, room = g->size - begin;
    int elements, bytes;
    if (block_of(x->type, &elements, &bytes))
        return refuse(c->t,
                      "%s: tensor %.*s: got type %u, expected F32 (0), F16 (1), Q4_0 (2), "
                      "Q4_1 (3), Q8_0 (8) or BF16 (30)",
                      g->file, (int)x->name.size, x->name.data, x->type);
    if (x->shape[0] % elements)
        return refuse(c->t, "%s: tensor %.*s: got rows of %lld, expected a multiple of %d",
                      g->file, (int)x->name.size, x->name.data, (long long)x->shape[0],
                      elements);
    x->bytes = (uint64_t)(x->elements / elements) * (uint64_t)bytes;
    if (offset % alignment || offset > room || x->bytes > room - offset)
        return refuse(c->t,
                      "%s: tensor %.*s: got %llu bytes at %llu of the data, expected a place "
                      "aligned to %llu within its %llu bytes",
                      g->file, (int)x->name.size, x->name.data, (unsigned long long)x->bytes,
                      (unsigned long long)offset, (unsigned long long)alignment,
                      (unsigned long long)room);
    x->data = g->bytes + begin + offset;
    return 0;
}

/* ---- the whole ---- */

static int take_head(cursor *c, gguf *g)
{
    uint64_t version;
    const uint8_t *magic = take(c, 4, "the magic number");
    if (!magic)
        return -1;
    if (memcmp(magic, "GGUF", 4) != 0)
        return refuse(c->t, "%s: got no \"GGUF\" at its begin, expected a GGUF file", g->file);
    if (take_integer(c, 4, "the version", &version)
        || take_integer(c, 8, "the number of tensors", &g->n_tensors)
        || take_integer(c, 8, "the number of values", &g->n_values))
        return -1;
    if (version < 2 || version > 3)
        return refuse(c->t, "%s: got GGUF version %llu, expected 2 or 3", g->file,
                      (unsigned long long)version);
    if (g->n_tensors > GGUF_MOST_TENSORS || g->n_values > GGUF_MOST_VALUES)
        return refuse(c->t, "%s: got %llu tensors and %llu values, expected at most %d and %d",
                      g->file, (unsigned long long)g->n_tensors,
                      (unsigned long long)g->n_values, GGUF_MOST_TENSORS, GGUF_MOST_VALUES);
    g->values = calloc((size_t)g->n_values + 1, sizeof *g->values);
    g->tensors = calloc((size_t)g->n_tensors + 1, sizeof *g->tensors);
    if (!g->values || !g->tensors)
        return refuse(c->t, "%s: no memory for its head", g->file);
    return 0;
}

static int take_all(cursor *c, gguf *g)
{
    int64_t alignment;
    if (take_head(c, g))
        return -1;
    for (uint64_t i = 0; i < g->n_values; i++)
        if (take_value(c, &g->values[i]))
            return -1;
    for (uint64_t i = 0; i < g->n_tensors; i++)
        if (take_tensor(c, &g->tensors[i]))
            return -1;
    if (gguf_integer(g, "general.alignment", 1, 1 << 20, 32, &alignment, c->t))
        return -1;
    if (alignment & (alignment - 1))
        return refuse(c->t, "%s: general.alignment: got %lld, expected a power of 2", g->file,
                      (long long)alignment);
    const uint64_t mask = (uint64_t)alignment - 1;
    const uint64_t begin = (c->at + mask) & ~mask;
    for (uint64_t i = 0; i < g->n_tensors; i++)
        if (place_tensor(c, &g->tensors[i], begin < g->size ? begin : g->size,
                         (uint64_t)alignment))
            return -1;
    return 0;
}

int gguf_parse(const char *file, const void *bytes, uint64_t size, gguf *out, trouble *t)
{
    *out = (gguf){.file = file, .bytes = bytes, .size = size};
    cursor c = {out, 0, t};
    if (take_all(&c, out) == 0)
        return 0;
    gguf_close(out);
    return -1;
}

int gguf_open(const char *file, gguf *out, trouble *t)
{
    struct stat about;
    const int fd = open(file, O_RDONLY | O_CLOEXEC);
    *out = (gguf){0};
    if (fd < 0 || fstat(fd, &about) || !S_ISREG(about.st_mode) || about.st_size == 0) {
        if (fd >= 0)
            close(fd);
        return refuse(t, "%s: expected a file that can be read and is not empty", file);
    }
    const size_t size = (size_t)about.st_size;
    void *bytes = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (bytes == MAP_FAILED)
        return refuse(t, "%s: its %zu bytes can't be mapped", file, size);
    if (gguf_parse(file, bytes, size, out, t)) {
        munmap(bytes, size);
        return -1;
    }
    out->is_mapped = 1;
    return 0;
}

void gguf_close(gguf *g)
{
    free(g->values);
    free(g->tensors);
    if (g->is_mapped)
        munmap((void *)(uintptr_t)g->bytes, (size_t)g->size);
    *g = (gguf){0};
}

/* ---- looking up ---- */

int gguf_is(gguf_text text, const char *word)
{
    return text.size == strlen(word) && memcmp(text.data, word, text.size) == 0;
}

const gguf_value *gguf_find(const gguf *g, const char *key)
{
    for (uint64_t i = 0; i < g->n_values; i++)
        if (gguf_is(g->values[i].key, key))
            return &g->values[i];
    return NULL;
}

const gguf_tensor *gguf_find_tensor(const gguf *g, const char *name)
{
    for (uint64_t i = 0; i < g->n_tensors; i++)
        if (gguf_is(g->tensors[i].name, name))
            return &g->tensors[i];
    return NULL;
}

/* An integer of any width; past int64: INT64_MAX. */
static int64_t integer_at(const gguf_value *v)
{
    const int bytes = type_bytes[v->type], shift = 64 - 8 * bytes;
    const uint64_t x = little(v->at, bytes);
    if (v->type == GGUF_I8 || v->type == GGUF_I16 || v->type == GGUF_I32 || v->type == GGUF_I64)
        return (int64_t)(x << shift) >> shift;
    return x > INT64_MAX ? INT64_MAX : (int64_t)x;
}

static int is_number(const gguf_value *v)
{
    return !v->is_array && v->type != GGUF_TEXT;
}

int gguf_integer(const gguf *g, const char *key, int64_t least, int64_t most, int64_t fallback,
                 int64_t *out, trouble *t)
{
    const gguf_value *v = gguf_find(g, key);
    *out = fallback;
    if (!v && fallback >= least)
        return 0;
    if (!v)
        return refuse(t, "%s: %s: got nothing, expected an integer", g->file, key);
    if (!is_number(v) || v->type == GGUF_F32 || v->type == GGUF_F64)
        return refuse(t, "%s: %s: got type %d%s, expected an integer", g->file, key, v->type,
                      v->is_array ? " in an array" : "");
    *out = integer_at(v);
    if (*out < least || *out > most)
        return refuse(t, "%s: %s: got %lld, expected %lld to %lld", g->file, key,
                      (long long)*out, (long long)least, (long long)most);
    return 0;
}

int gguf_number(const gguf *g, const char *key, double fallback, double *out, trouble *t)
{
    const gguf_value *v = gguf_find(g, key);
    float narrow;
    *out = fallback;
    if (!v && !isnan(fallback))
        return 0;
    if (!v || !is_number(v))
        return refuse(t, "%s: %s: got %s, expected a number", g->file, key,
                      v ? "a text or an array" : "nothing");
    const uint64_t bits = little(v->at, type_bytes[v->type]);
    const uint32_t low = (uint32_t)bits;
    memcpy(&narrow, &low, 4);
    if (v->type == GGUF_F64)
        memcpy(out, &bits, 8);
    else
        *out = v->type == GGUF_F32 ? (double)narrow : (double)integer_at(v);
    return isfinite(*out)
               ? 0
               : refuse(t, "%s: %s: got %g, expected a finite number", g->file, key, *out);
}

int gguf_array(const gguf *g, const char *key, gguf_type type, uint64_t most,
               const gguf_value **out, trouble *t)
{
    const gguf_value *v = gguf_find(g, key);
    *out = v;
    if (!v || !v->is_array || v->type != type)
        return refuse(t, "%s: %s: got %s, expected an array of type %d", g->file, key,
                      v ? "another type" : "nothing", (int)type);
    if (v->count > most)
        return refuse(t, "%s: %s: got %llu elements, expected at most %llu", g->file, key,
                      (unsigned long long)v->count, (unsigned long long)most);
    return 0;
}

gguf_text gguf_next_text(const uint8_t **at)
{
    const gguf_text text = {(const char *)*at + 8, little(*at, 8)};
    *at += 8 + text.size;
    return text;
}
