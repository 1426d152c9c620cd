/* .npy files: what is written reads back; every version, byte order and dimension order reads
 * as NumPy means it; hostile, truncated and mutated files get an error and nothing worse. */
#include "../cli/infile.c"
#include "../cli/npy.c"
#include "../cli/outfile.c"
#include "../cli/report.c"
#include "../cli/signals.c"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

#define FILE_NAME "t_npy.tmp.npy"

static void put(const void *bytes, size_t n)
{
    FILE *f = fopen(FILE_NAME, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

/* A file of this version, header text and data; returns its length. */
static size_t compose(unsigned char *out, int version, const char *header, const void *data,
                      size_t data_bytes)
{
    const size_t n = strlen(header), at = version == 1 ? 10 : 12;
    memcpy(out, "\x93NUMPY", 6);
    out[6] = (unsigned char)version;
    out[7] = 0;
    out[8] = (unsigned char)n;
    out[9] = (unsigned char)(n >> 8);
    if (version > 1)
        out[10] = out[11] = 0;
    memcpy(out + at, header, n);
    memcpy(out + at + n, data, data_bytes);
    return at + n + data_bytes;
}

static saccade_status read_back(npy_array *a, saccade_error *err)
{
    memset(err, 0, sizeof *err);
    return npy_read(FILE_NAME, a, err);
}

static void round_trips(void **state)
{
    static const saccade_dtype dtypes[] = {SACCADE_BOOL, SACCADE_U8,  SACCADE_I8,   SACCADE_U16,
                                           SACCADE_I16,  SACCADE_U32, SACCADE_I32,  SACCADE_U64,
                                           SACCADE_I64,  SACCADE_F16, SACCADE_BF16, SACCADE_F32,
                                           SACCADE_F64};
    unsigned char data[6 * 8];
    saccade_error err;
    (void)state;
    for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++)
        for (int32_t rank = 0; rank <= SACCADE_MAX_RANK; rank++) {
            int64_t shape[SACCADE_MAX_RANK] = {1, 1, 1, 1, 1, 1, 1, 1};
            if (rank > 0)
                shape[rank - 1] = 3;
            if (rank > 1)
                shape[0] = 2;
            for (size_t i = 0; i < sizeof data; i++)
                data[i] = dtypes[d] == SACCADE_BOOL ? i % 2 : (unsigned char)(37 * i);
            const saccade_tensor t = saccade_tensor_of(data, dtypes[d], rank, shape);
            npy_array a;
            assert_int_equal(npy_save(FILE_NAME, &t, &err), SACCADE_OK);
            assert_int_equal(read_back(&a, &err), SACCADE_OK);
            assert_int_equal(a.dtype, dtypes[d]);
            assert_int_equal(a.rank, rank);
            assert_memory_equal(a.shape, shape, (size_t)rank * sizeof shape[0]);
            assert_memory_equal(a.data, data, (size_t)a.count * saccade_dtype_bytes(a.dtype));
            npy_free(&a);
        }
}

static void strided_tensors_are_written_row_major(void **state)
{
    const int32_t data[] = {0, 1, 2, 3, 4, 5}, expected[] = {0, 2, 4, 1, 3, 5};
    saccade_tensor t = {.data = (void *)data,
                        .dtype = SACCADE_I32,
                        .rank = 2,
                        .shape = {2, 3},
                        .stride = {1, 2}};
    saccade_error err;
    npy_array a;
    (void)state;
    assert_int_equal(npy_save(FILE_NAME, &t, &err), SACCADE_OK);
    assert_int_equal(read_back(&a, &err), SACCADE_OK);
    assert_memory_equal(a.data, expected, sizeof expected);
    npy_free(&a);
}

static void reads_versions_orders_and_types(void **state)
{
    const int16_t plain[] = {1, 2, 3, 4, 5, 6};
    const int16_t swapped[] = {0x0100, 0x0200, 0x0300, 0x0400, 0x0500, 0x0600};
    static const struct {
        int version;
        const char *header;
        int data; /* 0 plain, 1 swapped */
        saccade_dtype dtype;
        int32_t rank;
    } files[] = {
        {1, "{'descr': '<i2', 'fortran_order': False, 'shape': (2, 3), }\n", 0, SACCADE_I16, 2},
        {2, "{'descr': '<i2', 'fortran_order': False, 'shape': (2, 3), }\n", 0, SACCADE_I16, 2},
        {3, "{\"shape\":(6,),\"descr\":\"=i2\",\"fortran_order\":False}", 0, SACCADE_I16, 1},
        {1, "{'descr': '>i2', 'fortran_order': False, 'shape': (6,)}   \n", 1, SACCADE_I16, 1},
        {1, "{'descr': '<i2', 'fortran_order': True, 'shape': (6,)}", 0, SACCADE_I16, 1},
        {1, "{'descr': '<V2', 'fortran_order': False, 'shape': (6)}", 0, SACCADE_BF16, 1},
        {1, "{'descr': '|V2', 'fortran_order': False, 'shape': (1, 6)}", 0, SACCADE_BF16, 2},
    };
    (void)state;
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        unsigned char bytes[512];
        saccade_error err;
        npy_array a;
        const int16_t *data = files[i].data ? swapped : plain;
        put(bytes, compose(bytes, files[i].version, files[i].header, data, sizeof plain));
        if (read_back(&a, &err) != SACCADE_OK)
            fail_msg("file %zu: %s", i, err.message);
        assert_int_equal(a.dtype, files[i].dtype);
        assert_int_equal(a.rank, files[i].rank);
        assert_memory_equal(a.data, plain, sizeof plain);
        npy_free(&a);
    }
}

static void hostile_headers_are_refused(void **state)
{
    static const char *const headers[] = {
        "",
        "{",
        "{}",
        "[1, 2]",
        "{'descr': '<f4'}",
        "{'descr': '<f4', 'fortran_order': False}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'x': 1}",
        "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<c8', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<f4', 'fortran_order': True, 'shape': (1, 1)}",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<U4', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': 'f', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': 1}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1.5,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1,,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 4)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1,1,1,1,1,1,1,1,1)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} trailing",
        "{'descr': '<f4, 'fortran_order': False, 'shape': (1,)}",
        "{'descr: '<f4', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (0,)}",
        "{'descr': '\xc2\x9b', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<f4', '\x1b': False, 'shape': (1,)}",
    };
    const float one = 1;
    (void)state;
    for (size_t i = 0; i < sizeof headers / sizeof headers[0]; i++) {
        unsigned char bytes[512];
        saccade_error err;
        npy_array a;
        put(bytes, compose(bytes, 1, headers[i], &one, sizeof one));
        if (read_back(&a, &err) != SACCADE_EINVAL)
            fail_msg("header %zu was not refused: %s", i, headers[i]);
        assert_string_equal(err.where, FILE_NAME);
        assert_true(strlen(err.message) > 10);
        for (const char *c = err.message; *c; c++)
            assert_true(*c >= ' ' && *c <= '~');
    }
}

static void other_files_are_refused(void **state)
{
    unsigned char bytes[64] = {0};
    saccade_error err;
    npy_array a;
    (void)state;
    unlink(FILE_NAME);
    assert_int_equal(read_back(&a, &err), SACCADE_EIO);
    put(bytes, 0);
    assert_int_equal(read_back(&a, &err), SACCADE_EINVAL);
    put(bytes, sizeof bytes);
    assert_int_equal(read_back(&a, &err), SACCADE_EINVAL);
    memcpy(bytes, "\x93NUMPY\x04\0\x10\0", 10);
    put(bytes, sizeof bytes);
    assert_int_equal(read_back(&a, &err), SACCADE_EINVAL);
    memcpy(bytes, "\x93NUMPY\x02\0\xff\xff\xff\xff", 12);
    put(bytes, sizeof bytes);
    assert_int_equal(read_back(&a, &err), SACCADE_EINVAL);
    assert_int_equal(npy_read("/", &a, &err), SACCADE_EINVAL);
    assert_int_equal(npy_read("/dev/zero", &a, &err), SACCADE_EINVAL);
}

static void every_truncation_is_refused(void **state)
{
    const float data[3] = {1, 2, 3};
    unsigned char bytes[512];
    saccade_error err;
    npy_array a;
    (void)state;
    const size_t n = compose(
        bytes, 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}", data, sizeof data);
    for (size_t i = 0; i < n; i++) {
        put(bytes, i);
        assert_int_equal(read_back(&a, &err), SACCADE_EINVAL);
    }
    put(bytes, n);
    assert_int_equal(read_back(&a, &err), SACCADE_OK);
    npy_free(&a);
}

static uint32_t draw(uint32_t *seed)
{
    *seed = *seed * 1664525 + 1013904223;
    return *seed >> 8;
}

/* A file that reads has a shape whose elements its data are. */
static void mutated_files_do_no_harm(void **state)
{
    static const char header[] =
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\n";
    static const char words[] = "{}[](),:'\"<>|=fiuVb0123456789 \nTrueFalseshapedescr\0\xff";
    const float data[6] = {1, 2, 3, 4, 5, 6};
    uint32_t seed = 2026;
    int n_read = 0;
    (void)state;
    print_message("seed %u\n", seed);
    for (int i = 0; i < 4000; i++) {
        unsigned char bytes[512];
        saccade_error err;
        npy_array a;
        size_t n = compose(bytes, 1 + (int)(draw(&seed) % 3), header, data, sizeof data);
        for (uint32_t m = draw(&seed) % 4 + 1; m > 0; m--)
            bytes[draw(&seed) % 3 ? draw(&seed) % (n - sizeof data) : draw(&seed) % n] =
                draw(&seed) % 2 ? (unsigned char)words[draw(&seed) % sizeof words]
                                : (unsigned char)draw(&seed);
        if (draw(&seed) % 8 == 0)
            n = draw(&seed) % n;
        put(bytes, n);
        if (read_back(&a, &err) == SACCADE_OK) {
            n_read++;
            assert_true(a.count * (int64_t)saccade_dtype_bytes(a.dtype) <= (int64_t)n);
            npy_free(&a);
        } else {
            assert_true(err.message[0] != 0);
        }
    }
    assert_true(n_read > 100 && n_read < 3900); /* both roads are walked */
}

static void failed_writes_leave_the_old_file(void **state)
{
    float x = 1, y = 2;
    const saccade_tensor good = saccade_tensor_of(&x, SACCADE_F32, 0, NULL);
    saccade_tensor bad = saccade_tensor_of(&y, SACCADE_F32, 0, NULL);
    saccade_error err;
    npy_array a;
    (void)state;
    assert_int_equal(npy_save(FILE_NAME, &good, &err), SACCADE_OK);
    bad.device.kind = SACCADE_CUDA;
    assert_int_equal(npy_save(FILE_NAME, &bad, &err), SACCADE_EINVAL);
    assert_int_equal(read_back(&a, &err), SACCADE_OK);
    assert_true(*(float *)a.data == 1);
    npy_free(&a);
    assert_int_equal(npy_save("t_npy.no/such/folder.npy", &good, &err), SACCADE_EIO);
    assert_int_equal(npy_save("/dev/full", &good, &err), SACCADE_EIO);
    assert_int_equal(npy_save(".", &good, &err), SACCADE_EIO);
}

static int clean(void **state)
{
    (void)state;
    return unlink(FILE_NAME);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trips),
        cmocka_unit_test(strided_tensors_are_written_row_major),
        cmocka_unit_test(reads_versions_orders_and_types),
        cmocka_unit_test(hostile_headers_are_refused),
        cmocka_unit_test(other_files_are_refused),
        cmocka_unit_test(every_truncation_is_refused),
        cmocka_unit_test(mutated_files_do_no_harm),
        cmocka_unit_test(failed_writes_leave_the_old_file),
    };
    return cmocka_run_group_tests(tests, NULL, clean);
}
