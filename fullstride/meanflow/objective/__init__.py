"""The MeanFlow objective: loss, derivative, times, weighting, guidance."""
