"""Sums over rows: values, gradients, Hessians, batches, clipping, and the mode."""
