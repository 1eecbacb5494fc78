"""How often *reached* is wrong, over random posteriors whose means and sds are known."""
