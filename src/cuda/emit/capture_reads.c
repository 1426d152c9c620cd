/* Which reads of captures a plan makes gradients of, from the facts of its score. */
#include "cuda/emit/emit.h"

int cu_find_reads(const plan_problem *p, cu_reads_found *out)
{
    int n = 0;
    out->n = 0;
    if (!cu_has_captures(p))
        return 1;
    for (uint32_t i = 0; i < p->score_facts->n_reads; i++) {
        const pass_read *read = &p->score_facts->reads[i];
        if (read->scatter == SCATTER_NONE || !(p->gradient_captures >> read->capture & 1))
            continue;
        if (n < CU_READS_MOST)
            out->read[n] = read;
        n++;
    }
    out->n = n < CU_READS_MOST ? n : CU_READS_MOST;
    return n <= CU_READS_MOST;
}

/* NULL: every index is of positions and captures alone. */
const char *cu_reads_by_score(const plan_problem *p)
{
    cu_reads_found reads;
    cu_find_reads(p, &reads);
    for (int i = 0; i < reads.n; i++)
        for (int d = 0; d < reads.read[i]->rank; d++)
            if (reads.read[i]->index[d].varies & DEP_SCORE)
                return p->score->captures[reads.read[i]->capture].name;
    return NULL;
}

int cu_read_has_own(const pass_read *read, int var)
{
    for (int d = 0; d < read->rank; d++) {
        const pass_index *index = &read->index[d];
        int others = 0;
        for (int i = 0; i < 4; i++)
            others |= i != var && index->line.coef[i] != 0;
        if (pass_index_is_line(index) && !others
            && (index->line.coef[var] == 1 || index->line.coef[var] == -1))
            return 1;
    }
    return 0;
}
