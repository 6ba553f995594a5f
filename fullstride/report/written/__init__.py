"""Tables of results in the README and the documentation, written by `fullstride report readme`."""
