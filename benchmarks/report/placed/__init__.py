"""Tables of the README and the pages by name."""
