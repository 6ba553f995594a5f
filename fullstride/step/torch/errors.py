"""Error of a step that must not train."""


class StepError(ValueError):
    """Wrong step; the message names what deviates, or what it cannot take, and what to do."""
