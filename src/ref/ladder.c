/* Runs the ladder: each rung once counting, then for the clock, then against float64. */
#include "ref/ladder.h"

#include "base/clock.h"
#include "base/record.h"
#include "base/status.h"

#include <string.h>

enum { CLOCK_NS = 200000000 }; /* short runs repeat for this long; the fastest counts */

static saccade_ladder_row describe(const ladder_rung *rung, const ladder_run *run)
{
    const ladder_problem *p = run->p;
    const ladder_count *c = &run->count;
    const double queries = rung->kind == LADDER_DECODE ? 1 : (double)p->N;
    return (saccade_ladder_row){
        .size = sizeof(saccade_ladder_row),
        .name = rung->name,
        .title = rung->title,
        .source = rung->source,
        .accesses_text = rung->accesses_text,
        .flops_text = rung->flops_text,
        .stated_text = rung->stated_text,
        .reads = c->reads,
        .writes = c->writes,
        .accesses = rung->accesses(p),
        .flops_counted = c->flops,
        .flops = rung->flops(p),
        .repeats = c->repeats,
        .stated = rung->stated(p),
        .passes = (double)c->visits / (queries * (double)p->N),
        .intensity = (double)c->flops / (4.0 * (double)(c->reads + c->writes)),
        .extra = c->extra,
        .chip = c->chip,
    };
}

static double clock_rung(const ladder_rung *rung, ladder_data *data)
{
    const int64_t start = clock_ns();
    double best = 0;
    do {
        ladder_run run = ladder_start(data);
        const int64_t before = clock_thread_ns();
        rung->timed(&run);
        const double seconds = (double)(clock_thread_ns() - before + 1) * 1e-9; /* never 0 */
        best = best == 0 || seconds < best ? seconds : best;
    } while (clock_ns() - start < CLOCK_NS);
    return best;
}

static saccade_status climb(const ladder_rung *rung, ladder_data *data, int is_timed,
                            saccade_ladder_row *out, saccade_error *err)
{
    ladder_run run = ladder_start(data);
    rung->counted(&run);
    *out = describe(rung, &run);
    if (!is_timed)
        return SACCADE_OK;
    out->seconds = clock_rung(rung, data);
    return ladder_error(data, rung, &out->error, err);
}

saccade_status saccade_ladder_run(const saccade_ladder_options *options,
                                  int (*row)(void *user, const saccade_ladder_row *row),
                                  void *user, saccade_error *err)
{
    saccade_ladder_options o;
    FAIL_AT(!row, SACCADE_EINVAL, "ladder", 0, 0, "got NULL, expected a function");
    saccade_ladder_options_init(&o);
    TRY(RECORD_READ(&o, options, "ladder options"));
    const ladder_problem sizes = {
        .N = o.N, .d = o.d, .M = o.M, .block = o.block, .splits = o.splits};
    saccade_status status = SACCADE_OK;
    int n_met = 0;
    ladder_data data;
    TRY(ladder_data_create(&sizes, o.seed, 1, &data, err));
    for (const ladder_rung *rung = ladder_rungs; rung->name; rung++) {
        saccade_ladder_row filled;
        if (o.only && strcmp(o.only, rung->name) != 0)
            continue;
        n_met++;
        TRY_GOTO(climb(rung, &data, o.is_timed, &filled, err));
        if (row(user, &filled))
            goto out;
    }
    FAIL_IF_GOTO(n_met == 0, SACCADE_EINVAL, "ladder: got no algorithm named '%.40s'", o.only);
out:
    ladder_data_destroy(&data);
    return status;
}
