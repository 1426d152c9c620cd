/* The edge of the library: contexts, checks of callers' arguments, and the one place that names
 * the back ends. Behind it everything is asserted, not checked.
 *
 *     saccade_forward: tensors -> sizes -> positions -> captures -> block mask -> solver
 */
#include "saccade.h"

#include "base/cpu_features.h"
#include "base/parallel.h"
#include "base/status.h"
#include "plan/plan.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    const plan_solver *const *solvers;
} backends[] = {
    {"cpu", cpu_solvers},
    {"cuda", cuda_solvers},
    {"ref", ref_solvers},
    {"plain", plain_solvers},
};
enum { BACKENDS = sizeof backends / sizeof backends[0] };

/* ---- context ---- */

static saccade_status context_fill(const saccade_context_options *o, saccade_context *c,
                                   saccade_error *err)
{
    cpu_level level, wanted;
    FAIL_AT(o && (o->threads < 0 || o->threads > 4096), SACCADE_EINVAL, "threads", 0, 0,
            "got %d, expected 0 (all) to 4096", o->threads);
    TRY(cpu_level_allowed(&level, err));
    if (o && o->level) {
        TRY(cpu_level_parse(o->level, &wanted, err));
        FAIL_AT(wanted > level, SACCADE_EBACKEND, "level", 0, 0,
                "got %s, expected at most %s, the best of this machine", o->level,
                cpu_level_name(level));
        level = wanted;
    }
    c->threads = o && o->threads ? o->threads : par_max_threads();
    c->level = (int32_t)level;
    return SACCADE_OK;
}

saccade_status saccade_context_create(const saccade_context_options *options,
                                      saccade_context **out, saccade_error *err)
{
    saccade_context filled;
    TRY(context_fill(options, &filled, err));
    saccade_context *c = malloc(sizeof *c);
    FAIL_IF_NULL(c);
    *c = filled;
    *out = c;
    return SACCADE_OK;
}

void saccade_context_destroy(saccade_context *context)
{
    free(context);
}

void saccade_free(void *bytes)
{
    free(bytes);
}

/* ---- plan ---- */

saccade_problem saccade_problem_default(void)
{
    return (saccade_problem){
        .sizes = {.H = 1, .Hkv = 1, .D = 64, .Dv = 64},
        .dtype = SACCADE_F32,
        .scale = NAN,
    };
}

static saccade_status find_backend(const char *name, int *out, saccade_error *err)
{
    if (!name || strcmp(name, "auto") == 0)
        name = "cpu";
    for (int i = 0; i < BACKENDS; i++) {
        if (strcmp(backends[i].name, name) == 0) {
            *out = i;
            return SACCADE_OK;
        }
    }
    return status_fail_at(err, SACCADE_EINVAL, "backend", 0, 0,
                          "got '%.40s', expected auto, cpu, cuda, ref or plain", name);
}

saccade_status saccade_plan_create(saccade_context *context, const saccade_problem *problem,
                                   saccade_plan **out, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    saccade_context defaults;
    int backend = 0;
    FAIL_IF(!problem || !out, SACCADE_EINVAL, "plan: got a NULL problem or result");
    TRY(find_backend(problem->backend, &backend, err));
    if (!context) {
        TRY(context_fill(NULL, &defaults, err));
        context = &defaults;
    }
    saccade_plan *plan = calloc(1, sizeof *plan);
    FAIL_IF_NULL(plan);
    arena_init(&plan->arena);
    plan->threads = context->threads;
    plan->level = context->level;
    TRY_GOTO(plan_derive(problem, plan, err));
    TRY_GOTO(plan_choose(plan, backends[backend].solvers, err));
    *out = plan;
    return SACCADE_OK;
out:
    saccade_plan_destroy(plan);
    return status;
}

void saccade_plan_destroy(saccade_plan *plan)
{
    if (!plan)
        return;
    if (plan->solver)
        plan->solver->destroy(plan);
    arena_free(&plan->arena);
    free(plan);
}

size_t saccade_plan_workspace(const saccade_plan *plan, const saccade_sizes *sizes)
{
    return plan->solver->workspace(plan, sizes);
}

saccade_status saccade_plan_explain(const saccade_plan *plan, char **text, saccade_error *err)
{
    strbuf sb;
    strbuf_init(&sb, 0);
    saccade_status status = plan_explain(plan, &sb, err);
    if (status == SACCADE_OK) {
        char *stolen = strbuf_steal(&sb);
        if (stolen)
            *text = stolen;
        else
            status = status_fail(err, SACCADE_ENOMEM, "out of memory");
    }
    strbuf_free(&sb);
    return status;
}

/* ---- forward: checks ---- */

static int is_cuda(const saccade_plan *plan)
{
    return strcmp(plan->solver->backend, "cuda") == 0;
}

/* shape[] of the expected tensor; 0 accepts any length from 1 to 2^30 and fills it in. */
static saccade_status check_tensor(const saccade_plan *plan, const saccade_tensor *t,
                                   const char *name, saccade_dtype dtype, int32_t rank,
                                   int64_t *shape, saccade_error *err)
{
    FAIL_AT(t->dtype != dtype, SACCADE_EINVAL, name, 0, 0, "got dtype %s, expected %s",
            saccade_dtype_name(t->dtype), saccade_dtype_name(dtype));
    FAIL_AT(t->rank != rank, SACCADE_EINVAL, name, 0, 0, "got rank %d, expected %d", t->rank,
            rank);
    FAIL_AT(!t->data, SACCADE_EINVAL, name, 0, 0, "got no data, expected a pointer");
    FAIL_AT((t->device.kind == SACCADE_CUDA) != is_cuda(plan), SACCADE_EINVAL, name, 0, 0,
            "got a tensor on the %s, expected one where back end %s runs",
            t->device.kind == SACCADE_CUDA ? "GPU" : "host", plan->solver->backend);
    for (int32_t i = 0; i < rank; i++) {
        FAIL_AT(t->shape[i] < 1 || t->shape[i] > (int64_t)1 << 30, SACCADE_EINVAL, name, 0, 0,
                "got length %lld in dimension %d, expected 1 to 2^30", (long long)t->shape[i],
                i);
        FAIL_AT(shape[i] && t->shape[i] != shape[i], SACCADE_EINVAL, name, 0, 0,
                "got length %lld in dimension %d, expected %lld", (long long)t->shape[i], i,
                (long long)shape[i]);
        FAIL_AT(t->stride[i] < 0, SACCADE_EINVAL, name, 0, 0,
                "got stride %lld in dimension %d, expected 0 or more", (long long)t->stride[i],
                i);
        shape[i] = t->shape[i];
    }
    FAIL_AT(rank == 4 && t->shape[3] > 1 && t->stride[3] != 1, SACCADE_EINVAL, name, 0, 0,
            "got stride %lld in the last dimension, expected 1", (long long)t->stride[3]);
    return SACCADE_OK;
}

/* Two elements of an output must not be one place in memory: a dimension's stride passes over
 * all elements of those with smaller strides. */
static saccade_status check_output(const saccade_tensor *t, const char *name,
                                   saccade_error *err)
{
    for (int32_t i = 0; i < t->rank; i++) {
        double last = 0; /* element of the inner dimensions; as an int it might wrap */
        for (int32_t j = 0; j < t->rank; j++)
            if (t->shape[j] > 1 && (t->stride[j] < t->stride[i] ||
                                    (t->stride[j] == t->stride[i] && j < i)))
                last += (double)(t->shape[j] - 1) * (double)t->stride[j];
        FAIL_AT(t->shape[i] > 1 && (double)t->stride[i] <= last, SACCADE_EINVAL, name, 0, 0,
                "got stride %lld in dimension %d of an output, expected over %.0f: elements "
                "that do not overlap",
                (long long)t->stride[i], i, last);
    }
    return SACCADE_OK;
}

static saccade_status check_stats(const saccade_plan *plan, const saccade_tensor *t,
                                  const char *name, const saccade_sizes *s, saccade_dtype dtype,
                                  saccade_error *err)
{
    int64_t shape[3] = {s->B, s->H, s->Q};
    if (t->dtype == SACCADE_NONE)
        return SACCADE_OK;
    TRY(check_tensor(plan, t, name, dtype, 3, shape, err));
    return check_output(t, name, err);
}

static saccade_status check_tensors(const saccade_plan *plan, const saccade_forward_args *a,
                                    saccade_sizes *out, saccade_error *err)
{
    const plan_problem *p = &plan->problem;
    const saccade_dtype stats = p->dtype == SACCADE_F64 ? SACCADE_F64 : SACCADE_F32;
    int64_t q[4] = {0, p->sizes.H, 0, p->sizes.D};
    TRY(check_tensor(plan, &a->q, "q", p->dtype, 4, q, err));
    int64_t k[4] = {q[0], p->sizes.Hkv, 0, p->sizes.D};
    TRY(check_tensor(plan, &a->k, "k", p->kv_dtype, 4, k, err));
    int64_t v[4] = {q[0], p->sizes.Hkv, k[2], p->sizes.Dv};
    TRY(check_tensor(plan, &a->v, "v", p->kv_dtype, 4, v, err));
    int64_t o[4] = {q[0], p->sizes.H, q[2], p->sizes.Dv};
    TRY(check_tensor(plan, &a->out, "out", p->dtype, 4, o, err));
    TRY(check_output(&a->out, "out", err));
    const saccade_sizes s = {q[0], p->sizes.H, p->sizes.Hkv, q[2], k[2], q[3], v[3]};
    TRY(check_stats(plan, &a->lse, "lse", &s, stats, err));
    TRY(check_stats(plan, &a->row_max, "row_max", &s, stats, err));
    *out = s;
    return SACCADE_OK;
}

static saccade_status check_position(const saccade_plan *plan, const saccade_tensor *t,
                                     const char *name, int64_t B, int64_t lo, int64_t hi,
                                     saccade_error *err)
{
    int64_t shape[1] = {B};
    if (t->dtype == SACCADE_NONE)
        return SACCADE_OK;
    FAIL_AT(t->rank != 0 && t->rank != 1, SACCADE_EINVAL, name, 0, 0,
            "got rank %d, expected 0 or 1", t->rank);
    if (t->rank || t->device.kind != SACCADE_CPU || !t->data) /* a host scalar goes by value */
        TRY(check_tensor(plan, t, name, SACCADE_I32, t->rank, shape, err));
    FAIL_AT(t->dtype != SACCADE_I32, SACCADE_EINVAL, name, 0, 0, "got dtype %s, expected i32",
            saccade_dtype_name(t->dtype));
    if (t->device.kind != SACCADE_CPU)
        return SACCADE_OK;
    for (int64_t b = 0; b < (t->rank ? B : 1); b++) {
        const int64_t x = ((const int32_t *)t->data)[t->rank ? b * t->stride[0] : 0];
        FAIL_AT(x < lo || x > hi, SACCADE_EINVAL, name, 0, 0,
                "got %lld for batch %lld, expected %lld to %lld", (long long)x, (long long)b,
                (long long)lo, (long long)hi);
    }
    return SACCADE_OK;
}

static saccade_status check_positions(const saccade_plan *plan, const saccade_positions *p,
                                      const saccade_sizes *s, saccade_error *err)
{
    const int64_t most = (int64_t)1 << 30;
    TRY(check_position(plan, &p->q_offset, "q_offset", s->B, -most, most, err));
    TRY(check_position(plan, &p->kv_offset, "kv_offset", s->B, -most, most, err));
    return check_position(plan, &p->kv_len, "kv_len", s->B, 0, s->KV, err);
}

static int has_capture(const mod_fn *fn, const char *name)
{
    for (uint32_t i = 0; fn && i < fn->n_captures; i++)
        if (strcmp(fn->captures[i].name, name) == 0)
            return 1;
    return 0;
}

static const saccade_binding *find_binding(const saccade_binding *bindings, int32_t n,
                                           const char *name)
{
    for (int32_t i = 0; i < n; i++)
        if (bindings[i].name && strcmp(bindings[i].name, name) == 0)
            return &bindings[i];
    return NULL;
}

/* Gives fn the bindings it names, and where one is missing the tensor a block mask was proven
 * from. */
static saccade_status resolve(const mod_fn *fn, const saccade_forward_args *a, int scan,
                              const saccade_block_mask *proven, saccade_tensor *tensors,
                              saccade_error *err)
{
    saccade_binding mine[MOD_MAX_CAPTURES];
    const mask_view *view = proven ? mask_get_view(proven) : NULL;
    const mod_fn *from = view && view->mod ? mod_function(view->mod) : NULL;
    int32_t n = 0;
    for (uint32_t i = 0; fn && i < fn->n_captures; i++) {
        const char *name = fn->captures[i].name;
        const saccade_binding *b = find_binding(a->bindings, a->n_bindings, name);
        if (b) {
            mine[n++] = *b;
            continue;
        }
        for (uint32_t j = 0; from && j < from->n_captures; j++)
            if (strcmp(from->captures[j].name, name) == 0)
                mine[n++] = (saccade_binding){name, view->env.tensors[j]};
    }
    const saccade_device_kind device = scan ? SACCADE_CPU : SACCADE_CUDA; /* no scan: CUDA */
    return fn ? eval_resolve_on(fn, mine, n, device, scan, tensors, err) : SACCADE_OK;
}

static saccade_status check_bindings(const saccade_plan *plan, const saccade_forward_args *a,
                                     saccade_error *err)
{
    FAIL_AT(a->n_bindings < 0 || a->n_bindings > 2 * MOD_MAX_CAPTURES ||
                (a->n_bindings && !a->bindings),
            SACCADE_EINVAL, "bindings", 0, 0, "got %d, expected 0 to %d and their array",
            a->n_bindings, 2 * MOD_MAX_CAPTURES);
    for (int32_t i = 0; i < a->n_bindings; i++) {
        const char *name = a->bindings[i].name;
        FAIL_AT(!name, SACCADE_EINVAL, "bindings", 0, 0, "got no name in entry %d", i);
        FAIL_AT(!has_capture(plan->problem.score, name) &&
                    !has_capture(plan->problem.mask, name),
                SACCADE_EINVAL, name, 0, 0, "got a binding that neither score nor mask names");
        FAIL_AT(find_binding(a->bindings, i, name), SACCADE_EINVAL, name, 0, 0,
                "got two bindings of one name, expected one");
    }
    return SACCADE_OK;
}

/* Equal nodes, operands and captures; places in the text do not count. */
static int same_function(const mod_fn *a, const mod_fn *b)
{
    if (a->n_nodes != b->n_nodes || a->n_args != b->n_args || a->n_captures != b->n_captures ||
        a->result != b->result)
        return 0;
    for (uint32_t i = 0; i < a->n_nodes; i++) {
        const mod_node *x = &a->nodes[i], *y = &b->nodes[i];
        if (x->op != y->op || x->type != y->type || x->n_args != y->n_args ||
            x->imm.i != y->imm.i || (x->n_args && x->args != y->args))
            return 0;
    }
    for (uint32_t i = 0; i < a->n_captures; i++)
        if (a->captures[i].dtype != b->captures[i].dtype ||
            a->captures[i].rank != b->captures[i].rank ||
            strcmp(a->captures[i].name, b->captures[i].name) != 0)
            return 0;
    return a->n_args == 0 || memcmp(a->args, b->args, a->n_args * sizeof *a->args) == 0;
}

static saccade_status check_block_mask(const saccade_plan *plan, const saccade_forward_args *a,
                                       const saccade_sizes *s, saccade_error *err)
{
    static const char name[] = "block_mask";
    const mask_view *view = mask_get_view(a->block_mask);
    const saccade_sizes *made = &view->sizes;
    FAIL_AT(made->Q != s->Q || made->KV != s->KV, SACCADE_EINVAL, name, 0, 0,
            "got one of %lld x %lld positions, expected %lld x %lld (see block_mask_window)",
            (long long)made->Q, (long long)made->KV, (long long)s->Q, (long long)s->KV);
    FAIL_AT(made->B != 1 && made->B != s->B, SACCADE_EINVAL, name, 0, 0,
            "got batch %lld, expected %lld or 1", (long long)made->B, (long long)s->B);
    FAIL_AT(made->H != 1 && made->H != s->H, SACCADE_EINVAL, name, 0, 0,
            "got %lld heads, expected %lld or 1", (long long)made->H, (long long)s->H);
    FAIL_AT(!view->mod != !plan->source_mask, SACCADE_EINVAL, name, 0, 0,
            "the plan %s a mask and the block mask %s one, expected both or neither",
            plan->source_mask ? "has" : "lacks", view->mod ? "has" : "lacks");
    FAIL_AT(view->mod && !same_function(mod_function(view->mod), plan->source_mask),
            SACCADE_EINVAL, name, 0, 0,
            "got one made from another mask, expected the plan's (saccade_block_mask_mod)");
    for (int64_t b = 0; !is_cuda(plan) && b < s->B; b++) {
        const plan_position p = plan_position_of(&a->positions, s->KV, b);
        const int64_t at = made->B == 1 ? 0 : b;
        FAIL_AT(p.q_offset != (view->q_offset ? view->q_offset[at] : 0) ||
                    p.kv_offset != (view->kv_offset ? view->kv_offset[at] : 0),
                SACCADE_EINVAL, name, 0, 0,
                "got other offsets for batch %lld than it was made for (q %d, kv %d)",
                (long long)b, p.q_offset, p.kv_offset);
    }
    return SACCADE_OK;
}

saccade_status saccade_plan_prepare(const saccade_plan *plan, const saccade_block_mask *mask,
                                    saccade_error *err)
{
    FAIL_IF(!plan || !mask, SACCADE_EINVAL, "prepare: got NULL, expected plan and block mask");
    return plan->solver->prepare(plan, mask, err);
}

saccade_status saccade_forward(const saccade_plan *plan, const saccade_forward_args *a,
                               saccade_error *err)
{
    saccade_tensor score_tensors[MOD_MAX_CAPTURES], mask_tensors[MOD_MAX_CAPTURES];
    FAIL_IF(!plan || !a, SACCADE_EINVAL, "forward: got NULL, expected plan and arguments");
    const plan_problem *p = &plan->problem;
    plan_run run = {.q = &a->q, .k = &a->k, .v = &a->v, .out = &a->out};
    TRY(check_tensors(plan, a, &run.sizes, err));
    TRY(check_positions(plan, &a->positions, &run.sizes, err));
    TRY(check_bindings(plan, a, err));
    if (a->block_mask)
        TRY(check_block_mask(plan, a, &run.sizes, err));
    const int scan = !is_cuda(plan);
    TRY(resolve(p->score, a, scan, NULL, score_tensors, err));
    TRY(resolve(p->mask, a, scan, a->block_mask, mask_tensors, err));
    const size_t bytes = plan->solver->workspace(plan, &run.sizes);
    FAIL_AT(a->workspace_bytes < bytes, SACCADE_EINVAL, "workspace", 0, 0,
            "got %zu bytes, expected %zu or more", a->workspace_bytes, bytes);
    FAIL_AT(bytes && !a->workspace, SACCADE_EINVAL, "workspace", 0, 0,
            "got no data, expected a pointer");
    FAIL_AT((uintptr_t)a->workspace % 64 != 0, SACCADE_EINVAL, "workspace", 0, 0,
            "got an address that is not a multiple of 64");
    run.lse = a->lse.dtype == SACCADE_NONE ? NULL : &a->lse;
    run.row_max = a->row_max.dtype == SACCADE_NONE ? NULL : &a->row_max;
    run.positions = a->positions;
    run.block_mask = a->block_mask;
    eval_sizes(&run.sizes, run.score_env.size);
    eval_sizes(&run.sizes, run.mask_env.size);
    run.score_env.tensors = score_tensors;
    run.mask_env.tensors = mask_tensors;
    run.workspace = a->workspace;
    run.workspace_bytes = a->workspace_bytes;
    run.stream = a->stream;
    return plan->solver->forward(plan, &run, err);
}

/* ---- index check ---- */

typedef struct index_walk {
    const mod_fn *fn;
    eval_env env;
    const saccade_sizes *sizes;
    const saccade_positions *positions;
    double *values;
} index_walk;

/* Position `at` of all B*H*Q*KV, counted with kv fastest. */
static saccade_status check_point(const index_walk *w, int64_t at, saccade_error *err)
{
    const saccade_sizes *s = w->sizes;
    const int64_t kv = at % s->KV, q = at / s->KV % s->Q, h = at / s->KV / s->Q % s->H;
    const int64_t b = at / s->KV / s->Q / s->H;
    const plan_position p = plan_position_of(w->positions, s->KV, b);
    const eval_point point = {(int32_t)b, (int32_t)h, (int32_t)q + p.q_offset,
                              (int32_t)kv + p.kv_offset, 0};
    eval_report report = {.node = -1};
    if (kv >= p.kv_len)
        return SACCADE_OK;
    eval_scalar(w->fn, &w->env, &point, w->values, &report);
    if (report.node < 0)
        return SACCADE_OK;
    const mod_node *n = &w->fn->nodes[report.node];
    return status_fail_at(err, SACCADE_EVALUE, w->fn->captures[n->imm.i].name, n->line,
                          n->column,
                          "got index %d in dimension %d at b %d, h %d, q %d, kv %d, expected 0 "
                          "to %lld (kernels clamp it)",
                          report.index, report.dim, point.b, point.h, point.q, point.kv,
                          (long long)report.size - 1);
}

saccade_status saccade_mod_check(const saccade_mod *mod, const saccade_sizes *sizes,
                                 const saccade_positions *positions,
                                 const saccade_binding *bindings, int32_t n_bindings,
                                 int64_t budget, saccade_error *err)
{
    static const saccade_positions none;
    saccade_tensor tensors[MOD_MAX_CAPTURES];
    saccade_status status = SACCADE_OK;
    index_walk w = {mod ? mod_function(mod) : NULL, {.tensors = tensors}, sizes,
                    positions ? positions : &none, NULL};
    FAIL_IF(!w.fn, SACCADE_EINVAL, "check: got no bound mod, expected one");
    FAIL_IF(sizes->B < 1 || sizes->H < 1 || sizes->Q < 1 || sizes->KV < 1, SACCADE_EINVAL,
            "check: got a size below 1");
    TRY(eval_resolve(w.fn, bindings, n_bindings, 1, tensors, err));
    eval_sizes(sizes, w.env.size);
    w.values = malloc(w.fn->n_nodes * sizeof *w.values);
    FAIL_IF_NULL(w.values);
    const double all = (double)sizes->B * sizes->H * sizes->Q * sizes->KV;
    const double most = budget > 0 ? (double)budget : 67108864.0;
    const double step = all > most ? all / most : 1;
    for (double at = 0; at < all; at += step)
        TRY_GOTO(check_point(&w, (int64_t)at, err));
out:
    free(w.values);
    if (status != SACCADE_OK)
        mod_show_place(mod, err);
    return status;
}
