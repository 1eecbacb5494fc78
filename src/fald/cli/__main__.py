"""``python -m fald.cli`` is the command."""

from fald.cli.main import main

main()
