/* Merges two streams of instructions into one. */
#include "saccade_config.h"

#if HAVE_ZYDIS && HAVE_LEVEL_AMX

#include "cpu/flow/flow_merge.h"

#include "base/status.h"

#include <stdlib.h>

/* Takes one large piece of memory. Little of it is ever touched, so little becomes resident. */
saccade_status flow_stream_create(flow_stream *s, jit_memo *memo, saccade_error *err)
{
    enum { EACH = sizeof *s->runs + sizeof *s->patches + sizeof *s->ends };
    *s = (flow_stream){.memo = memo};
    flow_stream_clear(s);
    s->runs = malloc((size_t)STREAM_INSTRUCTIONS * EACH + STREAM_BYTES);
    FAIL_IF_NULL(s->runs);
    s->patches = (jit_patch *)(s->runs + STREAM_INSTRUCTIONS);
    s->ends = (uint32_t *)(s->patches + STREAM_INSTRUCTIONS);
    s->bytes = (uint8_t *)(s->ends + STREAM_INSTRUCTIONS);
    return SACCADE_OK;
}

void flow_stream_clear(flow_stream *s)
{
    s->n = s->n_patches = s->n_runs = s->length = s->total_weight = 0;
    s->size = 0;
    memset(s->events, 0, sizeof s->events);
    s->need = STREAM_NO_EVENT;
    s->is_cut = 0;
}

void flow_stream_destroy(flow_stream *s)
{
    free(s->runs);
}

jit_asm flow_stream_asm(const flow_stream *s)
{
    return (jit_asm){.bytes = s->bytes,
                     .capacity = STREAM_BYTES,
                     .is_wide = 1,
                     .memo = s->memo,
                     .ends = s->ends,
                     .patches = s->patches,
                     .max_n = STREAM_INSTRUCTIONS};
}

static uint32_t begin_of(const flow_stream *s, uint32_t n)
{
    return n ? s->ends[n - 1] : 0;
}

/* Adds a run of instructions. Runs end where events are noted, so no event lies inside of
 * one. */
static void add_run(flow_stream *s, flow_repeat run)
{
    flow_repeat *last = s->n_runs ? &s->runs[s->n_runs - 1] : NULL;
    const uint32_t n = run.copies * (run.past - run.begin);
    run.need = (int8_t)s->need;
    s->need = STREAM_NO_EVENT;
    s->length += n;
    s->total_weight += n * run.weight;
    s->size += run.copies * (size_t)(begin_of(s, run.past) - begin_of(s, run.begin));
    if (last && !s->is_cut && run.need == STREAM_NO_EVENT && last->weight == run.weight
        && last->copies == 1 && run.copies == 1)
        last->past = run.past;
    else if (s->n_runs < STREAM_INSTRUCTIONS)
        s->runs[s->n_runs++] = run;
    s->is_cut = 0;
}

static flow_repeat next_run(flow_stream *s, const jit_asm *a, int weight, uint32_t copies)
{
    const flow_repeat run = {.begin = s->n,
                             .past = a->n,
                             .copies = copies,
                             .patch = s->n_patches,
                             .weight = (uint8_t)weight};
    s->n = a->n;
    s->n_patches = a->n_patches;
    return run;
}

void flow_stream_note(flow_stream *s, const jit_asm *a, int weight)
{
    if (a->n > s->n)
        add_run(s, next_run(s, a, weight, 1));
}

uint32_t flow_stream_repeat(flow_stream *s, const jit_asm *a, int weight, uint32_t copies,
                            const int32_t add[MARKS])
{
    flow_repeat run = next_run(s, a, weight, copies);
    memcpy(run.add, add, sizeof run.add);
    add_run(s, run);
    return s->n_runs - 1;
}

void flow_stream_again(flow_stream *s, uint32_t number, const int32_t add[MARKS])
{
    flow_repeat run = s->runs[number];
    memcpy(run.add, add, sizeof run.add);
    add_run(s, run);
}

void flow_stream_event(flow_stream *s, int event)
{
    s->events[event] = s->length;
    s->is_cut = 1;
}

/* ---- merging ---- */

typedef struct reader {
    const flow_stream *s;
    const flow_repeat *run, *past_run;
    uint32_t copy, at, patch; /* in the run, of what comes next */
    uint32_t count;           /* instructions so far */
    uint64_t done;            /* weight so far */
} reader;

static void begin_copy(reader *r)
{
    if (r->run == r->past_run)
        return;
    r->at = r->run->begin;
    r->patch = r->run->patch;
}

static reader reader_of(const flow_stream *s)
{
    reader r = {.s = s, .run = s->runs, .past_run = s->runs + s->n_runs};
    begin_copy(&r);
    return r;
}

static int is_at_end(const reader *r)
{
    return r->run == r->past_run;
}

static int is_ready(const reader *r, const reader *other)
{
    if (is_at_end(r))
        return 0;
    const int need = r->run->need;
    return need == STREAM_NO_EVENT || other->count >= other->s->events[need];
}

/* How many instructions of the present copy are left. */
static uint32_t rest_of(const reader *r)
{
    return r->run->past - r->at;
}

/* Writes the next n instructions, which the present copy must have left. */
static void take(reader *r, uint32_t n, jit_asm *out)
{
    static const int32_t row_bytes[MARKS] = {
        [MARK_SCORES] = 64, [MARK_WEIGHTS] = 64, [MARK_VECTOR] = 64, [MARK_NUMBER] = 4};
    const flow_stream *s = r->s;
    const uint32_t from = begin_of(s, r->at), past = s->ends[r->at + n - 1];
    uint8_t *to = out->bytes + out->size;
    if (out->failed || out->capacity - out->size < past - from) {
        out->failed = 1;
        return;
    }
    memcpy(to, s->bytes + from, past - from);
    for (; r->patch < s->n_patches && s->patches[r->patch].at < past; r->patch++) {
        const jit_patch *p = &s->patches[r->patch];
        int32_t displacement;
        memcpy(&displacement, s->bytes + p->at, sizeof displacement);
        displacement += r->run->add[p->kind] + (int32_t)r->copy * row_bytes[p->kind];
        memcpy(to + (p->at - from), &displacement, sizeof displacement);
    }
    out->size += past - from;
    r->done += (uint64_t)n * r->run->weight;
    r->count += n;
    r->at += n;
    if (r->at < r->run->past)
        return;
    if (++r->copy == r->run->copies) {
        r->copy = 0;
        r->run++;
    }
    begin_copy(r);
}

/* The least number of steps, but at most `most`, that make up for `behind`. */
static uint32_t steps_for(uint64_t behind, uint64_t step, uint32_t most)
{
    if (step == 0 || behind > (uint64_t)most * step)
        return most;
    return (uint32_t)((behind + step - 1) / step);
}

/* Takes from x while the part of its weight that is done is not larger than that of y, else
 * from y; where one has to wait for an event of the other, the other goes on. */
void flow_stream_merge(const flow_stream *x, const flow_stream *y, int is_plain, jit_asm *out)
{
    reader a = reader_of(x), b = reader_of(y);
    while (!out->failed && !(is_at_end(&a) && is_at_end(&b))) {
        const int a_ready = is_ready(&a, &b), b_ready = is_ready(&b, &a);
        const uint64_t a_done = a.done * y->total_weight, b_done = b.done * x->total_weight;
        const int a_first = is_plain || a_done <= b_done;
        if (!a_ready && !b_ready)
            out->failed = 1; /* each waits for the other */
        else if (a_ready && a_first && !is_plain)
            take(&a,
                 steps_for(b_done - a_done + 1, (uint64_t)a.run->weight * y->total_weight,
                           rest_of(&a)),
                 out);
        else if (a_ready && (a_first || !b_ready))
            take(&a, rest_of(&a), out);
        else if (a_first)
            take(&b, rest_of(&b), out);
        else
            take(&b,
                 steps_for(a_done - b_done, (uint64_t)b.run->weight * x->total_weight,
                           rest_of(&b)),
                 out);
    }
}

#endif
