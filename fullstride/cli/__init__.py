"""Commands and options of the command line."""


def main() -> None:
    """Run the command line: the entry point that installers know."""
    from fullstride.cli.app import main as run

    run()
