/* Exchanges one after the other, on a thread of their own, so that they go on while the caller
 * computes. With a transport that only the caller may use they are done when they are put. */
#include "dist/staged.h"

#include "base/status.h"
#include "base/threads.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct line_item {
    saccade_message *messages; /* [4 ranks] sends, from the middle on receives */
    int32_t n_sends, n_receives;
} line_item;

struct dist_line {
    saccade_transport transport;
    line_item item[LINE_MOST];
    saccade_message *messages;
    int64_t put, done; /* numbers from 1 on */
    int is_threaded, is_ending, has_failed;
    saccade_error err;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
};

static saccade_status run_item(dist_line *line, int64_t number, saccade_error *err)
{
    const line_item *item = &line->item[number % LINE_MOST];
    return dist_exchange(&line->transport, item->messages, item->n_sends,
                         item->messages + 2 * (size_t)line->transport.ranks, item->n_receives,
                         err);
}

/* With the lock: the next exchange, without it while it is under way. After a failure the rest
 * is dropped. */
static void run_next(dist_line *line)
{
    saccade_error err = {0};
    saccade_status status = SACCADE_OK;
    if (!line->has_failed) {
        pthread_mutex_unlock(&line->lock);
        status = run_item(line, line->done + 1, &err);
        pthread_mutex_lock(&line->lock);
    }
    if (status != SACCADE_OK) {
        line->has_failed = 1;
        line->err = err;
    }
    line->done++;
    pthread_cond_broadcast(&line->changed);
}

static void *run_line(void *arg)
{
    dist_line *line = arg;
    pthread_mutex_lock(&line->lock);
    for (;;) {
        while (line->done == line->put && !line->is_ending)
            pthread_cond_wait(&line->changed, &line->lock);
        if (line->done == line->put)
            break;
        run_next(line);
    }
    pthread_mutex_unlock(&line->lock);
    return NULL;
}

saccade_status dist_line_open(const saccade_transport *transport, dist_line **out,
                              saccade_error *err)
{
    const size_t ranks = (size_t)transport->ranks;
    dist_line *line = calloc(1, sizeof *line);
    FAIL_IF_NULL(line);
    line->messages = calloc(LINE_MOST * 4 * ranks, sizeof *line->messages);
    if (!line->messages) {
        free(line);
        FAIL(SACCADE_ENOMEM, "out of memory");
    }
    line->transport = *transport;
    for (int i = 0; i < LINE_MOST; i++)
        line->item[i].messages = line->messages + (size_t)i * 4 * ranks;
    pthread_mutex_init(&line->lock, NULL);
    pthread_cond_init(&line->changed, NULL);
    line->is_threaded = transport->ranks > 1 && !transport->caller_only
                        && thread_begin(&line->thread, NULL, run_line, line) == 0;
    *out = line;
    return SACCADE_OK;
}

void dist_line_close(dist_line *line)
{
    if (!line)
        return;
    pthread_mutex_lock(&line->lock);
    line->is_ending = 1;
    pthread_cond_broadcast(&line->changed);
    pthread_mutex_unlock(&line->lock);
    if (line->is_threaded)
        pthread_join(line->thread, NULL);
    pthread_cond_destroy(&line->changed);
    pthread_mutex_destroy(&line->lock);
    free(line->messages);
    free(line);
}

saccade_message *dist_line_room(dist_line *line)
{
    return line->item[(line->put + 1) % LINE_MOST].messages;
}

int64_t dist_line_put(dist_line *line, int32_t n_sends, int32_t n_receives)
{
    pthread_mutex_lock(&line->lock);
    const int64_t number = ++line->put;
    line_item *item = &line->item[number % LINE_MOST];
    item->n_sends = n_sends;
    item->n_receives = n_receives;
    if (line->is_threaded)
        pthread_cond_broadcast(&line->changed);
    else
        run_next(line);
    pthread_mutex_unlock(&line->lock);
    return number;
}

saccade_status dist_line_wait(dist_line *line, int64_t number, saccade_error *err)
{
    pthread_mutex_lock(&line->lock);
    while (line->done < number)
        pthread_cond_wait(&line->changed, &line->lock);
    const int has_failed = line->has_failed;
    if (has_failed && err)
        *err = line->err;
    pthread_mutex_unlock(&line->lock);
    return has_failed ? SACCADE_EPEER : SACCADE_OK;
}

void dist_line_drain(dist_line *line)
{
    pthread_mutex_lock(&line->lock);
    if (!line->has_failed) { /* in what the caller did, not in an exchange */
        line->has_failed = 1;
        status_fail_at(&line->err, SACCADE_EPEER, "transport", 0, 0,
                       "rank %d: a run failed here before, which ended the transport",
                       line->transport.rank);
    }
    while (line->done < line->put)
        pthread_cond_wait(&line->changed, &line->lock);
    pthread_mutex_unlock(&line->lock);
}
