/* saccade explain: the plan of a problem, in the library's own words. */
#include "files.h"
#include "problem_text.h"

static saccade_status print_plan(const cli_args *args, const job *j, saccade_dtype dtype,
                                 saccade_error *err)
{
    engine_options options;
    saccade_context *context;
    saccade_plan *plan = NULL;
    char *text;
    CLI_TRY(files_engine_options(args, &options, err));
    if (args->backward || args->grad_of.n)
        options.gradients = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V;
    if (args->grad_of.n) {
        options.gradients |= SACCADE_GRADIENT_CAPTURES;
        options.grad_of = &args->grad_of;
    }
    CLI_TRY(engine_context(options.threads, options.level, &context, err));
    saccade_status status = engine_plan(j, &options, dtype, context, &plan, err);
    if (status == SACCADE_OK)
        status = saccade_plan_explain(plan, &text, err);
    if (status == SACCADE_OK) {
        fputs(text, stdout);
        saccade_free(text);
    }
    saccade_plan_destroy(plan);
    saccade_context_destroy(context);
    return status;
}

saccade_status cmd_explain(const cli_args *args, saccade_error *err)
{
    saccade_sizes sizes;
    saccade_dtype dtype;
    job j;
    CLI_FAIL_IF(!args->problem == !args->q_file, SACCADE_EINVAL, "explain",
                "got %s, expected either --problem or -q -k -v",
                args->problem ? "both" : "no problem");
    if (args->problem) {
        CLI_TRY(problem_read(args->problem, &sizes, &dtype, err));
        CLI_TRY(cli_parse_dtype(args->dtype, dtype, &dtype, err));
    } else {
        file_tensors f;
        CLI_TRY(files_load(args, &f, err));
        sizes = f.sizes;
        dtype = f.t.q.dtype;
        files_free(&f);
    }
    CLI_TRY(job_open(args, &sizes, &j, err));
    const saccade_status status = print_plan(args, &j, dtype, err);
    job_close(&j);
    return status;
}
