"""Rows moved between tensors, by ranges and by lists, against plain indexing."""

import pytest

torch = pytest.importorskip("torch")
from saccade.torch.exchange import Rows, expand, packed  # noqa: E402

LENGTHS = [7, 5, 9, 2, 4]
PACKED = packed([(0, n) for n in LENGTHS])
SPREAD = list(zip([3, 20, 30, 50, 60], LENGTHS))


@pytest.mark.parametrize("n_packed", [27, 33])  # as many rows as there are, and some more
@pytest.mark.parametrize("ranges", [2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [8, 5])  # whole 16 bytes a row, and not
def test_rows(n_packed, ranges, dtype, dim):
    torch.manual_seed(0)
    for here, there, n, m in (
        (PACKED[:ranges], SPREAD[:ranges], n_packed, 70),
        (SPREAD[:ranges], PACKED[:ranges], 70, n_packed),
    ):
        rows, at, to = Rows(here, there, "cpu"), expand(here), expand(there)
        first, second = (torch.randn(2, 3, x, dim).to(dtype) for x in (n, m))
        got, want = second.clone(), second.clone()
        rows.copy(first, got)
        want[:, :, to] = first[:, :, at]
        assert torch.equal(got, want)
        got, want = first.clone(), first.clone()
        rows.take(second, got)
        want[:, :, at] = second[:, :, to]
        assert torch.equal(got, want)
        rows.add(second, got)
        want[:, :, at] += second[:, :, to]
        assert torch.equal(got, want)
