"""Posteriors in a handful of rounds: servers that ask all sites and get sums back."""
