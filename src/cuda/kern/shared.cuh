/* Tiles in shared memory: rows of 128 bytes, their 16-byte chunks swizzled by the row (as TMA
 * writes them), panels of such rows side by side; and loads of fragments from them. */
#pragma once

DEVICE u32 swizzled(u32 base, int panel_bytes, int row, int chunk)
{
    return base + (chunk / 8) * panel_bytes + row * 128 + (((chunk & 7) ^ (row & 7)) * 16);
}

DEVICE void load_matrices(u32 (&x)[4], u32 at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}

DEVICE void load_matrices_transposed(u32 (&x)[4], u32 at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}

DEVICE void load_words(u32 (&x)[4], u32 at)
{
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}

DEVICE void store_words(u32 at, const float *x)
{
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(x[0]), "f"(x[1]),
                 "f"(x[2]), "f"(x[3])
                 : "memory");
}
