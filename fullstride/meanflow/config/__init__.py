"""Configuration: schema, presets, recipes, overrides, conflicts."""
