DEVICE float silu(float x) { return x / (1 + exp2_of(-1.4426950408889634f * x)); }
