"""The ``fald`` command."""
