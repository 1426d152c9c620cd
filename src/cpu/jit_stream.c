/* Two streams of instructions into one. */
#include "saccade_config.h"

#if HAVE_ZYDIS && HAVE_LEVEL_AMX

#include "cpu/jit_stream.h"

#include "base/status.h"

#include <assert.h>
#include <stdlib.h>

enum { LONGEST = 16 /* bytes of an instruction, and one */ };

saccade_status jit_stream_create(jit_stream *s, jit_memo *memo, saccade_error *err)
{
    *s = (jit_stream){.memo = memo};
    jit_stream_clear(s);
    s->ends = malloc(STREAM_INSTRUCTIONS * (sizeof *s->ends + sizeof *s->notes) + STREAM_BYTES
                     + LONGEST);
    FAIL_IF_NULL(s->ends);
    s->notes = (jit_note *)(void *)(s->ends + STREAM_INSTRUCTIONS);
    s->bytes = (uint8_t *)(s->notes + STREAM_INSTRUCTIONS);
    return SACCADE_OK;
}

void jit_stream_clear(jit_stream *s)
{
    s->n = s->n_runs = s->length = s->total_weight = 0;
    s->size = 0;
    memset(s->events, 0, sizeof s->events);
    s->need = STREAM_NO_EVENT;
}

void jit_stream_destroy(jit_stream *s)
{
    free(s->ends);
}

jit_asm jit_stream_asm(const jit_stream *s)
{
    return (jit_asm){.bytes = s->bytes,
                     .capacity = STREAM_BYTES,
                     .is_wide = 1,
                     .memo = s->memo,
                     .marks = s->ends,
                     .max_marks = STREAM_INSTRUCTIONS};
}

static uint32_t begin_of(const jit_stream *s, uint32_t n)
{
    return n ? s->ends[n - 1] : 0;
}

/* Adds to the run at hand, or begins one. */
static void add_run(jit_stream *s, uint32_t past, uint32_t copies)
{
    jit_run *last = s->n_runs ? &s->runs[s->n_runs - 1] : NULL;
    if (last && last->copies == 1 && copies == 1) {
        last->past = past;
        return;
    }
    assert(s->n_runs < STREAM_RUNS);
    s->runs[s->n_runs++] = (jit_run){s->n, past, copies};
}

/* Notes what a has got since the last call, as so many copies. */
static void hold(jit_stream *s, const jit_asm *a, int weight, uint32_t copies)
{
    const uint32_t n = a->n_marks - s->n;
    if (n == 0)
        return;
    add_run(s, a->n_marks, copies);
    s->size += copies * (a->size - begin_of(s, s->n));
    s->length += copies * n;
    s->total_weight += copies * n * (uint32_t)weight;
    for (; s->n < a->n_marks; s->n++) {
        s->notes[s->n] = (jit_note){.need = (int8_t)s->need, .weight = (uint8_t)weight};
        s->need = STREAM_NO_EVENT;
    }
}

void jit_stream_note(jit_stream *s, const jit_asm *a, int weight)
{
    hold(s, a, weight, 1);
}

static int is_near(int64_t displacement, int64_t mark)
{
    return displacement > mark - MARK_REACH && displacement < mark + MARK_REACH;
}

/* Where an instruction has a marked displacement: it stands last, but for at most one byte. The
 * mark leaves. */
static void find_mark(jit_note *note, uint8_t *begin, size_t size)
{
    for (size_t tail = 0; tail < 2 && size >= 4 + tail; tail++) {
        uint8_t *at = begin + size - 4 - tail;
        int32_t displacement;
        memcpy(&displacement, at, sizeof displacement);
        const int is_number = is_near(displacement, MARK_NUMBER);
        if (!is_number && !is_near(displacement, MARK_VECTOR))
            continue;
        displacement -= is_number ? MARK_NUMBER : MARK_VECTOR;
        memcpy(at, &displacement, sizeof displacement);
        note->step = is_number ? 4 : 64;
        note->at = (uint8_t)(at - begin);
        return;
    }
}

void jit_stream_repeat(jit_stream *s, const jit_asm *a, int weight, uint32_t copies)
{
    uint32_t n = s->n;
    hold(s, a, weight, copies);
    for (; n < s->n; n++)
        find_mark(&s->notes[n], s->bytes + begin_of(s, n), s->ends[n] - begin_of(s, n));
}

void jit_stream_event(jit_stream *s, int event)
{
    s->events[event] = s->length;
}

/* ---- merging ---- */

typedef struct reader {
    const jit_stream *s;
    uint32_t run, copy, at; /* of what comes next */
    uint32_t count;         /* instructions so far */
    uint64_t done;          /* weight so far */
} reader;

static int is_at_end(const reader *r)
{
    return r->run == r->s->n_runs;
}

static int is_ready(const reader *r, const reader *other)
{
    if (is_at_end(r))
        return 0;
    const int need = r->s->notes[r->at].need;
    return need == STREAM_NO_EVENT || other->count >= other->s->events[need];
}

static void advance(reader *r)
{
    const jit_run *run = &r->s->runs[r->run];
    r->count++;
    if (++r->at < run->past)
        return;
    r->at = run->begin;
    if (++r->copy < run->copies)
        return;
    r->at = run->past;
    r->copy = 0;
    r->run++;
}

/* Copies LONGEST bytes, which is faster than just those of the instruction. */
static void take(reader *r, jit_asm *out)
{
    const uint32_t from = begin_of(r->s, r->at), size = r->s->ends[r->at] - from;
    const jit_note *note = &r->s->notes[r->at];
    uint8_t *to = out->bytes + out->size;
    if (out->failed || out->capacity - out->size < LONGEST) {
        out->failed = 1;
        return;
    }
    memcpy(to, r->s->bytes + from, LONGEST);
    if (note->step) {
        uint32_t displacement;
        memcpy(&displacement, r->s->bytes + from + note->at, sizeof displacement);
        displacement += r->copy * note->step;
        memcpy(to + note->at, &displacement, sizeof displacement);
    }
    out->size += size;
    r->done += note->weight;
    advance(r);
}

void jit_stream_merge(const jit_stream *x, const jit_stream *y, int is_plain, jit_asm *out)
{
    reader a = {.s = x}, b = {.s = y};
    while (!out->failed && !(is_at_end(&a) && is_at_end(&b))) {
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
