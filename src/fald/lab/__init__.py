"""Comparison methods, comparisons, the experiments of the paper, and speed."""
