"""Exit codes of commands, for whoever may start them again."""

from fullstride.errors import ConfigError, OutOfMemory, Preempted, ReadError, is_out_of_memory

DONE = 0  # or stopped by SIGTERM, with everything saved
FAILED = 1
SETTINGS = 2  # a setting that cannot be, a package that is missing
OUT_OF_MEMORY = 12  # a step that did not fit, and will not; the number of ENOMEM
UNREAD = 74  # data that could not be read for now; sysexits' "input/output error"
STUCK = 75  # ended by its own watchdog; sysexits' "try again later"
INTERRUPTED = 130

# Starting again would end as it did.
FINAL = {DONE, SETTINGS, OUT_OF_MEMORY, INTERRUPTED}


def exit_code_of(error: BaseException | None) -> int:
    """Return the exit code of a command that ends with this error."""
    if isinstance(error, OutOfMemory) or (error is not None and is_out_of_memory(error)):
        return OUT_OF_MEMORY
    kinds = {Preempted: DONE, KeyboardInterrupt: INTERRUPTED, ConfigError: SETTINGS, ReadError: UNREAD}
    codes = (code for kind, code in kinds.items() if isinstance(error, kind))
    return DONE if error is None else next(codes, FAILED)
