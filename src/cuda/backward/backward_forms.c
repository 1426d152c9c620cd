/* The forms that backward's programs take: which of them a plan has, and what it is written
 * for. A plan that wants no gradient has none of them. */
#include "cuda/backward/cuda_backward.h"

#include "cuda/emit/emit.h"

#include <string.h>

static cu_form pass_form(const plan_problem *p)
{
    const int D = cu_padded(p->sizes.D), E = cu_padded(p->sizes.Dv);
    return p->dtype == SACCADE_F32 ? cu_backward_pass32_choice(D, E)
                                   : cu_backward_pass_choice(D, E);
}

enum { BY_TILES = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V };

/* Whether tiles store a term for each score. */
static int stores_elements(const cu_state *s, const plan_problem *p)
{
    cu_reads_found reads;
    int n = 0;
    if (!cu_has_captures(p) || !cu_find_reads(p, &reads))
        return 0;
    for (int r = 0; r < reads.n && r < CU_READS; r++)
        n += s->backward_facts.term[r] == CU_TERM_ELEMENT
             && cu_read_is_own(reads.read[r], p->sizes.B, p->sizes.H);
    return n > 0;
}

/* Sums in fixed point need a bound of the score function's slope. Elements are stored beside
 * the product of dQ where two groups leave registers for that: with three they come after it,
 * and a step takes twice as long (docs/lab/118). Two groups take as long with one of them at
 * work, and others than those that take many tiles have no register left to pass steps. */
int cu_backward_tiles_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    rung += stores_elements(s, p) && p->sizes.D <= 64 && p->sizes.Dv <= 64;
    if (!(p->gradients & BY_TILES) || s->family != CU_SM90 || !cu_backward_is_bounded(s, p)
        || !cu_backward_tile_choice(cu_padded(p->sizes.D), cu_padded(p->sizes.Dv), rung, out))
        return 0;
    out->backward.passes =
        out->tile.groups > 2 && cu_backward_takes_many(&s->backward_facts, p);
    return 1;
}

/* Tensors that scores and masks read at their own query and key come as tiles, beside programs
 * that read them one by one: the rung'th of their forms that has room for it. */
int cu_backward_dense_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    const int bytes = cu_dense_bytes(&s->backward_facts);
    if (!bytes || p->is_ragged || p->is_invariant)
        return 0;
    for (int i = 0; cu_backward_tiles_form(s, p, i, out); i++) {
        out->dense_bytes = bytes;
        if (cu_backward_fit_dense(cu_padded(p->sizes.D), cu_padded(p->sizes.Dv), out)
            && rung-- == 0)
            return 1;
    }
    return 0;
}

/* The second of two choices, of fewer keys; gradients of captures are left to the first. */
int cu_backward_short_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    cu_form first;
    return rung == 0 && !cu_has_captures(p) && cu_backward_tiles_form(s, p, 0, &first)
           && cu_backward_tiles_form(s, p, 1, out) && out->tile.keys < first.tile.keys;
}

/* A mask of which both limits move with the row, or that has none: one whose rows may see few
 * keys however many there are. Or there are few. */
static int may_see_few(const plan_problem *p)
{
    const pass_limits *limits = plan_limits(p);
    int moves = p->mask != NULL;
    if (p->sizes.KV > 0 && p->sizes.KV <= BWD_FEW_BLOCKS * BWD_ROWS)
        return 1;
    for (int i = 0; moves && limits && i < 2; i++) {
        const pass_slope x = limits->slope[limits->node[i]];
        moves = x.lo != 0 || x.hi != 0;
    }
    return moves;
}

enum { SOME_BATCHES = 2 }; /* their number is a run's */

/* Whether tiles make gradients of captures. */
static int tiles_have_captures(const cu_state *s, const plan_problem *p)
{
    cu_reads_found reads;
    int n = 0;
    cu_find_reads(p, &reads);
    for (int r = 0; r < reads.n && r < CU_READS; r++)
        n += s->backward_facts.term[r] != CU_TERM_NONE
             && !(s->backward_facts.term[r] == CU_TERM_ELEMENT
                  && !cu_read_is_own(reads.read[r], SOME_BATCHES, p->sizes.H));
    return n > 0;
}

/* Beside the tiles, which are not left where they make gradients of captures too. */
int cu_backward_few_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    cu_form tiles;
    return may_see_few(p) && s->tiles != 'l' && !p->is_ragged && !p->has_rows && !p->weight
           && !tiles_have_captures(s, p) && cu_backward_tiles_form(s, p, 0, &tiles)
           && cu_backward_few_choice(cu_padded(p->sizes.D), cu_padded(p->sizes.Dv), rung, out);
}

/* Narrower heads where sums in fixed point would need a bound that there is not; of some rows
 * of a sequence only where its 128 queries are whole tiles of forward's. */
int cu_backward_wide_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    const int is_small = p->sizes.D <= 64 && p->sizes.Dv <= 64;
    cu_form tiles;
    return p->gradients & BY_TILES && s->family == CU_SM90 && !p->is_ragged
           && !(p->has_rows && is_small) && !cu_backward_tiles_form(s, p, 0, &tiles)
           && cu_backward_wide_choice(cu_padded(p->sizes.D), cu_padded(p->sizes.Dv), rung, out);
}

/* What it lays out by batch and head lies in one piece, as keys in chunks do by then. */
int cu_backward_f32_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    return p->dtype == SACCADE_F32 && strcmp(s->arch, "sm_90a") == 0 && p->gradients & BY_TILES
           && !p->is_ragged && !p->has_rows && !p->weight
           && cu_backward_f32_choice(cu_padded(p->sizes.D), cu_padded(p->sizes.Dv), rung, out);
}

int cu_backward_split_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    (void)p;
    *out = s->programs[CU_BWD_F32].form;
    return cu_backward_has_f32(s) && rung == 0;
}

int cu_backward_plain_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    (void)s;
    *out = pass_form(p);
    return p->gradients && rung == 0;
}

/* What a row brings does not depend on tiles, but for the unit of its sums. */
int cu_backward_prepare_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    *out = s->programs[cu_backward_has_tiles(s)  ? CU_BWD_TILES
                       : cu_backward_has_wide(s) ? CU_BWD_WIDE
                                                 : CU_BWD_PLAIN]
               .form;
    return p->gradients && rung == 0;
}

int cu_backward_finish_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    *out = s->programs[CU_BWD_TILES].form;
    return p->gradients && cu_backward_has_tiles(s) && rung == 0;
}

int cu_backward_join_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    return cu_backward_has_parts(p) && cu_backward_prepare_form(s, p, rung, out);
}

int cu_backward_sinks_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    (void)s;
    *out = pass_form(p);
    return p->gradients & SACCADE_GRADIENT_SINKS && rung == 0;
}

int cu_backward_captures_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    (void)s;
    *out = cu_backward_captures_choice(cu_padded(p->sizes.D), cu_padded(p->sizes.Dv),
                                       p->dtype == SACCADE_F32);
    return cu_has_captures(p) && rung == 0;
}

/* Bytes of each score's. */
static int kept_bytes(const cu_shares *kept)
{
    return kept->n_elements * (kept->element_dtype == SACCADE_NONE ? 4 : 2);
}

/* Whether a dense capture has no element for each batch and head; may_move: 0 for those alone
 * of which all that share elements read the same. */
static int shares_elements(const plan_problem *p, int may_move)
{
    const saccade_sizes some = {SOME_BATCHES, p->sizes.H, p->sizes.Hkv, 1, 1, 1, 1};
    cu_reads_found reads;
    int any = 0;
    cu_find_reads(p, &reads);
    for (int i = 0; i < reads.n; i++)
        any |= cu_read_has_elements(reads.read[i])
               && !cu_read_is_own(reads.read[i], some.B, some.H)
               && (may_move || !cu_read_may_move(reads.read[i], &some));
    return any;
}

int cu_backward_elements_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    const int most = cu_shared_there(s);
    if (rung || p->is_ragged || !cu_has_captures(p) || !shares_elements(p, 1))
        return 0;
    *out = cu_backward_elements_choice(cu_padded(p->sizes.D), cu_padded(p->sizes.Dv),
                                       p->dtype == SACCADE_F32,
                                       kept_bytes(&s->backward_facts.kept), most);
    return 1;
}

/* Where rows are prepared as Hopper's kernels take them. */
int cu_backward_elements90_form(const cu_state *s, const plan_problem *p, int rung,
                                cu_form *out)
{
    cu_form elements;
    return rung == 0 && s->family == CU_SM90 && p->dtype != SACCADE_F32 && !p->weight
           && !p->has_rows && (cu_backward_has_tiles(s) || cu_backward_has_wide(s))
           && cu_backward_elements_form(s, p, 0, &elements) && shares_elements(p, 0)
           && cu_backward_elements90_choice(cu_padded(p->sizes.D), cu_padded(p->sizes.Dv),
                                            kept_bytes(&s->backward_facts.kept), out);
}

int cu_backward_pages_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    (void)s;
    *out = pass_form(p);
    return p->gradients && p->has_chunks && rung == 0;
}

int cu_backward_shared(const cu_state *s, const plan_problem *p, const cu_form *form)
{
    (void)s;
    return cu_backward_shared_bytes(form, cu_padded(p->sizes.D), cu_padded(p->sizes.Dv));
}

saccade_status cu_backward_emit(cu_state *s, const plan_problem *p, arena *scratch,
                                saccade_error *err)
{
    strbuf text;
    strbuf_init(&text, 0);
    const saccade_status status =
        cu_emit_backward_mod(p, scratch, &text, &s->backward_facts, err);
    s->backward_text = strbuf_steal(&text);
    strbuf_free(&text);
    if (status == SACCADE_OK)
        FAIL_IF_NULL(s->backward_text);
    return status;
}
