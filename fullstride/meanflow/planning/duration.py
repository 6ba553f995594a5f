"""Times as people read them."""

# Seconds of each unit, longest first.
UNITS = {"d": 86_400.0, "h": 3_600.0, "min": 60.0, "s": 1.0}


def duration(seconds: float) -> str:
    """A time to three digits in the longest unit of which it is one at least, as in `8.00 min`, or in seconds."""
    unit = next((unit for unit, length in UNITS.items() if seconds >= length), "s")
    value = seconds / UNITS[unit]
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f} {unit}"
