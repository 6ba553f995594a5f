"""Evidence that MeanFlow works: experiments as declarations, run by the ordinary trainer, samplers and metrics."""
