"""`python -m fullstride`, the same as `fullstride`."""

from fullstride.cli import main

main()
