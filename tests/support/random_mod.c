/* Random expressions by type: each generator picks a form whose operands it generates in turn,
   until the depth is used up. Captures are a fixed set, so that texts and values fit. */
#include "support/random_mod.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- random numbers ---- */

uint64_t random_mod_bits(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

uint32_t random_mod_below(uint64_t *state, uint32_t n)
{
    return (uint32_t)((random_mod_bits(state) >> 32) * n >> 32);
}

/* ---- the captures ---- */

enum dim { ALONG_B, ALONG_H, ALONG_Q, ALONG_KV, ALONG_8 };

static const struct {
    const char *name;
    saccade_dtype dtype;
    int32_t rank;
    enum dim dims[3];
} captures[RANDOM_MOD_CAPTURES] = {
    {"W", SACCADE_I32, 0, {0}},
    {"slope", SACCADE_F32, 0, {0}},
    {"flag", SACCADE_BOOL, 0, {0}},
    {"doc", SACCADE_I32, 1, {ALONG_KV}},
    {"start", SACCADE_I64, 2, {ALONG_B, ALONG_Q}},
    {"gain", SACCADE_F32, 1, {ALONG_H}},
    {"bias", SACCADE_F16, 3, {ALONG_H, ALONG_Q, ALONG_KV}},
    {"keep", SACCADE_BOOL, 2, {ALONG_B, ALONG_KV}},
    {"table", SACCADE_U8, 1, {ALONG_8}},
};

static int64_t dim_size(enum dim dim, const saccade_sizes *s)
{
    switch (dim) {
    case ALONG_B:
        return s->B;
    case ALONG_H:
        return s->H;
    case ALONG_Q:
        return s->Q;
    case ALONG_KV:
        return s->KV;
    default:
        return 8;
    }
}

/* ---- text ---- */

typedef struct writer {
    uint64_t state;
    char *text;
    size_t size, length;
    int flags;
    saccade_kind kind;
    int n_ints, n_bools; /* locals declared so far: i0.. and c0.. */
} writer;

static void put(writer *w, const char *text)
{
    const size_t n = strlen(text);
    if (w->length + n < w->size)
        memcpy(w->text + w->length, text, n + 1);
    w->length += n;
}

static uint32_t pick(writer *w, uint32_t n)
{
    return random_mod_below(&w->state, n);
}

static const char *one_of(writer *w, const char *const *list, uint32_t n)
{
    return list[pick(w, n)];
}
#define ONE_OF(w, ...)                            \
    one_of(w, (const char *const[]){__VA_ARGS__}, \
           sizeof((const char *const[]){__VA_ARGS__}) / sizeof(const char *))

static void put_bool(writer *w, int depth);
static void put_int(writer *w, int depth);
static void put_float(writer *w, int depth);

typedef void put_fn(writer *w, int depth);

static void put_binary(writer *w, put_fn *operand, const char *op, int depth)
{
    put(w, "(");
    operand(w, depth - 1);
    put(w, op);
    operand(w, depth - 1);
    put(w, ")");
}

static void put_call(writer *w, const char *name, put_fn *operand, int n, int depth)
{
    put(w, name);
    put(w, "(");
    for (int i = 0; i < n; i++) {
        put(w, i > 0 ? ", " : "");
        operand(w, depth - 1);
    }
    put(w, ")");
}

static void put_choice(writer *w, put_fn *operand, int depth)
{
    put(w, "(");
    put_bool(w, depth - 1);
    put(w, " ? ");
    operand(w, depth - 1);
    put(w, " : ");
    operand(w, depth - 1);
    put(w, ")");
}

/* an index: the natural variable, sometimes any int at all, then clamped when it must be. */
static void put_index(writer *w, enum dim dim, int depth)
{
    static const char *const vars[] = {"b", "h", "q", "kv", "(kv & 7)"};
    static const char *const sizes[] = {"B", "H", "Q", "KV", "8"};
    if (depth <= 0 || pick(w, 3) > 0) {
        put(w, vars[dim]);
    } else if (w->flags & RANDOM_MOD_IN_RANGE) {
        put(w, "clamp(");
        put_int(w, depth - 1);
        put(w, ", 0, ");
        put(w, sizes[dim]);
        put(w, " - 1)");
    } else {
        put_int(w, depth - 1);
    }
}

static void put_load(writer *w, int capture, int depth)
{
    put(w, captures[capture].name);
    for (int i = 0; i < captures[capture].rank; i++) {
        put(w, i > 0 ? ", " : "[");
        put_index(w, captures[capture].dims[i], depth);
    }
    put(w, captures[capture].rank > 0 ? "]" : "");
}

static void put_int_leaf(writer *w, int depth)
{
    char text[24];
    switch (pick(w, 9)) {
    case 0:
        put(w, ONE_OF(w, "B", "H", "Hkv", "Q", "KV"));
        break;
    case 1:
        put_load(w, (int)pick(w, 2) ? 0 : 8, depth);
        break;
    case 2:
        put_load(w, (int)pick(w, 2) ? 3 : 4, depth);
        break;
    case 3:
        snprintf(text, sizeof text, "%d", (int)pick(w, 40) - 4);
        put(w, text);
        break;
    case 4:
        if (w->n_ints > 0) {
            snprintf(text, sizeof text, "i%u", pick(w, (uint32_t)w->n_ints));
            put(w, text);
            break;
        }
        put(w, "KV");
        break;
    case 5:
        put(w, ONE_OF(w, "b", "h"));
        break;
    default:
        put(w, ONE_OF(w, "q", "kv", "kv", "q"));
        break;
    }
}

static void put_int(writer *w, int depth)
{
    if (depth <= 0) {
        put_int_leaf(w, depth);
        return;
    }
    switch (pick(w, 12)) {
    case 0:
    case 1:
        put_binary(w, put_int, ONE_OF(w, " + ", " - "), depth);
        break;
    case 2:
        put_binary(w, put_int, ONE_OF(w, " * ", " / ", " % "), depth);
        break;
    case 3:
        put_binary(w, put_int, ONE_OF(w, " & ", " | ", " ^ "), depth);
        break;
    case 4:
        put_binary(w, put_int, ONE_OF(w, " << ", " >> "), depth);
        break;
    case 5:
        put_call(w, ONE_OF(w, "min", "max", "floordiv", "floormod"), put_int, 2, depth);
        break;
    case 6:
        put_call(w, ONE_OF(w, "abs", "-", "~"), put_int, 1, depth);
        break;
    case 7:
        put_call(w, "int", pick(w, 2) ? put_bool : put_float, 1, depth);
        break;
    case 8:
        put_choice(w, put_int, depth);
        break;
    case 9:
        put_call(w, "clamp", put_int, 3, depth);
        break;
    default:
        put_int_leaf(w, depth);
        break;
    }
}

static void put_float_leaf(writer *w, int depth)
{
    char text[32];
    switch (pick(w, 5)) {
    case 0:
        put_load(w, 1, depth);
        break;
    case 1:
        put_load(w, 5, depth);
        break;
    case 2:
        put_load(w, 6, depth);
        break;
    case 3:
        snprintf(text, sizeof text, "%d.%u", (int)pick(w, 8) - 4, pick(w, 100));
        put(w, text);
        break;
    default:
        put(w, w->kind == SACCADE_SCORE ? "score" : "float(q - kv)");
        break;
    }
}

static void put_nonfinite_float(writer *w, int depth)
{
    switch (pick(w, 4)) {
    case 0:
        put_binary(w, put_float, " / ", depth);
        break;
    case 1:
        put_call(w, ONE_OF(w, "sqrt", "rsqrt", "exp", "exp2", "log", "log2", "tan"), put_float,
                 1, depth);
        break;
    case 2:
        put_call(w, "pow", put_float, 2, depth);
        break;
    default:
        put_call(w, ONE_OF(w, "floor", "ceil", "round", "trunc"), put_float, 1, depth);
    }
}

static void put_float(writer *w, int depth)
{
    if (depth <= 0) {
        put_float_leaf(w, depth);
        return;
    }
    switch (pick(w, w->flags & RANDOM_MOD_TAME ? 8 : 11)) {
    case 0:
    case 1:
        put_binary(w, put_float, ONE_OF(w, " + ", " - "), depth);
        break;
    case 2:
        put_binary(w, put_float, " * ", depth);
        break;
    case 3:
        put_call(w, ONE_OF(w, "min", "max"), put_float, 2, depth);
        break;
    case 4:
        put_call(w, ONE_OF(w, "abs", "-", "sin", "cos", "tanh", "sigmoid", "erf"), put_float, 1,
                 depth);
        break;
    case 5:
        put_choice(w, put_float, depth);
        break;
    case 6:
        put_float_leaf(w, depth);
        break;
    case 7:
        put_call(w, "float", put_int, 1, depth);
        break;
    default:
        put_nonfinite_float(w, depth);
        break;
    }
}

static void put_bool(writer *w, int depth)
{
    static const char *const orders[] = {" < ", " <= ", " > ", " >= ", " == ", " != "};
    if (depth <= 0) {
        switch (pick(w, 6)) {
        case 0:
            put(w, w->n_bools > 0 ? "c0" : "flag");
            break;
        case 1:
            put_load(w, 7, depth);
            break;
        case 2:
            put(w, "(doc[clamp(q, 0, KV - 1)] == doc[kv])");
            break;
        default:
            put(w, ONE_OF(w, "(q >= kv)", "(kv < W)", "(q - kv <= W)", "true", "(q != kv)"));
        }
        return;
    }
    switch (pick(w, 10)) {
    case 0:
    case 1:
    case 2:
        put_binary(w, put_bool, ONE_OF(w, " && ", " || "), depth);
        break;
    case 3:
        put_call(w, "!", put_bool, 1, depth);
        break;
    case 4:
        put_binary(w, put_bool, ONE_OF(w, " == ", " != "), depth);
        break;
    case 5:
        put_choice(w, put_bool, depth);
        break;
    case 6:
        /* what hangs on the score may differ in the last bits, so a choice by it is not tame */
        if (w->kind == SACCADE_MASK || !(w->flags & RANDOM_MOD_TAME)) {
            put_binary(w, put_float, one_of(w, orders, 6), depth);
            break;
        } /* fall through */
    default:
        put_binary(w, put_int, one_of(w, orders, 6), depth);
        break;
    }
}

static void put_locals(writer *w, int depth)
{
    if (pick(w, 3) == 0) {
        put(w, "i0 = ");
        put_int(w, depth - 1);
        put(w, ";\n");
        w->n_ints = 1;
    }
    if (pick(w, 3) == 0) {
        put(w, "c0 = ");
        put_bool(w, depth - 1);
        put(w, ";\n");
        w->n_bools = 1;
    }
    if (!(w->flags & RANDOM_MOD_IN_RANGE) && pick(w, 6) == 0)
        put(w, "q = q + W; kv = kv - 2;\n");
}

size_t random_mod_text(uint64_t seed, saccade_kind kind, int flags, int depth, char *text,
                       size_t size)
{
    writer w = {.state = seed, .text = text, .size = size, .flags = flags, .kind = kind};
    text[0] = '\0';
    put_locals(&w, depth);
    if (kind == SACCADE_MASK) {
        put_bool(&w, depth);
    } else if (flags & RANDOM_MOD_TAME) {
        /* int(float) and wrapped ints are large: squeezed before they meet the score */
        put(&w, ONE_OF(&w, "score * 0.5 + ", "score + ", "2.0 * tanh(score / 2.0) - "));
        put_call(&w, ONE_OF(&w, "4.0 * tanh", "sigmoid", "3.0 * sin"), put_float, 1, depth);
    } else {
        put_float(&w, depth);
    }
    put(&w, "\n");
    return w.length < size ? w.length : size - 1;
}

/* ---- values ---- */

static uint16_t small_half(uint64_t *state)
{
    /* sign, exponent of 1/8 to 2, any mantissa */
    const uint32_t bits = random_mod_below(state, 1u << 16);
    return (uint16_t)((bits & 0x83ffu) | (12u + random_mod_below(state, 4)) << 10);
}

static void fill(uint64_t *state, int capture, void *data, int64_t n)
{
    int32_t document = 0;
    for (int64_t i = 0; i < n; i++) {
        document += random_mod_below(state, 8) == 0;
        switch (captures[capture].dtype) {
        case SACCADE_I32:
            ((int32_t *)data)[i] = document;
            if (captures[capture].rank == 0)
                ((int32_t *)data)[i] = 1 + (int32_t)random_mod_below(state, 9);
            break;
        case SACCADE_I64:
            ((int64_t *)data)[i] = (int64_t)random_mod_below(state, 30) - 5;
            break;
        case SACCADE_U8:
            ((uint8_t *)data)[i] = (uint8_t)random_mod_below(state, 12);
            break;
        case SACCADE_BOOL:
            ((uint8_t *)data)[i] = random_mod_below(state, 4) != 0;
            break;
        case SACCADE_F16:
            ((uint16_t *)data)[i] = small_half(state);
            break;
        default:
            ((float *)data)[i] = (float)random_mod_below(state, 4096) / 2048.0f - 1.0f;
        }
    }
}

static void fail(const random_mod *r, uint64_t seed, const saccade_error *err)
{
    fprintf(stderr, "random mod of seed %llu does not compile: %d:%d: %s\n%s\n",
            (unsigned long long)seed, err->line, err->column, err->message, r->text);
    abort();
}

static int find_capture(const char *name)
{
    int i = 0;
    while (strcmp(captures[i].name, name) != 0)
        i++;
    return i;
}

saccade_dtype random_mod_dtype(const char *name)
{
    return captures[find_capture(name)].dtype;
}

static void bind_value(random_mod *r, uint64_t *state, int capture, const saccade_sizes *sizes)
{
    int64_t shape[SACCADE_MAX_RANK] = {0}, n = 1;
    const saccade_dtype dtype = captures[capture].dtype;
    for (int d = 0; d < captures[capture].rank; d++) {
        shape[d] = dim_size(captures[capture].dims[d], sizes);
        n *= shape[d];
    }
    void *data = calloc((size_t)n, saccade_dtype_bytes(dtype));
    if (data == NULL)
        abort();
    fill(state, capture, data, n);
    r->memory[r->n_bindings] = data;
    r->bindings[r->n_bindings++] = (saccade_binding){
        captures[capture].name, saccade_tensor_of(data, dtype, captures[capture].rank, shape)};
}

void random_mod_make(uint64_t seed, saccade_kind kind, int flags, int depth,
                     const saccade_sizes *sizes, random_mod *out)
{
    saccade_error err = {0};
    saccade_capture used[RANDOM_MOD_CAPTURES];
    saccade_mod *generic;
    uint64_t state = seed ^ 0x5851f42d4c957f2du;
    memset(out, 0, sizeof *out);
    const size_t n = random_mod_text(seed, kind, flags, depth, out->text, sizeof out->text);
    if (saccade_mod_parse(kind, out->text, n, &generic, &err) != SACCADE_OK)
        fail(out, seed, &err);
    for (int32_t i = 0; i < saccade_mod_capture_count(generic); i++) {
        used[i] = saccade_mod_capture(generic, i);
        const int capture = find_capture(used[i].name);
        used[i].dtype = captures[capture].dtype;
        bind_value(out, &state, capture, sizes);
    }
    if (saccade_mod_bind(generic, used, out->n_bindings, &out->mod, &err) != SACCADE_OK)
        fail(out, seed, &err);
    saccade_mod_destroy(generic);
}

void random_mod_free(random_mod *r)
{
    for (int32_t i = 0; i < r->n_bindings; i++)
        free(r->memory[i]);
    saccade_mod_destroy(r->mod);
    memset(r, 0, sizeof *r);
}
