/* What a plan's backward is, how it sums gradients of captures and why. */
#include "cpu/backward/backward.h"

static void say_gradients(const saccade_plan *plan, const cpu_backward_plan *b, strbuf *out)
{
    const mod_fn *score = plan->problem.score;
    strbuf_printf(out, "gradients:%s%s%s", b->has_dq ? " q" : "", b->has_dk ? " k" : "",
                  b->has_dv ? " v" : "");
    for (uint32_t c = 0; score && c < score->n_captures; c++)
        if (b->captures >> c & 1)
            strbuf_printf(out, " %s", score->captures[c].name);
    strbuf_puts(out, "\n");
}

static const char *engine_of(const saccade_plan *plan, const cpu_backward_plan *b)
{
    if (!plan->problem.score)
        return "none";
    if (b->n_results > 1)
        return b->jit ? "value and derivatives compiled as one graph"
                      : "value and derivatives in the strip interpreter";
    return "as forward's; its slope is one number a head, folded into dP's scale";
}

static const char *way_of(const backward_read *read)
{
    switch (read->axis) {
    case BACKWARD_HEAD:
        return "one sum per chunk of keys and head: the index varies with b and h alone";
    case BACKWARD_ROW:
        return "sums along rows of tiles: the index varies with q, not with kv";
    case BACKWARD_COLUMN:
        return "sums along columns of tiles: the index varies with kv, not with q";
    case BACKWARD_DIAGONAL:
        return "sums along diagonals of tiles: the index varies with q - kv alone";
    default:
        break;
    }
    if (read->is_slanted && read->is_dense)
        return "stored once by the owner of the keys: each position has an element of its own "
               "(where keys lie apart, or one is added to or shared by heads or batches, "
               "summed in place; where one leaves the tensor or counts from its end, each "
               "position adds for itself)";
    if (backward_may_fix(read))
        return "in fixed point by all threads, 64-bit integers whose sums have no order: the "
               "index varies with q and kv freely (on one thread in the order of items where V "
               "or dO are not finite, or the workspace is not saccade_backward_workspace's)";
    if (read->is_dense && read->is_own)
        return "stored once by the owner of the keys: each position has an element of its own "
               "(where one is added to, leaves the tensor or is shared by heads or batches, "
               "summed in place)";
    if (read->is_dense)
        return "in place by the owner of the keys: each index is q, kv or neither plus a "
               "constant (where one leaves the tensor, position by position on one thread)";
    return "position by position on one thread, in the order of items: the index varies with q "
           "and kv freely, and so does the derivative, which leaves fixed point no bound";
}

static void say_reads(const saccade_plan *plan, const cpu_backward_plan *b, strbuf *out)
{
    const mod_fn *score = plan->problem.score;
    for (uint32_t n = 0; n < b->n_reads; n++) {
        const backward_read *read = &b->reads[n];
        const mod_node *node = &score->nodes[read->node];
        strbuf_printf(out, "  gradient of %s at %d:%d: %s\n",
                      score->captures[read->capture].name, node->line, node->column,
                      way_of(read));
    }
}

void cpu_backward_explain(const saccade_plan *plan, const cpu_backward_plan *b, strbuf *out)
{
    const plan_problem *p = &plan->problem;
    const saccade_sizes *s = &p->sizes;
    const backward_geometry g = backward_geometry_of(plan, b, s);
    say_gradients(plan, b, out);
    strbuf_printf(out,
                  "backward: tiles of %d rows x %d keys, made again from Q, K, V and lse\n"
                  "  products: %s; steps of %d row%s\n  score: %s\n",
                  g.rows, g.keys, b->kernels->block->name, b->kernels->step,
                  b->kernels->step > 1 ? "s" : "", engine_of(plan, b));
    say_reads(plan, b, out);
    if (backward_has_weighing(plan, b))
        strbuf_puts(out, "  delta: from P and dP in a first pass, two products more, since "
                         "sums over a row's keys would add up what rounding O leaves in "
                         "dO . O\n");
    if (p->has_chunks)
        strbuf_puts(out, "  dk, dv: by logical key in f32, then summed by rows of the table\n");
    if (!plan_has_lengths(p))
        return;
    strbuf_printf(out,
                  "  work: %lld (batch, key head) x %lld chunks of keys, %lld at a time\n"
                  "  dq: %s\n  workspace: %zu bytes\n",
                  (long long)g.heads, (long long)g.chunks, (long long)g.wave,
                  !b->has_dq     ? "not wanted"
                  : g.chunks > 1 ? "a sum per chunk in f32, added in the order of chunks"
                                 : "one sum in f32",
                  cpu_backward_workspace(plan, b, s, NULL));
}
