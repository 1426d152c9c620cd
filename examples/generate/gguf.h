/* gguf.h: a strict reader of GGUF files (versions 2 and 3, little-endian): typed values by key,
 * and tensors by name. A file is untrusted: every count, length and offset is checked against
 * what the file holds before anything behind it is read, and memory is bounded by the size of
 * the file. What is found points into the file, which stays mapped until gguf_close. */
#ifndef GENERATE_GGUF_H
#define GENERATE_GGUF_H

#include "trouble.h"

#include <stddef.h>
#include <stdint.h>

enum { GGUF_RANK = 4, GGUF_MOST_VALUES = 4096, GGUF_MOST_TENSORS = 8192, GGUF_NAME = 128 };

typedef enum gguf_type {
    GGUF_U8, GGUF_I8, GGUF_U16, GGUF_I16, GGUF_U32, GGUF_I32, GGUF_F32, GGUF_BOOL,
    GGUF_TEXT, GGUF_ARRAY, GGUF_U64, GGUF_I64, GGUF_F64, GGUF_TYPES
} gguf_type;

/* Bytes, not ended by a 0, and perhaps not UTF-8. */
typedef struct gguf_text {
    const char *data;
    uint64_t size;
} gguf_text;

typedef struct gguf_value {
    gguf_text key;
    gguf_type type;    /* of an array: of its elements */
    int is_array;
    uint64_t count;    /* 1 for what is no array */
    const uint8_t *at; /* the first one; texts: their length in 8 bytes, then the bytes */
} gguf_value;

typedef struct gguf_tensor {
    gguf_text name;
    uint32_t type;             /* ggml's number of it */
    int32_t rank;
    int64_t shape[GGUF_RANK];  /* the fastest first; 1 past the rank */
    int64_t elements;
    const uint8_t *data;
    uint64_t bytes;
} gguf_tensor;

typedef struct gguf {
    const char *file;
    const uint8_t *bytes;
    uint64_t size;
    int is_mapped;
    gguf_value *values;
    gguf_tensor *tensors;
    uint64_t n_values, n_tensors;
} gguf;

/* 0, or -1 and what is wrong. `file` is kept: it names what gguf_parse borrows. */
int gguf_open(const char *file, gguf *out, trouble *t);
int gguf_parse(const char *file, const void *bytes, uint64_t size, gguf *out, trouble *t);
void gguf_close(gguf *g);

/* NULL where there is none. */
const gguf_value *gguf_find(const gguf *g, const char *key);
const gguf_tensor *gguf_find_tensor(const gguf *g, const char *name);

/* Integers of any width from least to most; absent: `fallback`, or wrong if that is below
 * `least`. */
int gguf_integer(const gguf *g, const char *key, int64_t least, int64_t most, int64_t fallback,
                 int64_t *out, trouble *t);
/* Finite numbers; absent: `fallback`, or wrong if that is NaN. */
int gguf_number(const gguf *g, const char *key, double fallback, double *out, trouble *t);
/* An array of at most `most` elements of one type. */
int gguf_array(const gguf *g, const char *key, gguf_type type, uint64_t most,
               const gguf_value **out, trouble *t);
/* Steps over an array of texts: *at is its `at` at first. */
gguf_text gguf_next_text(const uint8_t **at);
int gguf_is(gguf_text text, const char *word);

/* How a tensor's elements are stored; NULL: this reader does not know. */
const char *gguf_type_name(uint32_t type);
/* `elements` of them from number `first` on, both multiples of the type's block. */
void gguf_to_f32(const gguf_tensor *tensor, int64_t first, int64_t elements, float *out);

#endif
