"""`python -m benchmarks`."""

from benchmarks.cli.app import app
from fullstride.cli.running import run

if __name__ == "__main__":
    run(app)
