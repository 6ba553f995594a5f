"""Tests; their processes collect garbage seldom: by Python's own thresholds it takes a tenth of their time."""

import gc

gc.set_threshold(100_000, 20, 100)
