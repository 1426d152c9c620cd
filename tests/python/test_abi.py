"""The mirrors of the library's structs: all are checked, and a wrong one ends the import."""

import ctypes as C

import pytest
from saccade.c import abi, loading


def test_every_mirror_is_checked():
    kinds = [x for x in vars(abi).values() if isinstance(x, type)]
    here = {x for x in kinds if issubclass(x, C.Structure) and hasattr(x, "_fields_")}
    assert here == set(abi.MIRRORS.values()) and len(here) == len(abi.MIRRORS)
    loading.check_mirrors()


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields[:-1],
        lambda fields: fields + [("more", C.c_int32)],
        lambda fields: [fields[1], fields[0], *fields[2:]],
        lambda fields: [("other", fields[0][1]), *fields[1:]],
        lambda fields: [(fields[0][0], C.c_int16), *fields[1:]],
    ],
)
@pytest.mark.parametrize("name", ["saccade_tensor", "saccade_sizes", "saccade_error"])
def test_a_wrong_mirror_is_refused(monkeypatch, name, change):
    fields = change(list(abi.MIRRORS[name]._fields_))
    wrong = type("Wrong", (C.Structure,), {"_fields_": fields})
    monkeypatch.setitem(abi.MIRRORS, name, wrong)
    with pytest.raises(ImportError, match=f"{name}.*two versions"):
        loading.check_mirrors()


@pytest.mark.parametrize("name", ["saccade_problem", "saccade_forward_args"])
def test_structs_that_may_grow(monkeypatch, name):
    """A mirror of fewer members is the struct of an older package; another order is not."""
    fields = abi.MIRRORS[name]._fields_
    for change, is_right in (
        (fields[:-1], True),
        (fields[:2] + fields[3:], False),
        (fields[:-1] + [("other", fields[-1][1])], False),
    ):
        monkeypatch.setitem(
            abi.MIRRORS, name, type("Changed", (abi.Record,), {"_fields_": list(change)})
        )
        if is_right:
            loading.check_mirrors()
        else:
            with pytest.raises(ImportError, match=f"{name}.*two versions"):
                loading.check_mirrors()


def test_a_call_that_is_not_there():
    with pytest.raises(ImportError, match="has no saccade_nothing.*two versions"):
        loading._declare("nothing", None)


def test_packed_as_the_mirrors_lie():
    packed = abi.PACK_TENSOR.pack(*range(1, 22))
    t = abi.Tensor.from_buffer_copy(packed)
    assert (t.data, t.dtype, t.device.kind, t.device.index, t.rank) == (1, 2, 3, 4, 5)
    assert list(t.shape) + list(t.stride) == list(range(6, 22))
    parts = [("size", "positions"), ("block_mask", "n_bindings"), ("workspace", "stream")]
    values = iter(range(1, 100))
    packed = b""
    for first, last in parts:
        made = abi.packer(abi.ForwardArgs, first, last)
        n = len(made.unpack(bytes(made.size)))
        packed += made.pack(*[next(values) for _ in range(n)])
    a = abi.ForwardArgs.from_buffer_copy(packed.ljust(C.sizeof(abi.ForwardArgs), b"\0"))
    assert (a.size, a.block_mask, a.n_bindings) == (1, 9, 11)
    assert (a.workspace, a.workspace_bytes, a.stream) == (12, 13, 14)
    assert C.cast(a.positions, C.c_void_p).value == 8


def test_show_config(capsys):
    import saccade
    from saccade.config import config

    saccade.show_config()
    told = capsys.readouterr().out
    found = config()
    for name in ("version", "library", "levels", "zydis", "png", "mods"):
        assert f"{name:18} {found[name]}\n" in told
    assert found["version"] == saccade.__version__
    assert found["levels"].startswith("portable")
    assert ("interpreted: no Zydis" in found["mods"]) == (found["zydis"] == "no")
