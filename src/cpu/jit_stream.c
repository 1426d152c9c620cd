/* Two streams of instructions into one. */
#include "saccade_config.h"

#if HAVE_ZYDIS && HAVE_LEVEL_AMX

#include "cpu/jit_stream.h"

#include "base/status.h"

#include <stdlib.h>

saccade_status jit_stream_create(jit_stream *s, size_t capacity, saccade_error *err)
{
    memset(s, 0, sizeof *s);
    jit_stream_clear(s);
    s->bytes = malloc(capacity);
    s->ends = malloc(STREAM_INSTRUCTIONS * sizeof *s->ends);
    s->needs = malloc(STREAM_INSTRUCTIONS);
    s->weight = malloc(STREAM_INSTRUCTIONS);
    FAIL_IF(!s->bytes || !s->ends || !s->needs || !s->weight, SACCADE_ENOMEM, "out of memory");
    return SACCADE_OK;
}

void jit_stream_clear(jit_stream *s)
{
    s->n = s->total_weight = 0;
    memset(s->events, 0, sizeof s->events);
    s->need = STREAM_NO_EVENT;
}

void jit_stream_destroy(jit_stream *s)
{
    free(s->bytes);
    free(s->ends);
    free(s->needs);
    free(s->weight);
}

void jit_stream_note(jit_stream *s, const jit_asm *a, int weight)
{
    for (; s->n < a->n_marks; s->n++) {
        s->ends[s->n] = a->marks[s->n];
        s->needs[s->n] = (int8_t)s->need;
        s->weight[s->n] = (uint8_t)weight;
        s->total_weight += (uint32_t)weight;
        s->need = STREAM_NO_EVENT;
    }
}

void jit_stream_event(jit_stream *s, int event)
{
    s->events[event] = s->n;
}

/* ---- merging ---- */

typedef struct reader {
    const jit_stream *s;
    uint32_t at;
    uint64_t done; /* weight so far */
} reader;

static int is_ready(const reader *r, const reader *other)
{
    if (r->at == r->s->n)
        return 0;
    const int need = r->s->needs[r->at];
    return need == STREAM_NO_EVENT || other->at >= other->s->events[need];
}

static void take(reader *r, jit_asm *out)
{
    const uint32_t from = r->at ? r->s->ends[r->at - 1] : 0, size = r->s->ends[r->at] - from;
    if (out->failed || out->capacity - out->size < size) {
        out->failed = 1;
    } else {
        memcpy(out->bytes + out->size, r->s->bytes + from, size);
        out->size += size;
    }
    r->done += r->s->weight[r->at++];
}

void jit_stream_merge(const jit_stream *x, const jit_stream *y, int is_plain, jit_asm *out)
{
    reader a = {.s = x}, b = {.s = y};
    while (!out->failed && (a.at < x->n || b.at < y->n)) {
        const int a_ready = is_ready(&a, &b), b_ready = is_ready(&b, &a);
        const int a_first = is_plain || a.done * y->total_weight <= b.done * x->total_weight;
        if (!a_ready && !b_ready)
            out->failed = 1; /* each waits for the other */
        else if (a_ready && (a_first || !b_ready))
            take(&a, out);
        else
            take(&b, out);
    }
}

#endif
