"""How a step runs: eager, compiled, captured, and what is checked before."""
