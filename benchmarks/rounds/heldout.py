"""Real studies kept out of development: run them to judge a method, never to choose a threshold."""

from __future__ import annotations

import numpy as np

from benchmarks.rounds.likelihoods import (
    binomial,
    gamma_regression,
    negative_binomial,
    ordinal,
    student_t,
    weibull,
)
from benchmarks.rounds.study import study
from benchmarks.rounds.tables import by_site, design, standardised, table
from fald.problem.models import logistic_regression, poisson_regression, softmax_regression


@study("real", "mlmRev/guImmun", holdout=True)
def immunisation():
    """Complete immunisation in Guatemala; logistic; communities, some of one child or of one outcome."""
    frame = table("mlmRev/guImmun")
    x, names = design(
        frame,
        ["pcInd81"],
        {
            "kid2p": ["N", "Y"],
            "mom25p": ["N", "Y"],
            "ord": ["01", "23", "46", "7p"],
            "ethn": ["L", "N", "S"],
            "momEd": ["N", "P", "S"],
            "husEd": ["N", "P", "S", "U"],
            "momWork": ["N", "Y"],
            "rural": ["N", "Y"],
        },
    )
    return logistic_regression(names), by_site(frame["comm"], x, frame["immun"] == "Y")


@study("real", "survival/cgd", holdout=True)
def granulomatous():
    """Time to the next infection; Weibull with censoring; centres, two without any infection."""
    frame = table("survival/cgd")
    x, names = design(
        frame,
        ["age", "height", "weight"],
        {
            "treat": ["placebo", "rIFN-g"],
            "sex": ["male", "female"],
            "inherit": ["X-linked", "autosomal"],
            "steroids": [0, 1],
            "propylac": [0, 1],
        },
    )
    log_time = np.log((frame["tstop"] - frame["tstart"]) / 365.25)
    return weibull(names), by_site(frame["center"], x, log_time, frame["status"])


@study("real", "lme4/grouseticks", holdout=True)
def grouse_ticks():
    """Ticks on grouse chicks; negative binomial; locations, three with one chick."""
    frame = table("lme4/grouseticks")
    x, names = design(frame, ["cHEIGHT"], {"YEAR": [95, 96, 97]})
    return negative_binomial(names), by_site(frame["LOCATION"], x, frame["TICKS"])


@study("real", "AER/Guns", holdout=True)
def violent_crime():
    """Log rate of violent crime; Student-t with unknown degrees of freedom; states."""
    frame = table("AER/Guns")
    numbers = ["prisoners", "afam", "cauc", "male", "population", "income", "density", "year"]
    x, names = design(frame, numbers, {"law": ["no", "yes"]})
    return student_t(names), by_site(frame["state"], x, standardised(np.log(frame["violent"])))


@study("real", "ordinal/soup", holdout=True)
def soup():
    """Sureness that a soup is the test product, on six levels; ordinal; tasters."""
    frame = table("ordinal/soup")
    x, names = design(
        frame,
        ["EASY"],
        {
            "PRODID": [1, 2, 3, 4, 5, 6],
            "DAY": [1, 2],
            "SOUPTYPE": ["Self-made", "Canned", "Dry-mix"],
            "SOUPFREQ": [">1/week", "1-4/month", "<1/month"],
            "GENDER": ["Female", "Male"],
        },
    )
    return ordinal(names, 6), by_site(frame["RESP"], x, frame["SURENESS"] - 1)


@study("real", "medicaldata/covid_testing", holdout=True)
def covid_tests():
    """Positive tests; logistic with a rare outcome; clinics, many with one test or none positive."""
    frame = table("medicaldata/covid_testing")
    frame = frame[(frame["result"] != "invalid") & (frame["demo_group"] != "unidentified")]
    frame = frame.assign(day2=standardised(frame["pan_day"]) ** 2)
    x, names = design(
        frame,
        ["pan_day", "day2", "age"],
        {
            "gender": ["female", "male"],
            "demo_group": ["patient", "misc adult", "client", "other adult"],
            "drive_thru_ind": [0, 1],
            "orderset": [0, 1],
        },
    )
    return logistic_regression(names), by_site(frame["clinic_name"], x, frame["result"] == "positive")


@study("real", "carData/Womenlf", holdout=True)
def labour_force():
    """No work, part time or full time; softmax with a redundant class; regions of Canada."""
    frame = table("carData/Womenlf")
    x, names = design(frame, ["hincome"], {"children": ["absent", "present"]})
    label = frame["partic"].map({"not.work": 0, "parttime": 1, "fulltime": 2})
    return softmax_regression(names, 3), by_site(frame["region"], x, label)


@study("real", "MASS/epil", holdout=True)
def epilepsy():
    """Seizures in two weeks; negative binomial; patients with four periods."""
    frame = table("MASS/epil")
    trt = (frame["trt"] == "progabide").to_numpy(float)
    frame = frame.assign(lbase_trt=frame["lbase"] * trt)
    x, names = design(frame, ["lbase", "lage", "lbase_trt"], {"trt": ["placebo", "progabide"], "V4": [0, 1]})
    return negative_binomial(names), by_site(frame["subject"], x, frame["y"])


@study("real", "AER/Fatalities", holdout=True)
def road_deaths():
    """Deaths on the road per 10,000 people; gamma regression; states with seven years."""
    frame = table("AER/Fatalities").dropna(subset=["jail"])
    numbers = ["spirits", "unemp", "income", "beertax", "drinkage", "dry", "youngdrivers", "miles"]
    x, names = design(frame, numbers, {"breath": ["no", "yes"], "jail": ["no", "yes"]})
    return gamma_regression(names), by_site(frame["state"], x, 1e4 * frame["fatal"] / frame["pop"])


@study("real", "mlmRev/Socatt", holdout=True)
def attitudes():
    """Positive answers of seven on abortion; binomial; districts."""
    frame = table("mlmRev/Socatt")
    x, names = design(
        frame,
        ["age"],
        {
            "year": [1983, 1984, 1985, 1986],
            "party": ["conservative", "labour", "Lib/SDP/Alliance", "others", "none"],
            "class": ["middle", "upper working", "lower working"],
            "gender": ["female", "male"],
            "religion": ["Protestant", "none", "others", "Roman Catholic"],
        },
    )
    trials = np.full(len(frame), 7.0)
    return binomial(names), by_site(frame["district"], x, frame["numpos"], trials)


@study("real", "geepack/respiratory", holdout=True)
def respiratory():
    """Good respiratory status in a trial; logistic; two centres."""
    frame = table("geepack/respiratory")
    x, names = design(frame, ["age", "visit"], {"treat": ["P", "A"], "sex": ["M", "F"], "baseline": [0, 1]})
    return logistic_regression(names), by_site(frame["center"], x, frame["outcome"])


@study("real", "vcdExtra/ICU", holdout=True)
def intensive_care():
    """Death in intensive care; logistic with rare signs; services by admission, one with one patient."""
    frame = table("vcdExtra/ICU")
    no = {
        name: ["No", "Yes"] for name in ("cancer", "renal", "infect", "cpr", "previcu", "fracture", "uncons")
    }
    x, names = design(
        frame,
        ["age", "systolic", "hrtrate"],
        {
            "sex": ["Female", "Male"],
            "race": ["White", "Black", "Other"],
            "po2": [">60", "<=60"],
            "ph": [">=7.25", "<7.25"],
            "pco": ["<=45", ">45"],
            "bic": [">=18", "<18"],
            "creatin": ["<=2", ">2"],
            **no,
        },
    )
    return logistic_regression(names), by_site(
        frame["service"] + " " + frame["admit"], x, frame["died"] == "Yes"
    )


@study("real", "mlmRev/ScotsSec", holdout=True)
def attainment():
    """Attainment of Scottish pupils, 1 to 10; Poisson; secondary schools."""
    frame = table("mlmRev/ScotsSec")
    x, names = design(frame, ["verbal"], {"sex": ["M", "F"], "social": sorted(frame["social"].unique())})
    return poisson_regression(names), by_site(frame["second"], x, frame["attain"])
