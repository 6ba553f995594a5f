"""Trees of arrays as flat lists: structure, cached nodes, ownership."""
