/* The arguments of the backward run that follows a forward run. */
#ifndef SACCADE_TESTS_BACKWARD_ARGS_H
#define SACCADE_TESTS_BACKWARD_ARGS_H

#include "saccade.h"

/* All that both runs have in common but the workspace; gradients are the caller's to name. */
static inline saccade_backward_args backward_args_of(const saccade_forward_args *f)
{
    saccade_backward_args a;
    saccade_backward_args_init(&a);
    a.q = f->q;
    a.k = f->k;
    a.v = f->v;
    a.out = f->out;
    a.lse = f->lse;
    a.positions = f->positions;
    a.block_mask = f->block_mask;
    a.bindings = f->bindings;
    a.n_bindings = f->n_bindings;
    a.stream = f->stream;
    a.sinks = f->sinks;
    a.pages = f->pages;
    a.ragged = f->ragged;
    a.dropout = f->dropout;
    return a;
}

#endif
