"""Streams of batches, as the tests of their sources take them."""

import itertools

import numpy as np

from nanosam.data.batch import StreamOptions

L, B = 16, 8


def stream(source, **changes):
  return source.train_stream(StreamOptions(L, B, range(B), prefetch=2)._replace(**changes))


def take(source, steps, **changes):
  s = stream(source, **changes)
  try:
    return list(itertools.islice(s, steps))
  finally:
    s.close()


def assert_same(a, b):
  assert len(a) == len(b)
  for x, y in zip(a, b, strict=True):
    for field, p, q in zip(x._fields, x, y, strict=True):
      assert (p is None) == (q is None), field
      np.testing.assert_array_equal(p, q, err_msg=field)
