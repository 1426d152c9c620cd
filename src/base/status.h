/* Errors: how every fallible internal function reports one.
   Such a function returns saccade_status and takes `saccade_error *err` last; err may be NULL.
   The macros expect that parameter under that name; the _GOTO ones also a local `status` and
   a label `out:`. */
#ifndef SACCADE_BASE_STATUS_H
#define SACCADE_BASE_STATUS_H

#include "saccade.h"

#if defined(__GNUC__)
#define BASE_PRINTF(fmt_index, first_index) \
    __attribute__((format(printf, fmt_index, first_index)))
#else
#define BASE_PRINTF(fmt_index, first_index)
#endif

/* fills *err with code and message, clears its place; returns code. */
saccade_status status_fail(saccade_error *err, saccade_status code, const char *fmt, ...)
    BASE_PRINTF(3, 4);

/* same, with the place: a name (NULL: none) and a 1-based line and column (0: none). */
saccade_status status_fail_at(saccade_error *err, saccade_status code, const char *where,
                              int32_t line, int32_t column, const char *fmt, ...)
    BASE_PRINTF(6, 7);

/* The code is repeated so that compilers see that a failure isn't SACCADE_OK. */
#define FAIL(code, ...) return (status_fail(err, (code), __VA_ARGS__), (code))

#define FAIL_IF(cond, code, ...)     \
    do {                             \
        if (cond)                    \
            FAIL(code, __VA_ARGS__); \
    } while (0)

#define FAIL_AT(cond, code, place, line, column, ...)                                    \
    do {                                                                                 \
        if (cond)                                                                        \
            return (status_fail_at(err, (code), (place), (line), (column), __VA_ARGS__), \
                    (code));                                                             \
    } while (0)

#define FAIL_IF_GOTO(cond, code, ...)                       \
    do {                                                    \
        if (cond) {                                         \
            status = status_fail(err, (code), __VA_ARGS__); \
            goto out;                                       \
        }                                                   \
    } while (0)

#define TRY(expr)                           \
    do {                                    \
        const saccade_status try_ = (expr); \
        if (try_ != SACCADE_OK)             \
            return try_;                    \
    } while (0)

#define TRY_GOTO(expr)            \
    do {                          \
        status = (expr);          \
        if (status != SACCADE_OK) \
            goto out;             \
    } while (0)

/* the one message for a failed allocation. */
#define FAIL_IF_NULL(pointer) FAIL_IF((pointer) == NULL, SACCADE_ENOMEM, "out of memory")
#define FAIL_IF_NULL_GOTO(pointer) \
    FAIL_IF_GOTO((pointer) == NULL, SACCADE_ENOMEM, "out of memory")

#endif
