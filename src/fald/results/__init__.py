"""Draws and what is said of them: the tree, summaries, diagnostics, predictions, text."""
