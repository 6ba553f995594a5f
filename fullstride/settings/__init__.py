"""Settings of a run as dataclasses: values that a field takes, `key=value` overrides, conflicts."""
