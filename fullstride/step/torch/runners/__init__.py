"""Runners of a step: eager, compiled, captured; and the checks before the first one."""
