"""What measures a step: timing, FLOPs, roofline bound, environment."""
