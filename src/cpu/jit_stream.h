/* jit_stream.h: instructions of two streams, merged into one. Only compiled with HAVE_ZYDIS.
 *
 * A stream is written on its own and remembers where each instruction ends, what it weighs and
 * which event of the other stream must have happened before it. Neither touches the other's
 * registers or flags, so any order that keeps both and the events is right. */
#ifndef SACCADE_CPU_JIT_STREAM_H
#define SACCADE_CPU_JIT_STREAM_H

#include "cpu/amx_flow.h"
#include "cpu/jit_asm.h"

enum { STREAM_INSTRUCTIONS = 32768, STREAM_EVENTS = 8, STREAM_NO_EVENT = -1 };

typedef struct jit_stream {
    uint8_t *bytes;
    uint32_t *ends;  /* [n]: offset past each instruction */
    int8_t *needs;   /* [n]: event of the other stream, or STREAM_NO_EVENT */
    uint8_t *weight; /* [n]: of its progress */
    uint32_t n, total_weight;
    uint32_t events[STREAM_EVENTS]; /* instructions of this stream until the event */
    int need;                       /* of the instructions written next */
} jit_stream;

saccade_status jit_stream_create(jit_stream *stream, size_t capacity, saccade_error *err);
void jit_stream_clear(jit_stream *stream);
void jit_stream_destroy(jit_stream *stream);
/* Notes the instructions that a has got since the last call, each of this weight. */
void jit_stream_note(jit_stream *stream, const jit_asm *a, int weight);
/* What has been noted so far is the event. */
void jit_stream_event(jit_stream *stream, int event);
/* Both, in order, to out; plain: x as far as its needs allow, then y. Both streams move on in
 * proportion to their weights. */
void jit_stream_merge(const jit_stream *x, const jit_stream *y, int is_plain, jit_asm *out);

/* The vector stream of a step, into stream's memory (jit_vector.c). */
enum { EVENT_SQUARE }; /* + square: stored (matrix), its P written (vector) */
saccade_status jit_vector_stream(const amx_shape *shape, size_t capacity, jit_stream *stream,
                                 int32_t *spills, saccade_error *err);

#endif
