/* The CUDA back end as a solver: a plan holds compiled programs for one architecture
 * (programs.c), and launch.c runs them. */
#include "cuda/cuda.h"

#include "cuda/backward/cuda_backward.h"
#include "cuda/small/small.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- applicable ---- */

static int say(char *why, const char *text)
{
    snprintf(why, 160, "%.150s", text);
    return 0;
}

static int takes_gradients(const plan_problem *p, char *why)
{
    cu_reads_found reads;
    if (!cu_find_reads(p, &reads))
        return say(why, "the CUDA back end makes gradients of at most 128 reads of captures");
    if (cu_reads_by_score(p))
        return say(why, "the CUDA back end makes no gradients of captures whose index varies "
                        "with the score");
    if (p->has_chunks && p->has_rows)
        return say(why, "the CUDA back end makes no gradients of some rows of a sequence "
                        "where keys lie in chunks");
    return 1;
}

static int takes_ragged(const plan_problem *p, char *why)
{
    if (plan_names_length(p->mask) || plan_names_length(p->score))
        return say(why, "the CUDA back end takes ragged problems whose texts name neither "
                        "Q nor KV");
    return 1;
}

static int has_large_heads(const plan_problem *p)
{
    return p->sizes.D > CU_LARGE_HEAD || p->sizes.Dv > CU_LARGE_HEAD;
}

/* Heads as those of latent attention, which only decode takes. */
static int takes_large_heads(const plan_problem *p, char *why)
{
    if (p->sizes.D > CU_LARGEST_D || p->sizes.Dv > CU_LARGEST_DV)
        return say(why, "the CUDA back end takes head dims up to 576, of values up to 512");
    if (p->dtype == SACCADE_F32 || p->gradients || p->weight || p->is_invariant || p->has_rows)
        return say(why, "the CUDA back end takes head dims above 256 in bf16 and f16, without "
                        "gradients, dropout, batch invariance and some rows of a sequence");
    if (cu_codes(p) && !cu_has_whole_codes(p))
        return say(why, "the CUDA back end takes head dims above 256 of codes where they are "
                        "multiples of 16, in i4 of 32");
    return 1;
}

static int applicable(const plan_problem *p, int32_t level, char *why)
{
    const cu_driver *driver;
    saccade_error err;
    (void)level;
    if ((p->kv_dtype != p->dtype && !cu_codes(p))
        || (p->dtype != SACCADE_BF16 && p->dtype != SACCADE_F16 && p->dtype != SACCADE_F32))
        return say(why, "the CUDA back end takes bf16, f16 and f32, the same for Q, K and V, "
                        "or K and V in e4m3, e5m2, i8 or i4");
    if (p->is_ragged && !takes_ragged(p, why))
        return 0;
    if (p->d_out_dtype != p->dtype && p->gradients)
        return say(why, "gradients on CUDA take d_out in the dtype of Q (d_out_dtype)");
    if (has_large_heads(p) && !takes_large_heads(p, why))
        return 0;
    if (p->gradients && !takes_gradients(p, why))
        return 0;
    if (!p->arch && cu_get_driver(&driver, &err) != SACCADE_OK)
        return say(why, err.message);
    return 1;
}

/* ---- create ---- */

/* Target: the one asked for, else the device's whose context is current, else device 0's. */
static saccade_status choose_target(cu_state *s, const plan_problem *p,
                                    const cu_driver **driver, saccade_error *err)
{
    s->device = (cu_device){.sm = 90, .n_sm = 132, .l2_bytes = 60 << 20};
    const saccade_status found = cu_get_driver(driver, p->arch ? NULL : err);
    s->is_present = found == SACCADE_OK;
    if (!p->arch)
        TRY(found);
    if (s->is_present)
        TRY(cu_get_device(*driver, cu_current_device(*driver), &s->device, err));
    if (p->arch)
        snprintf(s->arch, sizeof s->arch, "%.15s", p->arch);
    else
        snprintf(s->arch, sizeof s->arch, "sm_%d%s", s->device.sm,
                 s->device.sm == 90 ? "a" : "");
    const int is_sm90 = strcmp(s->arch, "sm_90a") == 0
                        && p->sizes.D % 8 == 0 /* tensor copies want rows of whole 16 bytes */
                        && p->sizes.Dv % 8 == 0
                        && !cu_codes(p); /* and elements that products take */
    s->family = p->dtype == SACCADE_F32 ? CU_F32 : is_sm90 ? CU_SM90 : CU_SM80;
    const int wanted = cu_sm_of(s->arch);
    FAIL_AT(wanted < 80 || wanted > 200, SACCADE_EINVAL, "arch", 0, 0,
            "got '%s', expected sm_80 or later, as in sm_90a", s->arch);
    s->is_present = s->is_present
                    && (wanted == s->device.sm
                        || (strncmp(s->arch, "compute_", 8) == 0 && wanted <= s->device.sm));
    return SACCADE_OK;
}

static void destroy(saccade_plan *plan)
{
    cu_state *s = plan->state;
    if (!s)
        return;
    cu_free_programs(s);
    cu_free_rows(s);
    free(s->mod_text);
    free(s->backward_text);
    free(s);
    plan->state = NULL;
}

static saccade_status emit(cu_state *s, const plan_problem *p, saccade_error *err)
{
    strbuf text;
    strbuf_init(&text, 0);
    const saccade_status status = cu_emit_mod(p, &text, &s->facts, err);
    s->mod_text = strbuf_steal(&text);
    strbuf_free(&text);
    return status;
}

/* Whether programs may spill by what the user's texts need beside other things. With at most
 * limits of rows none does (tests/t_cuda.c). */
static int may_spill(const cu_state *s, const plan_problem *p)
{
    return s->facts.score != CU_SCORE_NONE || s->facts.mask == CU_MASK_GENERAL || p->weight;
}

/* Some rows of a sequence have the bits of all, keys in pages those of keys in one piece, and
 * sequences side by side those of each alone. */
static saccade_status compile(cu_state *s, const plan_problem *p, saccade_error *err)
{
    const int is_apart = p->has_rows || ((p->has_chunks || p->is_ragged) && may_spill(s, p));
    if (!is_apart)
        return cu_compile_programs(s, p, err);
    plan_problem plain = *p;
    cu_state *other = malloc(sizeof *other);
    FAIL_IF_NULL(other);
    *other = *s; /* no program is in it yet */
    other->mod_text = NULL;
    s->is_like_another = 1;
    plain.has_rows = other->has_rows = 0;
    plain.is_ragged = other->is_ragged = 0;
    plain.has_chunks = plain.page = 0;
    saccade_status status = emit(other, &plain, err);
    if (status == SACCADE_OK)
        status = cu_compile_like(s, p, other, &plain, err);
    cu_free_programs(other);
    free(other->mod_text);
    free(other);
    return status;
}

/* What a mask keeps of each key lies in shared memory beside the tile. */
static saccade_status check_forward_fits(const cu_state *s, const plan_problem *p,
                                         saccade_error *err)
{
    cu_form form = {.tile = {0}};
    const cu_program first = s->has_large_heads ? CU_DECODE_WIDE : CU_MAIN;
    FAIL_AT(s->has_large_heads && strcmp(s->arch, "sm_90a"), SACCADE_EBACKEND, "D", 0, 0,
            "got head dims %d and %d for %s, expected at most 256 but on sm_90a",
            (int)p->sizes.D, (int)p->sizes.Dv, s->arch);
    FAIL_AT(!cu_program_kinds[first].choose(s, p, 0, &form), SACCADE_EBACKEND, "mask", 0, 0,
            "got a mask that keeps %d words of each key, expected one whose tiles fit the %d "
            "bytes of shared memory of %s",
            s->facts.column_words, cu_shared_there(s), s->arch);
    return SACCADE_OK;
}

/* Tiles of f32 that stay in shared memory do not all fit the 99 KB of some GPUs. */
static saccade_status check_backward_fits(const cu_state *s, const plan_problem *p,
                                          saccade_error *err)
{
    static const struct {
        int (*choose)(const cu_state *, const plan_problem *, int, cu_form *);
        const char *what;
    } kinds[] = {{cu_backward_plain_form, "gradients"},
                 {cu_backward_captures_form, "gradients of captures"}};
    const int most = cu_shared_there(s);
    cu_form form;
    for (int i = 0; i < 2; i++) {
        const int is_wanted = kinds[i].choose(s, p, 0, &form);
        const int bytes = is_wanted ? cu_backward_shared(s, p, &form) : 0;
        FAIL_AT(bytes > most, SACCADE_EBACKEND, "gradients", 0, 0,
                "got head dims %d and %d in f32, whose %s take %d bytes of shared memory, "
                "expected at most the %d of %s",
                (int)p->sizes.D, (int)p->sizes.Dv, kinds[i].what, bytes, most, s->arch);
    }
    return SACCADE_OK;
}

static saccade_status create(saccade_plan *plan, saccade_error *err)
{
    const cu_driver *driver = NULL;
    saccade_status status = SACCADE_OK;
    cu_state *s = calloc(1, sizeof *s);
    FAIL_IF_NULL(s);
    plan->state = s;
    const saccade_sizes *p = &plan->problem.sizes;
    s->has_rows = plan->problem.has_rows;
    s->is_ragged = plan->problem.is_ragged;
    s->is_in_pieces = s->is_ragged || plan->problem.has_chunks;
    s->has_large_heads = has_large_heads(&plan->problem);
    if (plan->problem.is_invariant == SACCADE_INVARIANT)
        s->part_dim = (int)(p->D > p->Dv ? p->D : p->Dv);
    s->has_fixed_pieces = plan->problem.is_invariant == SACCADE_INVARIANT_SHORT;
    const char *tiles = getenv("SACCADE_CUDA_TILES");
    s->tiles = !tiles                        ? 0
               : strcmp(tiles, "small") == 0 ? 's'
               : strcmp(tiles, "pair") == 0  ? 'p'
               : strcmp(tiles, "large") == 0 ? 'l'
                                             : 0;
    s->stays_decode = tiles && strcmp(tiles, "decode") == 0;
    TRY_GOTO(choose_target(s, &plan->problem, &driver, err));
    TRY_GOTO(emit(s, &plan->problem, err));
    TRY_GOTO(check_forward_fits(s, &plan->problem, err));
    TRY_GOTO(check_backward_fits(s, &plan->problem, err));
    if (plan->problem.gradients)
        TRY_GOTO(cu_backward_emit(s, &plan->problem, &plan->arena, err));
    TRY_GOTO(compile(s, &plan->problem, err));
    if (s->is_present)
        TRY_GOTO(cu_load_programs(s, driver, err));
    if (s->is_present && plan->problem.has_head_max)
        TRY_GOTO(cu_head_max_prepare(driver, err));
out:
    if (status != SACCADE_OK)
        destroy(plan);
    return status;
}

static const plan_solver cuda_tile = {
    .name = "cuda-tile",
    .applicable = applicable,
    .create = create,
    .workspace = cu_workspace,
    .prepare = cu_prepare,
    .forward = cu_forward,
    .head_max = cu_head_max,
    .prefix = &cu_prefix_steps,
    .takes_ragged = 1,
    .takes_ragged_backward = 1,
    .backward_workspace = cu_backward_workspace,
    .backward = cu_backward,
    .row_tile = cu_row_tile,
    .explain = cu_explain,
    .destroy = destroy,
};

const plan_solver *const cuda_solvers[] = {&cuda_tile, NULL};
