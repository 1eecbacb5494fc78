"""The study file that ``fald new`` writes."""

TEMPLATE = """\
# A fald study. Paths start at the folder of this file.
title = "My study"

[data]
# One CSV or Parquet file per site ...
files = { "site-a" = "a.csv", "site-b" = "b.csv" }
# ... or one table with a column that names the site:
# file = "all.csv"
# site = "hospital"
target = "outcome"
features = ["treatment", "age"]

# Text columns need their levels; the first is the reference.
# [data.categories]
# treatment = ["placebo", "drug"]

# Declared, not estimated: (x - center) / scale is used. Columns on similar scales sample faster.
# [data.scaling]
# age = { center = 50, scale = 10 }

[model]
family = "logistic"        # linear, logistic, poisson, softmax or mlp (with num-classes)
# prior-scale = 2.5        # coefficients ~ Normal(0, prior-scale); left out, 2.5, and for linear in units of
#                          # the sds of outcome and features

# Nothing to tune: "fald run" chooses a method that needs a handful of rounds. All keys may be left out.
# [fit]
# accuracy = "high"        # means and sds to 0.05 posterior sds; "medium": 0.1
# max-rounds = 12
# seed = 0

# Plain FA-LD instead, in many rounds; "fald plan THIS-FILE --write" chooses the numbers.
# [sampler]
# num-rounds = 5000        # communication rounds, warm-up included
# num-warmup = 1000        # rounds thrown away at the start
# local-steps = 5          # steps each site takes between rounds; more means fewer rounds and more bias
# step-size = 1e-4         # smaller means less bias and slower mixing
# num-chains = 16
# thinning = 10            # keep every 10th round
# correlation = 0.0        # noise shared between sites, 0 to 1; 1 gives no privacy
# participation = "full"   # or "with-replacement" / "without-replacement" with num-participants
# batch-size = 64          # rows per gradient; left out: all rows
# clip-norm = 1.0          # cut each row's gradient to this norm, as privacy accounting needs it
# seed = 0
# precision = "float32"    # or "float64"

# A private run of plain FA-LD: client noise from the operating system, a budget that stops the run, a
# statement. Needs [sampler].
# [privacy]
# delta = 1e-5             # well below one over the rows of a site
# max-epsilon = 2.0        # stop before the round that would exceed it
# client-noise = "entropy" # "seeded" is a simulation and protects nobody

# For "fald run --federation": what to do about sites that do not answer. All keys may be left out.
# [federation]
# timeout = 60             # seconds
# dropout = "retry"        # or "fail", or "reweight"
"""
