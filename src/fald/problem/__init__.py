"""What is asked: models and their families, priors, data and how tables become numbers."""
