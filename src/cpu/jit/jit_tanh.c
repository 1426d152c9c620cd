/* The table of the coarse tanh (jit_graph.h), for loops and for streams. */
#include "cpu/jit/jit_graph.h"

/* Chosen by the last two bits of the exponent, so that [32, 64) stands first; fitted to make
 * the largest error of tanh itself small. */
const float jit_tanh_terms[JIT_TABLE_TERMS][JIT_TABLE_SEGMENTS] = {
    {-0x1.bbcd04p-20f, -0x1.9bb1fap-21f, -0x1.b54122p-22f, -0x1.fec722p-23f, -0x1.2da7a4p-8f,
     -0x1.21e54cp-9f, -0x1.3649bep-10f, -0x1.692506p-11f, -0x1.6b884p-12f, -0x1.4f955ap-13f,
     -0x1.5fa51p-14f, -0x1.93c06ep-15f, -0x1.91fe18p-16f, -0x1.6fd958p-17f, -0x1.80a212p-18f,
     -0x1.ba7312p-19f},
    {0x1.fdcaccp-13f, 0x1.2210ep-13f, 0x1.6d3058p-14f, 0x1.ed82ep-15f, 0x1.5c9a9ap-4f,
     0x1.968c8ep-5f, 0x1.0053aep-5f, 0x1.57999ap-6f, 0x1.9e5662p-7f, 0x1.d2f8f6p-8f,
     0x1.211412p-8f, 0x1.7f137p-9f, 0x1.c9e7bp-10f, 0x1.008a1ep-10f, 0x1.3dacc6p-11f,
     0x1.a687b2p-12f},
    {-0x1.c5083ep-7f, -0x1.3d8e58p-7f, -0x1.db675p-8f, -0x1.747b3ep-8f, -0x1.32f87cp-1f,
     -0x1.b1f75ep-2f, -0x1.423286p-2f, -0x1.f1648cp-3f, -0x1.66da54p-3f, -0x1.ee9058p-4f,
     -0x1.6a5c3ep-4f, -0x1.159702p-4f, -0x1.8ec3a6p-5f, -0x1.129bbcp-5f, -0x1.9409e8p-6f,
     -0x1.37926p-6f},
    {0x1.befcccp-2f, 0x1.8735ccp-2f, 0x1.5f9bf6p-2f, 0x1.41c502p-2f, 0x1.0a37bcp+1f,
     0x1.ca06fp+0f, 0x1.92868ap+0f, 0x1.67e18ap+0f, 0x1.38ed38p+0f, 0x1.0af72p+0f,
     0x1.d45b88p-1f, 0x1.a33394p-1f, 0x1.6e3824p-1f, 0x1.3b1a48p-1f, 0x1.171b9cp-1f,
     0x1.f89a7cp-2f}};
