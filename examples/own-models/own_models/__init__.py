"""Models for studies of fald, each one function."""
