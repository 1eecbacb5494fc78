"""Rounds to an accurate posterior: studies, references by NUTS on pooled rows, and errors against them."""
