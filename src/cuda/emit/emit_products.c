/* CUDA text of the two wgmma products, whose register lists depend on the tile. */
#include "cuda/emit/emit.h"

static void put_list(strbuf *out, const char *format, int n)
{
    for (int i = 0; i < n; i++) {
        strbuf_puts(out, i ? ", " : "");
        strbuf_printf(out, format[0] == '%' ? "%%%d" : "\"+f\"(d[%d])", i);
        if (i % 12 == 11 && format[0] != '%')
            strbuf_puts(out, "\n          ");
    }
}

void cu_emit_products(const cu_tile *tile, int E, int is_f16, strbuf *out)
{
    const char *type = is_f16 ? "f16" : "bf16";
    const int s = tile->keys / 2, o = E / 2;
    strbuf_printf(
        out,
        "/* generated: S = Q K^T (both in shared memory) and O += P V (P in registers) */\n"
        "#pragma once\n\n"
        "DEVICE void wgmma_qk(float (&d)[%d], u64 a, u64 b, int add)\n{\n"
        "    asm volatile(\"{.reg .pred p; setp.ne.b32 p, %%%d, 0;\\n\"\n"
        "        \"wgmma.mma_async.sync.aligned.m64n%dk16.f32.%s.%s {",
        s, s + 2, tile->keys, type, type);
    put_list(out, "%", s);
    strbuf_printf(out, "}, %%%d, %%%d, p, 1, 1, 0, 0;}\"\n        : ", s, s + 1);
    put_list(out, "d", s);
    strbuf_printf(
        out,
        "\n        : \"l\"(a), \"l\"(b), \"r\"(add));\n}\n\n"
        "DEVICE void wgmma_pv(float (&d)[%d], u32 a0, u32 a1, u32 a2, u32 a3, u64 b)\n{\n"
        "    asm volatile(\"wgmma.mma_async.sync.aligned.m64n%dk16.f32.%s.%s {",
        o, E, type, type);
    put_list(out, "%", o);
    strbuf_printf(out, "}, {%%%d, %%%d, %%%d, %%%d}, %%%d, 1, 1, 1, 1;\"\n        : ", o, o + 1,
                  o + 2, o + 3, o + 4);
    put_list(out, "d", o);
    strbuf_puts(out, "\n        : \"r\"(a0), \"r\"(a1), \"r\"(a2), \"r\"(a3), \"l\"(b));\n}\n");
}
