"""`python -m fullstride`, the same as `fullstride`."""

from fullstride.cli.app import main

main()
