/* Two runs in place of one whose batches share keys: one over what is shared, in which the rows
 * of a group, cut into pieces, are rows of ragged sequences; and one over what each batch has
 * of its own. Here is what their lists hold, and what is merged. C and CUDA include this one
 * file. Numbers that lie on a GPU are brought into range here. */
#ifndef SACCADE_PLAN_PREFIX_LISTS_H
#define SACCADE_PLAN_PREFIX_LISTS_H

#ifdef __CUDACC__
#define PREFIX_INLINE static __device__ __forceinline__
#else
#define PREFIX_INLINE static inline
#endif

typedef struct prefix_lists {
    const int *groups, *shared; /* plan_prefix */
    const int *table;           /* [B], table_step apart, of `entries` */
    const int *len;             /* live keys of a batch; NULL: all_len */
    long long table_step, len_step;
    int B, Q, n, entries, all_len, page;
    int piece, pieces; /* rows of a piece, and how many pieces at most */
    int most;          /* pages that a group shares at most */
    int *piece_first;  /* [pieces + 1] first rows, counted over all batches */
    int *piece_len;    /* [pieces] keys */
    int *piece_table;  /* [pieces][most] */
    int *begin, *rest; /* [B] where a batch's own keys begin, and how many there are */
    int *rest_table;   /* [B][entries] */
} prefix_lists;

PREFIX_INLINE int prefix_within(int x, int least, int most)
{
    return x < least ? least : x > most ? most : x;
}

PREFIX_INLINE int prefix_first(const int *groups, int g, int B)
{
    return prefix_within(groups[g], 0, B);
}

/* Pages that a group shares. */
PREFIX_INLINE int prefix_pages(const prefix_lists *l, int g)
{
    return prefix_within(l->shared[g] / l->page, 0, l->most);
}

/* A piece's first row, and its group; -1 and the end of the last group past all pieces. */
typedef struct prefix_piece {
    int row, group;
} prefix_piece;

/* A group's first row, and how many pieces its rows are cut into. */
PREFIX_INLINE int prefix_row(const prefix_lists *l, int g)
{
    return prefix_first(l->groups, g, l->B) * l->Q;
}

PREFIX_INLINE int prefix_pieces(const prefix_lists *l, int g)
{
    const int rows = prefix_row(l, g + 1) - prefix_row(l, g);
    return rows > 0 ? (rows + l->piece - 1) / l->piece : 0;
}

/* Looks at all groups before: for one piece on its own, as a CTA of a GPU writes it. */
PREFIX_INLINE prefix_piece prefix_find_piece(const prefix_lists *l, int i)
{
    prefix_piece found = {prefix_row(l, l->n), -1};
    int before = 0;
    for (int g = 0; g < l->n; g++) {
        const int n = prefix_pieces(l, g);
        if (i < before + n) {
            found.row = prefix_row(l, g) + (i - before) * l->piece;
            found.group = g;
            return found;
        }
        before += n;
    }
    return found;
}

/* -1: none. For one batch on its own too. */
PREFIX_INLINE int prefix_find_group(const prefix_lists *l, int b)
{
    for (int g = 0; g < l->n; g++)
        if (b >= l->groups[g] && b < l->groups[g + 1])
            return g;
    return -1;
}

/* A piece's numbers and entries `from`, `from` + `step`, ... of its table, which is that of the
 * group's first batch, -1 past its pages; i may be `pieces`. */
PREFIX_INLINE void prefix_write_piece(const prefix_lists *l, int i, prefix_piece p, int from,
                                      int step)
{
    const int pages = p.group < 0 ? 0 : prefix_pages(l, p.group);
    if (from == 0)
        l->piece_first[i] = p.row;
    if (i == l->pieces)
        return;
    if (from == 0)
        l->piece_len[i] = pages * l->page;
    const int first = p.group < 0 ? 0 : prefix_first(l->groups, p.group, l->B);
    for (int j = from; j < l->most; j += step)
        l->piece_table[(long long)i * l->most + j] =
            j < pages ? l->table[first * l->table_step + j] : -1;
}

/* prefix_write_piece for the own keys of a batch of group g, -1 without one, those behind the
 * shared ones: where they begin, how many there are, and entries of their table, -1 past its
 * pages. */
PREFIX_INLINE void prefix_write_rest(const prefix_lists *l, int b, int g, int from, int step)
{
    const int pages = g < 0 ? 0 : prefix_pages(l, g);
    const int len = l->len ? l->len[b * l->len_step] : l->all_len;
    const int rest = prefix_within(len, 0, l->all_len) - pages * l->page;
    if (from == 0) {
        l->begin[b] = pages * l->page;
        l->rest[b] = rest > 0 ? rest : 0;
    }
    for (int j = from; j < l->entries; j += step)
        l->rest_table[(long long)b * l->entries + j] =
            j < l->entries - pages && j * l->page < rest
                ? l->table[b * l->table_step + pages + j]
                : -1;
}

/* What is merged on a GPU: parts [B][Q][H][Dv] and their lse and row maxima [B][Q][H]. Rows of
 * no group have one part. */
typedef struct prefix_merge {
    const float *out[2], *lse[2], *max[2]; /* over what is shared, and own; max: or NULL */
    const int *groups;
    void *to;
    float *to_lse, *to_max; /* or NULL */
    long long to_stride[3], lse_stride[3], max_stride[3];
    int dtype; /* of saccade_dtype: 20 f16, 21 bf16, 22 f32 */
    int B, H, Q, Dv, n;
} prefix_merge;

#endif
