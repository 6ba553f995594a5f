"""Static pages of every measured result: read, compared with the history of its code, drawn."""
