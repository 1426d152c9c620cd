/* flow_merge.h: instructions of two streams, merged into one. Only compiled with HAVE_ZYDIS.
 *
 * A stream is written on its own and remembers where each instruction ends, what it weighs and
 * which event of the other stream must have happened before it. Neither touches the other's
 * registers or flags, so any order that keeps both and the events is right. What all rows of a
 * square have alike is held once: merging writes it for each, with the row's displacements. */
#ifndef SACCADE_CPU_FLOW_FLOW_MERGE_H
#define SACCADE_CPU_FLOW_FLOW_MERGE_H

#include "cpu/flow/flow.h"
#include "cpu/jit/jit_asm.h"

enum {
    STREAM_BYTES = 1 << 18, /* that a stream stands for at most, */
    STREAM_INSTRUCTIONS = 32768,
    STREAM_EVENTS = 8,
    STREAM_NO_EVENT = -1
};

/* Kinds of marked displacements (jit_asm.h): each grows by a size of its own from row to row,
 * and is moved from square to square. */
enum { MARK_SCORES, MARK_WEIGHTS, MARK_VECTOR, MARK_NUMBER, MARK_COLUMN, MARKS };

/* Instructions [begin, past), so many times over. */
typedef struct flow_repeat {
    uint32_t begin, past, copies;
    uint32_t patch;     /* first of what is marked */
    int32_t add[MARKS]; /* to displacements */
    int8_t need;        /* event of the other stream before the first, or STREAM_NO_EVENT */
    uint8_t weight;     /* of each instruction */
} flow_repeat;

typedef struct flow_stream {
    jit_memo *memo; /* borrowed */
    uint8_t *bytes;
    uint32_t *ends;     /* [n]: offset past each instruction */
    jit_patch *patches; /* of them, in order */
    flow_repeat *runs;  /* [n_runs] */
    uint32_t n, n_patches, n_runs;
    uint32_t length, total_weight;  /* of all copies, */
    size_t size;                    /* in bytes */
    uint32_t events[STREAM_EVENTS]; /* length of this stream until the event */
    int need;                       /* of the instructions written next */
    int is_cut;                     /* an event stands between them and those before */
} flow_stream;

saccade_status flow_stream_create(flow_stream *stream, jit_memo *memo, saccade_error *err);
void flow_stream_clear(flow_stream *stream);
void flow_stream_destroy(flow_stream *stream);
/* Notes the instructions that the encoder has got since the last call, each of this weight. */
void flow_stream_note(flow_stream *stream, const jit_asm *a, int weight);
/* Notes instructions that the code repeats `copies` times. To each marked displacement of the
 * first copy add[its mark] is added. Returns the run, for flow_stream_again. */
uint32_t flow_stream_repeat(flow_stream *stream, const jit_asm *a, int weight, uint32_t copies,
                            const int32_t add[MARKS]);
/* Repeats a run of instructions, with other displacements. */
void flow_stream_again(flow_stream *stream, uint32_t run, const int32_t add[MARKS]);
/* Makes the end of what has been noted so far an event, for which the other stream may wait. */
void flow_stream_event(flow_stream *stream, int event);
/* Writes both streams to out, each in its own order, advancing in proportion to their weights.
 * is_plain: x as far as its needs allow, then y. */
void flow_stream_merge(const flow_stream *x, const flow_stream *y, int is_plain, jit_asm *out);

/* An encoder that writes to the stream. */
jit_asm flow_stream_asm(const flow_stream *stream);

/* The vector stream of a step, into stream's memory (flow_vector.c). */
enum { EVENT_SQUARE }; /* + square: stored (matrix), its P written (vector) */
saccade_status flow_vector(const flow_shape *shape, flow_stream *stream, int32_t *spills,
                           saccade_error *err);

#endif
