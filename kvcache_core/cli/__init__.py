"""The command line, `kvcache`."""

__all__ = ["main"]


def main() -> None:
    """Run the command line on `sys.argv`."""
    from kvcache_core.cli.app import app  # noqa: PLC0415 - importing this package alone stays cheap

    app()
