"""A cache of keys and values in pages: which pages of a pool the sequences hold.

    cache = Cache(pages=512, page=32, sequences=16)
    s = cache.add()
    slots, copies = cache.grow([s], [prompt_length])   # once a step
    for k_pool, v_pool, k, v in layers:                # pools [pages, page, Hkv, D]
        for source, target in copies:
            k_pool[target], v_pool[target] = k_pool[source], v_pool[source]
        k_pool.view(-1, Hkv, D)[slots], v_pool.view(-1, Hkv, D)[slots] = k, v
    table, lengths = cache.table([s], columns)         # block_table, seq_lens: int32 tensors
    out = cached_attention(q, k_pool.transpose(1, 2), v_pool.transpose(1, 2), ...)

Pools may lie anywhere: lists of numbers come back, and the framework writes. See
include/saccade_kv.h.
"""

from __future__ import annotations

import ctypes as C
import operator
from typing import NoReturn, Sequence

from .c import abi
from .c.abi import lib
from .trace.errors import words_of


def _numbers(name: str, values: Sequence[int]) -> C.Array:
    if not hasattr(values, "__len__") or not hasattr(values, "__getitem__"):
        raise TypeError(f"{name}: got {words_of(values)}, expected a list of numbers")
    try:
        found = [whole_number(name, v) for v in values]
    except TypeError as reason:
        if str(reason).startswith(name):
            raise
        raise TypeError(f"{name}: got {words_of(values)}, expected a list of numbers") from None
    return (C.c_int32 * max(1, len(found)))(*found)


def whole_number(name: str, value: int, bits: int = 32) -> int:
    """ctypes would cut it."""
    try:
        n = operator.index(value)
    except (TypeError, RuntimeError):  # of tensors, one without values
        raise TypeError(f"{name}: got {words_of(value)}, expected a whole number") from None
    if not -(2 ** (bits - 1)) <= n < 2 ** (bits - 1):
        raise ValueError(f"{name}: got {n}, expected a number of {bits} bits")
    return n


class Cache:
    """Pages counted by who holds them. A call that fails raises and changes nothing."""

    def __init__(self, pages: int, page: int, sequences: int, most_keys: int = 0) -> None:
        self._handle = None
        self.pages, self.page = pages, page
        options = abi.KvOptions(
            pages=whole_number("pages", pages, 64),
            page=whole_number("page", page, 64),
            sequences=whole_number("sequences", sequences, 64),
            most_keys=whole_number("most_keys", most_keys, 64),
        )
        self._handle = abi.create("kv_create", C.byref(options))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: got a copy or a pickle of it, expected one object, whose "
            "sequences are copied by fork()"
        )

    def __del__(self) -> None:
        if getattr(self, "_handle", None) and lib is not None:
            lib.saccade_kv_destroy(self._handle)

    def _new(self, name: str, *arguments: int) -> int:
        number = C.c_int32()
        given = [whole_number("sequence", n) for n in arguments]
        abi.call(name, self._handle, *given, C.byref(number))
        return number.value

    def add(self) -> int:
        """A sequence without keys."""
        return self._new("kv_add")

    def fork(self, sequence: int) -> int:
        """A sequence with all keys of this one, in the same pages."""
        return self._new("kv_fork", sequence)

    def free(self, sequence: int) -> None:
        abi.call("kv_free", self._handle, whole_number("sequence", sequence))

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets keys from `length` on."""
        of, n = whole_number("sequence", sequence), whole_number("length", length, 64)
        abi.call("kv_truncate", self._handle, of, n)

    def drop(self, sequence: int, first: int) -> None:
        """Gives pages back whose keys all lie before key `first`; their entries become -1."""
        of, n = whole_number("sequence", sequence), whole_number("first", first, 64)
        abi.call("kv_drop", self._handle, of, n)

    def grow(
        self, sequences: Sequence[int], counts: Sequence[int]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Room for counts[i] more keys in sequences[i], for all or none. Returns where each new
        key goes (page * page size + key of the page) and pages to copy first: (from, to)."""
        of, more = _numbers("sequences", sequences), _numbers("counts", counts)
        if len(sequences) != len(counts):
            raise ValueError(
                f"counts: got {len(counts)}, expected {len(sequences)}, one for each sequence"
            )
        n = len(sequences)
        abi.call("kv_grow", self._handle, of, more, n)
        n_slots = lib.saccade_kv_slots(self._handle, None, 0)
        n_copies = lib.saccade_kv_copies(self._handle, None, 0)
        slots, pairs = (C.c_int64 * max(1, n_slots))(), (C.c_int32 * max(1, 2 * n_copies))()
        lib.saccade_kv_slots(self._handle, slots, n_slots)
        lib.saccade_kv_copies(self._handle, pairs, n_copies)
        copies = [(pairs[2 * i], pairs[2 * i + 1]) for i in range(n_copies)]
        return slots[:n_slots], copies

    def table(
        self, sequences: Sequence[int], columns: int = 0
    ) -> tuple[list[list[int]], list[int]]:
        """Rows of pages, -1 past their ends, and lengths. columns: 0 as many as the longest
        has."""
        rows, columns = _numbers("sequences", sequences), whole_number("columns", columns)
        n = len(sequences)
        if columns < 0:
            raise ValueError(f"columns: got {columns}, expected 0 or more")
        lengths = (C.c_int32 * max(1, n))()
        abi.call("kv_table", self._handle, rows, n, None, 0, lengths)
        columns = columns or max([1, *((x + self.page - 1) // self.page for x in lengths[:n])])
        table = (C.c_int32 * max(1, n * columns))()
        abi.call("kv_table", self._handle, rows, n, table, columns, lengths)
        return [table[i * columns : (i + 1) * columns] for i in range(n)], lengths[:n]

    def length(self, sequence: int) -> int:
        """-1 for a sequence that is not there."""
        return lib.saccade_kv_length(self._handle, whole_number("sequence", sequence))

    @property
    def free_pages(self) -> int:
        return lib.saccade_kv_free_pages(self._handle)
