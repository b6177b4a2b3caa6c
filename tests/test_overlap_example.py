"""The bound example of the design: 5, 2 and 4 ms give 5 ms at best and 11 ms fully serial."""

import importlib.util
import sys
from pathlib import Path

import pytest

PRINTED = """\
busy: tensor 5 ms, vector 2 ms, dma 4 ms
overlapped bound  5 ms
serial bound     11 ms

                     ideal              Trn2 latencies
buffers          1          2           2           3
   1 chunks       11 ms       11 ms       11 ms       11 ms
   2 chunks       10 ms        8 ms    8.002 ms    8.002 ms
   4 chunks      9.5 ms      6.5 ms    6.502 ms    6.502 ms
  10 chunks      9.2 ms      5.6 ms    5.602 ms    5.602 ms
 100 chunks     9.02 ms     5.06 ms    5.062 ms    5.062 ms
1000 chunks    9.002 ms    5.006 ms    5.322 ms    5.008 ms
"""
MS = 10**9


@pytest.fixture(scope="module")
def example():
    path = Path(__file__).parent.parent / "examples" / "overlap.py"
    spec = importlib.util.spec_from_file_location("overlap_example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_printed(example, capsys):
    example.main()
    assert capsys.readouterr().out == PRINTED


def test_bounds_do_not_depend_on_the_pipeline(example):
    for chunks in (1, 2, 5, 20):
        timeline = example.pipeline(chunks, buffers=2)
        assert (timeline.overlapped, timeline.serial) == (5 * MS, 11 * MS)


@pytest.mark.parametrize("chunks", [1, 2, 4, 5, 10, 100])
def test_closed_forms_of_the_ideal_pipelines(example, chunks):
    """Two buffers: fill and drain, and a tensor step for each further chunk. One: no prefetch."""
    one = example.pipeline(chunks, buffers=1).end
    two = example.pipeline(chunks, buffers=2).end
    assert two * chunks == (4 + 5 + 2) * MS + (chunks - 1) * 5 * MS
    assert one * chunks == (4 + 5 + 2) * MS + (chunks - 1) * (4 + 5) * MS
