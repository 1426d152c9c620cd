/* Which of a launch's reads of captures are summed in tables in shared memory, and how these
 * share it: tables of queries (bwd_query_tables.cuh) before those of the CTA (bwd_tables.cuh),
 * which take two or three words and additions that meet. */
#include "cuda/backward/cuda_backward.h"

#include "base/integers.h"

enum { WORD = sizeof(int), SPARE = 16, LANES = 32, DIGITS = 3, QUERY_COPIES = 2 };

/* ---- room ---- */

/* Words of tables in the shared memory of a CTA that has a multiprocessor alone, and of one
 * that leaves room for a second one beside. */
typedef struct table_room {
    int64_t alone, beside;
} table_room;

static table_room room_of(const saccade_plan *plan)
{
    enum { RESERVED = 1024 };
    const cu_state *s = plan->state;
    const int most = cu_shared_there(s);
    const int base = cu_captures_base(plan) + SPARE;
    return (table_room){(most - base) / WORD, ((most + RESERVED) / 2 - RESERVED - base) / WORD};
}

int cu_captures_base(const saccade_plan *plan)
{
    const cu_state *s = plan->state;
    const cu_form *form = &s->programs[CU_BWD_CAPTURES].form;
    return (int)round_up(cu_backward_shared(s, &plan->problem, form), SPARE);
}

/* ---- tables ---- */

/* Of the dimensions that vary with any of `varies`; n is 0 where they are over room. */
static cu_table table_of(const pass_read *read, const saccade_tensor *t, int varies,
                         int64_t room)
{
    cu_table out = {.rank = read->rank, .copies = 1};
    int64_t n = 1;
    for (int d = read->rank - 1; d >= 0 && n <= room; d--)
        if (read->index[d].varies & varies) {
            out.size[d] = (unsigned short)t->shape[d];
            out.stride[d] = (unsigned short)n;
            n *= t->shape[d];
        }
    out.n = n <= room ? (int)n : 0;
    return out;
}

/* What scores of one query may read, where others read other elements, in so many words for
 * all queries of a CTA. A pitch of an odd number of word pairs: queries that read one element,
 * or each its own diagonal's, then do so from banks of their own or from two. */
static cu_table query_table_of(const pass_read *read, const saccade_tensor *t, int64_t room)
{
    cu_table out = table_of(read, t, CU_OF_KEYS, smaller(room / BWD_ROWS, UINT16_MAX));
    int has_rows = 0;
    for (int d = 0; d < read->rank; d++)
        has_rows |= (read->index[d].varies & (DEP_Q | CU_OF_KEYS)) == DEP_Q;
    out.digits = 1;
    out.pitch = out.n + ((2 - out.n) & 3);
    if (!has_rows || out.n == 0 || out.pitch * BWD_ROWS > room)
        out = (cu_table){.n = 0};
    return out;
}

int64_t cu_query_table_words(const saccade_plan *plan, const pass_read *read,
                             const saccade_tensor *t, int64_t taken)
{
    return (int64_t)BWD_ROWS * query_table_of(read, t, room_of(plan).alone - taken).pitch;
}

/* ---- a launch ---- */

static int64_t words_of(const cu_table *t)
{
    return (int64_t)(t->pitch ? BWD_ROWS * t->pitch : t->n * t->digits) * t->copies;
}

/* Read i of a run, which has exact sums: with two digits for three f32 would lose too much. */
static cu_table choose_table(const cu_capture_run *x, int i, const table_room *room,
                             int64_t taken)
{
    const pass_read *read = x->at.reads.read[i];
    const saccade_tensor *t = &x->g->captures[read->capture];
    const int fewest = x->plan->problem.dtype == SACCADE_F32 ? DIGITS : DIGITS - 1;
    const int64_t terms = smaller(BWD_ROWS * x->run->sizes.KV, UINT16_MAX);
    const int64_t keys = BWD_ROWS * (x->run->sizes.KV + 3);
    cu_table out = query_table_of(read, t, smaller(keys, room->beside - taken));
    for (int digits = DIGITS; digits >= fewest && out.n == 0; digits--) {
        out =
            table_of(read, t, ~(DEP_B | DEP_H), smaller(terms, (room->alone - taken) / digits));
        out.digits = digits;
    }
    return out.n ? out : query_table_of(read, t, smaller(keys, room->alone - taken));
}

/* Those that store what they sum come first: no other way was left room for. */
static int64_t find_tables(cu_capture_run *x, const table_room *room)
{
    int64_t words = 0;
    for (int turn = 0; turn < 2; turn++)
        for (int k = 0; k < CU_READS; k++) {
            const int i = x->c.first + k;
            cu_table *to = &x->tables.of[k];
            if (turn == 0)
                *to = (cu_table){.n = 0};
            if (i >= x->at.reads.n || x->c.elsewhere >> k & 1
                || (turn == 0 ? x->at.way[i] != CU_SUMS_TABLE : x->at.way[i] != CU_SUMS_EXACT))
                continue;
            const pass_read *read = x->at.reads.read[i];
            if (read->scatter != SCATTER_GENERAL && read->scatter != SCATTER_ELEMENTS)
                continue;
            *to = turn == 0 ? query_table_of(read, &x->g->captures[read->capture],
                                             room->alone - words)
                            : choose_table(x, i, room, words);
            words += words_of(to);
        }
    return words;
}

/* Copies as long as they fit: two of each query's table, then more of the CTA's. */
static void copy_tables(cu_capture_run *x, int64_t words, int64_t room)
{
    for (int kind = 0; kind < 2; kind++)
        for (int copies = 2; copies <= (kind ? LANES : QUERY_COPIES); copies *= 2) {
            int64_t more = 0;
            for (int k = 0; k < CU_READS; k++)
                more += (x->tables.of[k].pitch == 0) == kind ? words_of(&x->tables.of[k]) : 0;
            if (more == 0 || words + more > room)
                break;
            for (int k = 0; k < CU_READS; k++)
                if ((x->tables.of[k].pitch == 0) == kind)
                    x->tables.of[k].copies = copies;
            words += more;
        }
}

void cu_choose_tables(cu_capture_run *x)
{
    const table_room room = room_of(x->plan);
    const int64_t words = find_tables(x, &room);
    int64_t at = 0;
    copy_tables(x, words, words > room.beside ? room.alone : room.beside);
    for (int k = 0; k < CU_READS; k++) {
        x->tables.of[k].at = (int)at;
        at += words_of(&x->tables.of[k]);
    }
    x->tables.bytes = (int)round_up(at * WORD, SPARE);
}
