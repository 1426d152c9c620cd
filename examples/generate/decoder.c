/* decoder.c: the layers of a LLaMA-shaped decoder. GGUF's order of a head's elements is such
 * that rotary positions turn neighbouring pairs. q, k and v are one product, as are gate and
 * up: their weights lie one behind the other. */
#include "decoder.h"

#include "blas.h"
#include "kv_store.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct layer {
    float *norm, *qkv, *out, *ffn_norm, *gate_up, *down;
} layer;

struct decoder {
    decoder_shape shape;
    layer *layers;
    float *embedding, *norm, *head; /* head: the embedding where the file has no other */
    float *turns;                   /* [context][rope_dim / 2] of cosine and sine */
    float *x, *y, *qkv, *heads, *hidden;
    kv_store *store;
    int64_t length;
};

/* ---- reading ---- */

static int read_shape(const gguf *g, int64_t context, decoder_shape *s, trouble *t)
{
    const gguf_value *architecture = gguf_find(g, "general.architecture");
    const gguf_value *scaling = gguf_find(g, "llama.rope.scaling.type");
    const gguf_tensor *tokens = gguf_find_tensor(g, "token_embd.weight");
    const uint8_t *at;
    if (!architecture || architecture->is_array || architecture->type != GGUF_TEXT
        || !gguf_is(gguf_next_text((at = architecture->at, &at)), "llama"))
        return refuse(t, "%s: general.architecture: expected \"llama\"", g->file);
    if (scaling
        && (scaling->is_array || scaling->type != GGUF_TEXT
            || !gguf_is(gguf_next_text((at = scaling->at, &at)), "none")))
        return refuse(t, "%s: llama.rope.scaling.type: expected none", g->file);
    if (!tokens)
        return refuse(t, "%s: tensor token_embd.weight: got nothing, expected it", g->file);
    s->vocab = tokens->shape[1];
    if (gguf_integer(g, "llama.block_count", 1, 1024, 0, &s->layers, t)
        || gguf_integer(g, "llama.embedding_length", 1, 1 << 16, 0, &s->width, t)
        || gguf_integer(g, "llama.feed_forward_length", 1, 1 << 18, 0, &s->hidden, t)
        || gguf_integer(g, "llama.attention.head_count", 1, 1024, 0, &s->heads, t)
        || gguf_integer(g, "llama.attention.head_count_kv", 1, s->heads, s->heads, &s->kv_heads,
                        t)
        || gguf_integer(g, "llama.context_length", 1, 1 << 20, 0, &s->context, t)
        || gguf_integer(g, "llama.attention.key_length", 2, 256, s->width / s->heads,
                        &s->head_dim, t)
        || gguf_integer(g, "llama.rope.dimension_count", 2, s->head_dim, s->head_dim,
                        &s->rope_dim, t)
        || gguf_number(g, "llama.rope.freq_base", 10000, &s->rope_base, t)
        || gguf_number(g, "llama.attention.layer_norm_rms_epsilon", NAN, &s->epsilon, t))
        return -1;
    if (s->heads % s->kv_heads || s->rope_dim % 2 || s->head_dim > 256)
        return refuse(t,
                      "%s: got %lld heads over %lld, dim %lld, %lld of it rotated, expected "
                      "heads that divide, an even number and a dim up to 256",
                      g->file, (long long)s->heads, (long long)s->kv_heads,
                      (long long)s->head_dim, (long long)s->rope_dim);
    if (s->rope_base <= 0 || s->epsilon < 0)
        return refuse(t, "%s: got base %g and epsilon %g, expected them positive", g->file,
                      s->rope_base, s->epsilon);
    if (context > s->context)
        return refuse(t, "%s: llama.context_length: got %lld, expected the %lld asked for",
                      g->file, (long long)s->context, (long long)context);
    s->context = context ? context : s->context;
    return 0;
}

typedef struct reader {
    const gguf *g;
    int64_t read;
    decoder_progress *progress;
    trouble *t;
} reader;

/* rows [columns] each; rank 1 where rows is 1. */
static int read_into(reader *r, const char *name, int64_t rows, int64_t columns, float *out)
{
    const gguf_tensor *x = gguf_find_tensor(r->g, name);
    if (!x)
        return refuse(r->t, "%s: tensor %s: got nothing, expected [%lld, %lld]", r->g->file,
                      name, (long long)rows, (long long)columns);
    if (x->shape[0] != columns || x->elements != rows * columns || x->shape[1] != rows)
        return refuse(r->t, "%s: tensor %s: got [%lld, %lld, %lld], expected [%lld, %lld]",
                      r->g->file, name, (long long)x->shape[2], (long long)x->shape[1],
                      (long long)x->shape[0], (long long)rows, (long long)columns);
    gguf_to_f32(x, 0, x->elements, out);
    r->read++;
    if (r->progress)
        r->progress(r->read, (int64_t)r->g->n_tensors);
    return 0;
}

static float *room_for(reader *r, int64_t rows, int64_t columns)
{
    float *room = malloc((size_t)(rows * columns) * sizeof *room);
    if (!room)
        refuse(r->t, "%s: no memory for weights of %lld x %lld", r->g->file, (long long)rows,
               (long long)columns);
    return room;
}

static int read_one(reader *r, const char *name, int64_t rows, int64_t columns, float **out)
{
    *out = room_for(r, rows, columns);
    return *out ? read_into(r, name, rows, columns, *out) : -1;
}

static int read_part(reader *r, int64_t n, const char *part, int64_t rows, int64_t columns,
                     float *out)
{
    char name[64];
    snprintf(name, sizeof name, "blk.%lld.%s.weight", (long long)n, part);
    return read_into(r, name, rows, columns, out);
}

static int read_layer(reader *r, int64_t n, const decoder_shape *s, layer *out)
{
    const int64_t all = s->heads * s->head_dim, kv = s->kv_heads * s->head_dim, w = s->width;
    out->norm = room_for(r, 1, w);
    out->ffn_norm = room_for(r, 1, w);
    out->qkv = room_for(r, all + 2 * kv, w);
    out->out = room_for(r, w, all);
    out->gate_up = room_for(r, 2 * s->hidden, w);
    out->down = room_for(r, w, s->hidden);
    if (!out->norm || !out->ffn_norm || !out->qkv || !out->out || !out->gate_up || !out->down)
        return -1;
    return read_part(r, n, "attn_norm", 1, w, out->norm)
           || read_part(r, n, "attn_q", all, w, out->qkv)
           || read_part(r, n, "attn_k", kv, w, out->qkv + all * w)
           || read_part(r, n, "attn_v", kv, w, out->qkv + (all + kv) * w)
           || read_part(r, n, "attn_output", w, all, out->out)
           || read_part(r, n, "ffn_norm", 1, w, out->ffn_norm)
           || read_part(r, n, "ffn_gate", s->hidden, w, out->gate_up)
           || read_part(r, n, "ffn_up", s->hidden, w, out->gate_up + s->hidden * w)
           || read_part(r, n, "ffn_down", w, s->hidden, out->down);
}

static int read_weights(decoder *d, const gguf *g, decoder_progress *progress, trouble *t)
{
    const decoder_shape *s = &d->shape;
    reader r = {g, 0, progress, t};
    d->layers = calloc((size_t)s->layers, sizeof *d->layers);
    if (!d->layers)
        return refuse(t, "%s: no memory for its layers", g->file);
    if (read_one(&r, "token_embd.weight", s->vocab, s->width, &d->embedding)
        || read_one(&r, "output_norm.weight", 1, s->width, &d->norm))
        return -1;
    for (int64_t i = 0; i < s->layers; i++)
        if (read_layer(&r, i, s, &d->layers[i]))
            return -1;
    d->head = d->embedding;
    if (gguf_find_tensor(g, "output.weight")
        && read_one(&r, "output.weight", s->vocab, s->width, &d->head))
        return -1;
    if (r.read != (int64_t)g->n_tensors)
        return refuse(t, "%s: got %llu tensors, expected the %lld of this shape", g->file,
                      (unsigned long long)g->n_tensors, (long long)r.read);
    return 0;
}

/* ---- making ---- */

/* Rounded as f32 code has it: frequencies and angles in f32. */
static void make_turns(decoder *d)
{
    const int64_t half = d->shape.rope_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const double power = (double)(2 * i) / (double)d->shape.rope_dim;
        const float frequency = 1.0f / powf((float)d->shape.rope_base, (float)power);
        for (int64_t at = 0; at < d->shape.context; at++) {
            float *turn = d->turns + 2 * (at * half + i);
            turn[0] = cosf((float)at * frequency);
            turn[1] = sinf((float)at * frequency);
        }
    }
}

static int make_rooms(decoder *d, const decoder_options *o, trouble *t)
{
    const decoder_shape *s = &d->shape;
    const size_t n = DECODER_CHUNK * sizeof(float);
    const size_t heads = (size_t)(s->heads * s->head_dim),
                 kv = (size_t)(s->kv_heads * s->head_dim);
    d->x = malloc(n * (size_t)s->width);
    d->y = malloc(n * (size_t)s->width);
    d->qkv = malloc(n * (heads + 2 * kv));
    d->heads = malloc(n * heads);
    d->hidden = malloc(n * 2 * (size_t)s->hidden);
    d->turns = malloc((size_t)(s->context * s->rope_dim) * sizeof *d->turns);
    if (!d->x || !d->y || !d->qkv || !d->heads || !d->hidden || !d->turns)
        return refuse(t, "no memory for the activations");
    make_turns(d);
    const kv_store_form form = {s->layers,  s->heads, s->kv_heads, s->head_dim,
                                s->context, o->cache, o->group,    o->page};
    return kv_store_make(&form, DECODER_CHUNK, o->threads, &d->store, t);
}

int decoder_make(const gguf *g, const decoder_options *o, decoder **out, trouble *t)
{
    decoder *d = calloc(1, sizeof *d);
    *out = NULL;
    if (!d)
        return refuse(t, "no memory for a decoder");
    if (read_shape(g, o->context, &d->shape, t) || read_weights(d, g, o->progress, t)
        || make_rooms(d, o, t)) {
        decoder_free(d);
        return -1;
    }
    *out = d;
    return 0;
}

void decoder_free(decoder *d)
{
    if (!d)
        return;
    for (int64_t i = 0; d->layers && i < d->shape.layers; i++) {
        const layer *l = &d->layers[i];
        float *parts[] = {l->norm, l->qkv, l->out, l->ffn_norm, l->gate_up, l->down};
        for (size_t k = 0; k < sizeof parts / sizeof *parts; k++)
            free(parts[k]);
    }
    if (d->head != d->embedding)
        free(d->head);
    float *rooms[] = {d->embedding, d->norm, d->turns, d->x, d->y, d->qkv, d->heads, d->hidden};
    for (size_t k = 0; k < sizeof rooms / sizeof *rooms; k++)
        free(rooms[k]);
    free(d->layers);
    kv_store_free(d->store);
    free(d);
}

const decoder_shape *decoder_shape_of(const decoder *d)
{
    return &d->shape;
}

int64_t decoder_length(const decoder *d)
{
    return d->length;
}

double decoder_attention_seconds(const decoder *d)
{
    return kv_store_seconds(d->store);
}

const char *decoder_explain(decoder *d, trouble *t)
{
    return kv_store_explain(d->store, t);
}

/* ---- running ---- */

static void normalise(const float *x, const float *weight, int64_t n, int64_t width,
                      double epsilon, float *out)
{
    for (int64_t r = 0; r < n; r++, x += width, out += width) {
        double squares = 0;
        for (int64_t i = 0; i < width; i++)
            squares += (double)x[i] * (double)x[i];
        const float scale = (float)(1 / sqrt(squares / (double)width + epsilon));
        for (int64_t i = 0; i < width; i++)
            out[i] = x[i] * scale * weight[i];
    }
}

/* Rotary positions (RoFormer, arXiv 2104.09864) of queries and keys, which lie side by side. */
static void rotate(const decoder *d, float *rows, int64_t n)
{
    const decoder_shape *s = &d->shape;
    const int64_t heads = s->heads + s->kv_heads, row = (heads + s->kv_heads) * s->head_dim;
    for (int64_t r = 0; r < n; r++) {
        const float *turns = d->turns + (d->length + r) * s->rope_dim;
        for (int64_t h = 0; h < heads; h++) {
            float *x = rows + r * row + h * s->head_dim;
            for (int64_t i = 0; i < s->rope_dim; i += 2) {
                const float a = x[i], b = x[i + 1], cosine = turns[i], sine = turns[i + 1];
                x[i] = a * cosine - b * sine;
                x[i + 1] = a * sine + b * cosine;
            }
        }
    }
}

/* SwiGLU (arXiv 2002.05202): gate / (1 + exp(-gate)) * up, rows of both to rows of one. */
static void gated(const float *both, int64_t n, int64_t hidden, float *out)
{
    for (int64_t r = 0; r < n; r++, both += 2 * hidden, out += hidden)
        for (int64_t i = 0; i < hidden; i++)
            out[i] = both[i] / (1 + expf(-both[i])) * both[hidden + i];
}

static int run_layer(decoder *d, int64_t n, int64_t at, trouble *t)
{
    const decoder_shape *s = &d->shape;
    const layer *l = &d->layers[at];
    const int64_t heads = s->heads * s->head_dim, kv = s->kv_heads * s->head_dim;
    normalise(d->x, l->norm, n, s->width, s->epsilon, d->y);
    blas_rows_times(d->y, n, l->qkv, heads + 2 * kv, s->width, 0, d->qkv);
    rotate(d, d->qkv, n);
    if (kv_store_attend(d->store, at, d->qkv, d->length, n, d->heads, t))
        return -1;
    blas_rows_times(d->heads, n, l->out, s->width, heads, 1, d->x);
    normalise(d->x, l->ffn_norm, n, s->width, s->epsilon, d->y);
    blas_rows_times(d->y, n, l->gate_up, 2 * s->hidden, s->width, 0, d->hidden);
    gated(d->hidden, n, s->hidden, d->hidden);
    blas_rows_times(d->hidden, n, l->down, s->width, s->hidden, 1, d->x);
    return 0;
}

int decoder_run(decoder *d, const int32_t *tokens, int64_t n, int all, float *logits,
                trouble *t)
{
    const decoder_shape *s = &d->shape;
    if (n < 1 || n > DECODER_CHUNK || n > s->context - d->length)
        return refuse(t,
                      "got %lld tokens after %lld, expected 1 to %d within a context of %lld",
                      (long long)n, (long long)d->length, DECODER_CHUNK, (long long)s->context);
    for (int64_t i = 0; i < n; i++) {
        if (tokens[i] < 0 || tokens[i] >= s->vocab)
            return refuse(t, "got token %d, expected 0 to %lld", tokens[i],
                          (long long)s->vocab - 1);
        memcpy(d->x + i * s->width, d->embedding + tokens[i] * s->width,
               (size_t)s->width * sizeof *d->x);
    }
    for (int64_t i = 0; i < s->layers; i++)
        if (run_layer(d, n, i, t))
            return -1;
    d->length += n;
    if (!logits)
        return 0;
    const int64_t first = all ? 0 : n - 1;
    normalise(d->x + first * s->width, d->norm, n - first, s->width, s->epsilon, d->y);
    blas_rows_times(d->y, n - first, d->head, s->vocab, s->width, 0, logits);
    return 0;
}
