"""Real studies that no method was developed on, free to be looked at."""

from __future__ import annotations

import numpy as np

from benchmarks.rounds.likelihoods import (
    binomial,
    negative_binomial,
    ordinal,
    poisson_offset,
    random_intercept_logistic,
    student_t,
    weibull,
    zero_inflated_poisson,
)
from benchmarks.rounds.study import study
from benchmarks.rounds.tables import by_group, by_site, design, standardised, table
from fald.problem.models import linear_regression, logistic_regression


@study("real", "lme4/VerbAgg")
def verbal_aggression():
    """Yes or no to being verbally aggressive; logistic; persons with 24 answers, nine always the same."""
    frame = table("lme4/VerbAgg")
    x, names = design(
        frame,
        ["Anger"],
        {
            "Gender": ["F", "M"],
            "btype": ["curse", "scold", "shout"],
            "situ": ["other", "self"],
            "mode": ["want", "do"],
        },
    )
    return logistic_regression(names), by_site(frame["id"], x, frame["r2"] == "Y")


@study("real", "KMsurv/bmt")
def bone_marrow():
    """Death after a transplant of bone marrow; Weibull with censoring; hospitals."""
    frame = table("KMsurv/bmt")
    flags = {name: [0, 1] for name in ("z3", "z4", "z5", "z6", "z8", "z10")}
    x, names = design(frame, ["z1", "z2"], {"group": [1, 2, 3], **flags})
    return weibull(names), by_site(frame["z9"], x, np.log(frame["t1"] / 365.25), frame["d1"])


@study("real", "mlmRev/bdf")
def dutch_language():
    """Score of a language test; Student-t with unknown degrees of freedom; schools, the smallest with 4."""
    frame = table("mlmRev/bdf")
    numbers = ["IQ.verb", "IQ.perf", "ses", "langPRET", "schoolSES", "groupsiz"]
    x, names = design(frame, numbers, {"sex": [0, 1], "Minority": ["N", "Y"]})
    return student_t(names), by_site(frame["schoolNR"], x, standardised(frame["langPOST"]))


@study("real", "AER/NMES1988")
def elderly_visits():
    """Visits to physicians of the elderly; negative binomial; regions."""
    frame = table("AER/NMES1988")
    yes = {name: ["no", "yes"] for name in ("afam", "married", "employed", "insurance", "medicaid")}
    x, names = design(
        frame,
        ["hospital", "chronic", "age", "school", "income"],
        {
            "health": ["average", "poor", "excellent"],
            "adl": ["normal", "limited"],
            "gender": ["female", "male"],
            **yes,
        },
    )
    return negative_binomial(names), by_site(frame["region"], x, frame["visits"])


@study("real", "ordinal/wine")
def bitterness():
    """Bitterness of wine on five levels; ordinal; judges with eight ratings."""
    frame = table("ordinal/wine")
    x, names = design(frame, [], {"temp": ["cold", "warm"], "contact": ["no", "yes"]})
    return ordinal(names, 5), by_site(frame["judge"], x, frame["rating"] - 1)


@study("real", "lme4/cbpp")
def cattle():
    """Cases of pleuropneumonia among cattle; binomial; herds with one to four periods."""
    frame = table("lme4/cbpp")
    x, names = design(frame, [], {"period": [1, 2, 3, 4]})
    return binomial(names), by_site(frame["herd"], x, frame["incidence"], frame["size"])


def _bacteria():
    frame = table("MASS/bacteria")
    x, names = design(frame, ["week"], {"trt": ["placebo", "drug", "drug+"]})
    return frame["ID"], x, (frame["y"] == "y").to_numpy(float), names


@study("real", "MASS/bacteria")
def bacteria():
    """Bacteria in children with otitis; logistic; children with two to five visits, half never vary."""
    child, x, y, names = _bacteria()
    return logistic_regression(names), by_site(child, x, y)


@study("real", "MASS/bacteria")
def bacteria_random():
    """The same with a random intercept per child, integrated out; each site is one example."""
    child, x, y, names = _bacteria()
    return random_intercept_logistic(names), by_group(child, x, y)


@study("real", "mlmRev/Mmmec")
def melanoma():
    """Deaths by melanoma against expected ones; Poisson with exposure; nations."""
    frame = table("mlmRev/Mmmec")
    frame = frame.assign(uvb2=standardised(frame["uvb"]) ** 2, uvb3=standardised(frame["uvb"]) ** 3)
    x, names = design(frame, ["uvb", "uvb2", "uvb3"])
    return poisson_offset(names), by_site(frame["nation"], x, frame["deaths"], np.log(frame["expected"]))


@study("real", "AER/DoctorVisits")
def doctor_visits():
    """Visits in two weeks, four of five without any; zero-inflated Poisson; age groups."""
    frame = table("AER/DoctorVisits")
    yes = {name: ["no", "yes"] for name in ("private", "freepoor", "freerepat", "nchronic", "lchronic")}
    numbers = ["income", "illness", "reduced", "health"]
    x, names = design(frame, numbers, {"gender": ["male", "female"], **yes})
    return zero_inflated_poisson(names), by_site(frame["age"], x, frame["visits"])


@study("real", "MASS/Insurance")
def insurance():
    """Claims of car owners; Poisson with exposure; four districts."""
    frame = table("MASS/Insurance")
    x, names = design(
        frame,
        [],
        {"Group": ["<1l", "1-1.5l", "1.5-2l", ">2l"], "Age": ["<25", "25-29", "30-35", ">35"]},
    )
    return poisson_offset(names), by_site(frame["District"], x, frame["Claims"], np.log(frame["Holders"]))


@study("real", "survival/nwtco")
def wilms():
    """Relapse of Wilms' tumour; logistic; two trials one after the other."""
    frame = table("survival/nwtco")
    x, names = design(frame, ["age"], {"stage": [1, 2, 3, 4], "instit": [1, 2], "histol": [1, 2]})
    return logistic_regression(names), by_site(frame["study"], x, frame["rel"])


@study("real", "sandwich/InstInnovation")
def innovation():
    """Citations of firms' patents; negative binomial, strongly overdispersed; industries."""
    frame = table("sandwich/InstInnovation")
    logs = {name: np.log1p(frame[name]) for name in ("sales", "capital", "randd", "employment")}
    frame = frame.assign(**logs)
    numbers = ["sales", "capital", "randd", "employment", "institutions", "competition", "year"]
    x, names = design(frame, numbers, {"sp500": ["no", "yes"]})
    return negative_binomial(names), by_site(frame["industry"], x, frame["cites"])


@study("real", "mlmRev/egsingle")
def mathematics():
    """Mathematics score of pupils over years; linear with unknown scale; schools."""
    frame = table("mlmRev/egsingle")
    flags = {name: [0, 1] for name in ("retained", "black", "hispanic")}
    x, names = design(frame, ["year", "size", "lowinc", "mobility"], {"female": ["Male", "Female"], **flags})
    return linear_regression(names), by_site(frame["schoolid"], x, frame["math"])
