/* Forward cases on a CUDA device. */
#include "support/device_case.h"

#include "api/api.h"
#include "base/convert.h"
#include "cuda/cuda.h"

#include <dlfcn.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { GUARD = 64 }; /* elements around every tensor */

void *device_driver_call(const char *name)
{
    static void *library;
    if (!library)
        library = dlopen("libcuda.so.1", RTLD_NOW);
    assert_non_null(library);
    void *call = dlsym(library, name);
    assert_non_null(call);
    return call;
}

void skip_without_nvrtc(void)
{
    static int is_known, is_there;
    cu_image image;
    saccade_error err = {0};
    if (!is_known && cu_compile_peak("sm_80", &image, &err) == SACCADE_OK) {
        free(image.code);
        is_there = 1;
    }
    if (err.status == SACCADE_EINTERNAL) /* there is one, and it refuses our text */
        fail_msg("%s", err.message);
    is_known = 1;
    if (is_there)
        return;
    print_message("no NVRTC on this machine: nothing compiled\n");
    skip();
}

void expect_program_compiles(const char *file, const char *arch)
{
    const char *const archs[] = {"sm_80", arch};
    cu_image image;
    saccade_error err = {0};
    skip_without_nvrtc();
    for (int i = 0; i < 2; i++) {
        if (cu_compile(file, NULL, 0, archs[i], &image, &err))
            fail_msg("%s", err.message);
        assert_int_equal(image.report.spill_bytes, 0);
        free(image.code);
    }
}

saccade_plan *compiled_plan(const saccade_problem *p, int is_part)
{
    saccade_error err = {0};
    saccade_plan *plan;
    skip_without_nvrtc();
    if (api_plan_create(NULL, p, is_part, &plan, &err))
        fail_msg("%s", err.message);
    return plan;
}

void expect_plan_does_not_spill(const saccade_problem *p, int is_part, int program)
{
    saccade_plan *plan = compiled_plan(p, is_part);
    const cu_image *image = &((const cu_state *)plan->state)->programs[program].image;
    assert_non_null(image->code);
    assert_int_equal(image->report.spill_bytes, 0);
    saccade_plan_destroy(plan);
}

int is_device_case(int n)
{
    const char *cases = getenv("SACCADE_CUDA_CASES"), *seed = getenv("SACCADE_CUDA_SEED");
    const int first = seed ? atoi(seed) : 0;
    return n >= first && (!cases || n < first + atoi(cases));
}

int has_device(void)
{
    int32_t n = 0;
    const int found = saccade_device_count(&n, NULL) == SACCADE_OK && n > 0;
    if (!found)
        print_message("no CUDA device on this machine: no kernel ran\n");
    return found;
}

static int fail_with(device_case *d, const char *what, const char *message)
{
    const forward_case *c = &d->r->c;
    snprintf(d->why, sizeof d->why,
             "%s: %.300s\n  --problem \"%s\" mask %s score %s layout %d data %d offsets %d %d "
             "kv_len %d seed %llu arch %s shift %d block mask %d",
             what, message, c->problem, c->mask ? c->mask : "none",
             c->score ? c->score : "none", (int)c->layout, (int)c->data, c->q_offset,
             c->kv_offset, c->kv_len, (unsigned long long)c->seed,
             d->options.arch ? d->options.arch : "native", d->options.shift,
             d->options.has_block_mask);
    return 0;
}

static int ok(device_case *d, const char *what, saccade_status status, const saccade_error *err)
{
    return status == SACCADE_OK || fail_with(d, what, err->message);
}

/* ---- to the device ---- */

static void *device_memory(device_case *d, size_t bytes)
{
    saccade_error err = {0};
    void *memory = NULL;
    if (d->n_memory == DEVICE_MEMORY) {
        fail_with(d, "memory", "too many tensors");
        return NULL;
    }
    if (!ok(d, "memory", saccade_device_alloc(d->options.device, bytes, &memory, &err), &err))
        return NULL;
    return d->memory[d->n_memory++] = memory;
}

static int upload(device_case *d, void *to, const void *from, size_t bytes)
{
    saccade_error err = {0};
    return ok(d, "copy", saccade_device_copy(d->options.device, to, from, bytes, &err), &err);
}

static saccade_tensor here(const device_case *d, saccade_tensor t, void *data)
{
    t.data = data;
    t.device = (saccade_device){SACCADE_CUDA, d->options.device};
    return t;
}

/* with all that lies around it */
static int move_input(device_case *d, const case_tensor *from, saccade_tensor *out)
{
    const size_t shift = (size_t)d->options.shift * saccade_dtype_bytes(from->t.dtype);
    char *memory = device_memory(d, from->bytes + shift);
    if (!memory || !upload(d, memory + shift, from->memory, from->bytes))
        return 0;
    *out = here(d, from->t, memory + shift + ((char *)from->t.data - (char *)from->memory));
    return 1;
}

/* a dense tensor of the host: a capture or a position */
static int move_dense(device_case *d, saccade_tensor *t)
{
    size_t bytes = saccade_dtype_bytes(t->dtype);
    if (t->dtype == SACCADE_NONE || t->rank == 0)
        return 1;
    for (int32_t i = 0; i < t->rank; i++)
        bytes *= (size_t)t->shape[i];
    void *memory = device_memory(d, bytes);
    if (!memory || !upload(d, memory, t->data, bytes))
        return 0;
    *t = here(d, *t, memory);
    return 1;
}

/* Strides as the case's layout has them. */
static int make_output(device_case *d, saccade_dtype dtype, int32_t rank, const int64_t *shape,
                       device_output *o)
{
    const int is_padded = d->r->c.layout == CASE_PADDED;
    const size_t each = saccade_dtype_bytes(dtype), shift = rank == 4 ? d->options.shift : 0;
    int64_t step = 1, past = 1;
    o->t = (saccade_tensor){.dtype = dtype, .rank = rank};
    for (int32_t i = rank - 1; i >= 0; i--) {
        o->t.shape[i] = shape[i];
        o->t.stride[i] = step;
        step = step * shape[i] + (is_padded && i ? 5 : 0);
        past += (shape[i] - 1) * o->t.stride[i];
    }
    o->bytes = ((size_t)past + 2 * GUARD + shift) * each;
    o->base = device_memory(d, o->bytes);
    if (!o->base)
        return 0;
    o->t = here(d, o->t, (char *)o->base + (GUARD + shift) * each);
    return 1;
}

static int make_outputs(device_case *d)
{
    const saccade_sizes *s = &d->r->sizes;
    const int64_t shape[4] = {s->B, s->H, s->Q, s->Dv};
    return make_output(d, d->r->dtype, 4, shape, &d->out)
           && make_output(d, SACCADE_F32, 3, shape, &d->lse)
           && make_output(d, SACCADE_F32, 3, shape, &d->row_max) && device_case_clear(d);
}

/* ---- open ---- */

static int move_all(device_case *d)
{
    saccade_forward_args *a = &d->args;
    if (!move_input(d, &d->r->q, &d->q) || !move_input(d, &d->r->k, &d->k) || !make_outputs(d))
        return 0;
    if (d->r->c.layout == CASE_LATENT) {
        d->v = d->k;
        d->v.shape[3] = d->r->v.t.shape[3];
    } else if (!move_input(d, &d->r->v, &d->v)) {
        return 0;
    }
    for (int n = 0; n < 3; n++) {
        d->position[n] = d->r->position[n];
        if (!move_dense(d, &d->position[n]))
            return 0;
    }
    d->at = d->r->at;
    d->at.q_offset = d->at.q_offset ? &d->position[0] : NULL;
    d->at.kv_offset = d->at.kv_offset ? &d->position[1] : NULL;
    d->at.kv_len = d->at.kv_len ? &d->position[2] : NULL;
    a->positions = &d->at;
    a->q = &d->q;
    a->k = &d->k;
    a->v = &d->v;
    for (int32_t i = 0; i < a->n_bindings; i++) {
        d->bindings[i] = a->bindings[i];
        if (!move_dense(d, &d->bindings[i].tensor))
            return 0;
    }
    a->bindings = d->bindings;
    a->out = &d->out.t;
    a->lse = &d->lse.t;
    a->row_max = &d->row_max.t;
    return 1;
}

/* A block mask's lists, with another mod or none. */
static int import_lists(device_case *d, const saccade_block_mask *made)
{
    saccade_error err = {0};
    saccade_block_indices x = {0};
    int32_t **const lists[4] = {&x.kv_num_blocks, &x.full_kv_num_blocks, &x.kv_indices,
                                &x.full_kv_indices};
    int good = ok(d, "lists", saccade_block_mask_export(made, 0, &x, &err), &err);
    for (int n = 0; n < 4 && good; n++) {
        *lists[n] = calloc((size_t)(x.B * x.H * x.rows * (n < 2 ? 1 : x.columns)), 4);
        good = *lists[n] || fail_with(d, "lists", "no memory");
    }
    good = good && ok(d, "lists", saccade_block_mask_export(made, 0, &x, &err), &err)
           && ok(d, "import",
                 saccade_block_mask_import(NULL, &x, d->mod, &d->r->sizes,
                                           d->r->args.positions, NULL, 0, &d->mask, &err),
                 &err);
    for (int n = 0; n < 4; n++)
        free(*lists[n]);
    return good;
}

static int make_imported(device_case *d)
{
    const int block = d->options.imported_block;
    const saccade_block_mask_options options = {.size = sizeof options,
                                                .block_q = block,
                                                .block_kv = block};
    saccade_block_mask *made = NULL;
    saccade_error err = {0};
    const int good =
        ok(d, "block mask",
           saccade_block_mask_create(NULL, d->r->mask, &d->r->sizes, d->r->args.positions,
                                     NULL, 0, &options, &made, &err),
           &err)
        && import_lists(d, made)
        && ok(d, "prepare", saccade_plan_prepare(d->plan, d->mask, &err), &err);
    saccade_block_mask_destroy(made);
    return good;
}

/* The mask alone must be told only its own captures. */
static int make_mask(device_case *d)
{
    const case_run *r = d->r;
    saccade_binding mine[8];
    saccade_error err = {0};
    int32_t n = 0;
    if (d->options.imported_block)
        return make_imported(d);
    if (!d->options.has_block_mask || !r->mask)
        return 1;
    for (int32_t i = 0; i < r->args.n_bindings; i++)
        for (int32_t j = 0; j < saccade_mod_capture_count(r->mask); j++)
            if (strcmp(saccade_mod_capture(r->mask, j).name, r->args.bindings[i].name) == 0)
                mine[n++] = r->args.bindings[i];
    return ok(d, "block mask",
              saccade_block_mask_create(NULL, r->mask, &r->sizes, r->args.positions, mine, n,
                                        NULL, &d->mask, &err),
              &err)
           && ok(d, "prepare", saccade_plan_prepare(d->plan, d->mask, &err), &err);
}

static int make_plan(device_case *d)
{
    saccade_error err = {0};
    saccade_problem problem = d->r->problem;
    d->plan = d->options.plan;
    problem.backend = "cuda";
    problem.arch = d->options.arch;
    if (d->options.imported_block) {
        const char *text = d->options.imported_mod;
        problem.mask = d->mod = text ? case_mod(SACCADE_MASK, text) : NULL;
    }
    return d->plan || ok(d, "plan", saccade_plan_create(NULL, &problem, &d->plan, &err), &err);
}

/* Plans and block masks are made for the device whose context is current. */
static int make_there(device_case *d)
{
    const cu_driver *driver;
    saccade_error err = {0};
    void *pushed = NULL;
    if (!ok(d, "driver", cu_get_driver(&driver, &err), &err)
        || !ok(d, "context", cu_enter(driver, d->options.device, &pushed, &err), &err))
        return 0;
    const int good = make_plan(d) && make_mask(d);
    cu_leave(driver, pushed);
    return good;
}

int device_case_open(const case_run *r, const device_options *options, device_case *out)
{
    *out = (device_case){.r = r, .options = *options, .args = r->args};
    if (!make_there(out) || !move_all(out))
        return 0;
    out->args.block_mask = out->mask;
    out->args.workspace_bytes = saccade_plan_workspace(out->plan, &r->sizes);
    out->args.workspace = device_memory(out, out->args.workspace_bytes);
    return out->args.workspace != NULL;
}

void device_case_close(device_case *d)
{
    for (int i = 0; i < d->n_memory; i++)
        saccade_device_free(d->options.device, d->memory[i]);
    saccade_block_mask_destroy(d->mask);
    saccade_mod_destroy(d->mod);
    if (!d->options.plan)
        saccade_plan_destroy(d->plan);
}

/* ---- run ---- */

int device_case_clear(device_case *d)
{
    const device_output *const all[] = {&d->out, &d->lse, &d->row_max};
    for (int i = 0; i < 3; i++) {
        char *pattern = malloc(all[i]->bytes);
        if (!pattern)
            return fail_with(d, "clear", "no memory");
        memset(pattern, 0xff, all[i]->bytes);
        const int done = upload(d, all[i]->base, pattern, all[i]->bytes);
        free(pattern);
        if (!done)
            return 0;
    }
    return 1;
}

int device_case_run(device_case *d)
{
    saccade_error err = {0};
    return ok(d, "forward", saccade_forward(d->plan, &d->args, &err), &err)
           && ok(d, "wait", saccade_device_synchronize(d->options.device, &err), &err);
}

/* ---- compare ---- */

static int is_within(double x, double gold, double most)
{
    if (isfinite(gold))
        return fabs(x - gold) <= most;
    return isnan(gold) ? isnan(x) : x == gold;
}

static int compare_row(device_case *d, const device_output *o, const char *name, char *row,
                       int64_t at, int64_t E, const double *gold, double most)
{
    const size_t each = saccade_dtype_bytes(o->t.dtype);
    for (int64_t e = 0; e < E; e++) {
        const double x = convert_element(o->t.dtype, row + (size_t)e * each);
        if (!is_within(x, gold[at + e], most)) {
            char text[160];
            snprintf(text, sizeof text, "%s[%lld]: got %.9g, expected %.9g within %.3g", name,
                     (long long)(at + e), x, gold[at + e], most);
            return fail_with(d, "compare", text);
        }
        memset(row + (size_t)e * each, 0xff, each);
    }
    return 1;
}

/* Every element, then every byte that is none. */
static int compare(device_case *d, const device_output *o, const char *name, const double *gold,
                   double most)
{
    const saccade_sizes *s = &d->r->sizes;
    const int64_t E = o->t.rank == 4 ? s->Dv : 1, *step = o->t.stride;
    const size_t each = saccade_dtype_bytes(o->t.dtype);
    saccade_error err = {0};
    char *host = malloc(o->bytes);
    if (!host)
        return fail_with(d, name, "no memory");
    char *first = host + ((char *)o->t.data - (char *)o->base);
    int good = ok(d, name,
                  saccade_device_copy(d->options.device, host, o->base, o->bytes, &err), &err);
    int64_t at = 0;
    for (int64_t b = 0; b < s->B; b++)
        for (int64_t h = 0; h < s->H; h++)
            for (int64_t m = 0; m < s->Q && good; m++, at += E) {
                char *row = first + (size_t)(b * step[0] + h * step[1] + m * step[2]) * each;
                good = compare_row(d, o, name, row, at, E, gold, most);
            }
    for (size_t i = 0; i < o->bytes && good; i++)
        if ((unsigned char)host[i] != 0xff)
            good = fail_with(d, name, "a byte outside the tensor changed");
    free(host);
    return good;
}

/* Tensor cores add 16 products to a sum in one step: every term is cut to a quarter ulp of the
 * largest one, the total to an ulp, always towards 0 (docs/lab/015). A step takes up to 3/4
 * ulp from the sum by the latter; the former's signs vary. Plain sums round. With one huge
 * product among small ones (CASE_LOW), or products of one sign (CASE_ASCENDING), all steps err
 * the same way, an ulp each in lse. */
static double truncation(const case_run *r)
{
    const double D = (double)r->sizes.D, KV = (double)r->sizes.KV, steps = ceil(D / 16);
    const double scale = r->c.scale == 0 ? 1 / sqrt(D) : fabs((double)r->c.scale);
    double sum = 0;
    if (r->c.data == CASE_LOW || r->c.data == CASE_CLIFF)
        sum = 61 * 61.5 * sqrt(D);
    else if (r->c.data == CASE_ASCENDING)
        sum = D * (KV < 512 ? KV : 512) / 128;
    if (sum == 0 || r->dtype == SACCADE_F32)
        return 0;
    return steps * ldexp(1, ilogb(sum) - 23) * scale;
}

int device_case_check(device_case *d)
{
    const case_run *r = d->r;
    const double most = r->lse_bound + truncation(r);
    return compare(d, &d->out, "out", r->out, r->out_bound)
           && compare(d, &d->lse, "lse", r->lse, most)
           /* the largest rounding error of a row, where lse has their mean */
           && (!d->args.row_max
               || compare(d, &d->row_max, "row_max", r->row_max, 2 * most));
}

static char *copy_of(device_case *d, const device_output *o)
{
    char *host = malloc(o->bytes);
    if (host && saccade_device_copy(d->options.device, host, o->base, o->bytes, NULL)) {
        free(host);
        host = NULL;
    }
    return host;
}

/* The same bits again, into cleared outputs. */
static int repeat(device_case *d)
{
    const device_output *const all[] = {&d->out, &d->lse};
    char *before[2] = {copy_of(d, all[0]), copy_of(d, all[1])};
    int good = before[0] && before[1] ? device_case_clear(d) && device_case_run(d)
                                      : fail_with(d, "out", "no copy of the results");
    for (int i = 0; i < 2; i++) {
        char *after = good ? copy_of(d, all[i]) : NULL;
        if (good && (!after || memcmp(before[i], after, all[i]->bytes) != 0))
            good = fail_with(d, i ? "lse" : "out", "other bits in a second run");
        free(after);
        free(before[i]);
    }
    return good;
}

int device_case_all(const case_run *r, const device_options *options, char *why)
{
    device_case d;
    int good = device_case_open(r, options, &d);
    for (int pass = 0; pass < 2 && good; pass++) {
        if (pass) /* without row maxima another program runs */
            d.args.row_max = NULL;
        good =
            device_case_clear(&d) && device_case_run(&d) && device_case_check(&d) && repeat(&d);
    }
    memcpy(why, d.why, DEVICE_WHY);
    device_case_close(&d);
    return good;
}

int device_case_holds(const forward_case *c, const device_options *options)
{
    char why[DEVICE_WHY];
    case_run r;
    case_make(c, &r);
    const int good = device_case_all(&r, options, why);
    if (!good)
        print_message("%s\n", why);
    case_free(&r);
    return good;
}
