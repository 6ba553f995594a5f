"""Tables of the README and of the pages, by their names."""
