"""Processes: signals, deadlines, exit codes, watchdog, torchrun."""
