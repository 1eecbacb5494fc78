"""Real studies on which the methods were developed."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_breast_cancer

import fald
from benchmarks.rounds.likelihoods import negative_binomial, random_intercept_logistic, weibull
from benchmarks.rounds.study import study
from benchmarks.rounds.tables import by_group, by_site, design, standardised, table
from fald.problem.models import linear_regression, logistic_regression, poisson_regression


@study("real", "fald/indo")
def indo():
    """Pancreatitis after ERCP; logistic; hospitals, one with 3 patients."""
    bundled = fald.datasets.load_bundled_study("indo")
    data = bundled.read_data()
    return bundled.build_model(data.features), data


@study("real", "medicaldata/opt")
def opt():
    """Birthweight in kg in a trial of periodontal therapy; linear with unknown scale; clinics."""
    frame = table("medicaldata/opt").dropna(subset=["Birthweight", "BMI"])
    words = frame.select_dtypes(exclude="number").columns
    frame = frame.assign(**{c: frame[c].str.strip() for c in words})
    x, names = design(
        frame,
        ["Age", "BMI", "BL..BOP", "N.qualifying.teeth"],
        {
            "Group": ["C", "T"],
            "Black": ["No", "Yes"],
            "Hypertension": ["N", "Y"],
            "Diabetes": ["No", "Yes"],
            "Prev.preg": ["No", "Yes"],
            "Use.Tob": ["No", "Yes", ""],
        },
    )
    return linear_regression(names), by_site(frame["Clinic"], x, frame["Birthweight"] / 1000)


def _contraception():
    frame = table("mlmRev/Contraception")
    frame = frame.assign(age2=standardised(frame["age"]) ** 2)
    x, names = design(frame, ["age", "age2"], {"livch": ["0", "1", "2", "3+"], "urban": ["N", "Y"]})
    return frame["district"].to_numpy(), x, (frame["use"] == "Y").to_numpy(float), names


@study("real", "mlmRev/Contraception")
def contraception():
    """Use of contraception in Bangladesh; logistic; districts, the smallest with 2 women."""
    district, x, y, names = _contraception()
    return logistic_regression(names), by_site(district, x, y)


@study("real", "mlmRev/Contraception")
def contraception_random():
    """The same with a random intercept per district, integrated out; each site is one example."""
    district, x, y, names = _contraception()
    return random_intercept_logistic(names), by_group(district, x, y)


@study("real", "COUNT/azpro")
def azpro():
    """Days in hospital after a heart procedure; Poisson; hospitals."""
    frame = table("COUNT/azpro")
    names = ["procedure", "sex", "age75", "admit"]
    return poisson_regression(names), by_site(frame["hospital"], frame[names], frame["los"])


def _medpar():
    frame = table("COUNT/medpar")
    return frame, ["hmo", "white", "age80", "type2", "type3"]


@study("real", "COUNT/medpar")
def medpar():
    """Death in hospital; logistic; hospitals, some with one patient or no survivor."""
    frame, names = _medpar()
    return logistic_regression(names), by_site(frame["provnum"], frame[names], frame["died"])


@study("real", "COUNT/medpar")
def medpar_stay():
    """Days in hospital; negative binomial; hospitals, some with one patient."""
    frame, names = _medpar()
    return negative_binomial(names), by_site(frame["provnum"], frame[names], frame["los"])


@study("real", "mlmRev/Exam")
def exam():
    """Exam score in London; linear with unknown scale; schools."""
    frame = table("mlmRev/Exam")
    x, names = design(
        frame,
        ["standLRT", "schavg"],
        {
            "sex": ["F", "M"],
            "schgend": ["mixed", "girls", "boys"],
            "intake": ["bottom 25%", "mid 50%", "top 25%"],
        },
    )
    return linear_regression(names), by_site(frame["school"], x, frame["normexam"])


def _randhie():
    frame = table("sampleSelection/RandHIE").dropna(subset=["educdec"])
    numbers = ["logc", "lpi", "fmde", "physlm", "disea", "linc", "lfam", "educdec", "xage", "black"]
    flags = ["idp", "hlthg", "hlthf", "hlthp", "female", "child", "fchild"]
    return frame, numbers, {flag: [0, 1] for flag in flags}


@study("real", "sampleSelection/RandHIE")
def randhie():
    """Visits to physicians, five years; Poisson; insurance plans."""
    frame, numbers, flags = _randhie()
    x, names = design(frame, numbers, flags)
    return poisson_regression(names), by_site(frame["plan"], x, frame["mdvis"])


@study("real", "sampleSelection/RandHIE")
def randhie_second():
    """Visits to physicians in the second year; negative binomial; places."""
    frame, numbers, flags = _randhie()
    frame = frame[frame["year"] == 2]
    x, names = design(frame, numbers, flags)
    return negative_binomial(names), by_site(frame["site"], x, frame["mdvis"])


@study("real", "survival/cancer")
def lung():
    """Survival with advanced lung cancer; Weibull with censoring; institutions, one with one patient."""
    frame = table("survival/cancer").dropna(subset=["inst", "ph.ecog", "ph.karno", "pat.karno"])
    x, names = design(frame, ["age", "ph.ecog", "ph.karno", "pat.karno"], {"sex": [1, 2]})
    log_time = np.log(frame["time"] / 365.25)
    return weibull(names), by_site(frame["inst"].astype(int), x, log_time, frame["status"] == 2)


def _breast_cancer(squares: int = 0, products: int = 0, linear: int = 30):
    """Tumours dealt out to five sites so that the share of malignant ones differs greatly."""
    raw, y = load_breast_cancer(return_X_y=True)
    x = standardised_columns(raw)[:, :linear]
    pairs = [(i, j) for i in range(10) for j in range(i + 1, 20)][:products]
    parts = [x, x[:, :squares] ** 2, *[x[:, [i]] * x[:, [j]] for i, j in pairs]]
    wide = standardised_columns(np.concatenate(parts, axis=1))
    data = fald.partition.dirichlet((wide, y.astype(float)), y, 5, concentration=0.3, seed=5)
    return logistic_regression(wide.shape[1]), data


def standardised_columns(x: np.ndarray) -> np.ndarray:
    """Every column minus its mean, in units of its sd."""
    return (x - x.mean(0)) / x.std(0)


@study("real", "scikit-learn/breast cancer")
def breast_cancer_11():
    """Benign or malignant from ten mean measurements; logistic; five label-skewed sites."""
    return _breast_cancer(linear=10)


@study("real", "scikit-learn/breast cancer")
def breast_cancer_31():
    """The same from all thirty measurements, which nearly separate the outcome."""
    return _breast_cancer()


@study("real", "scikit-learn/breast cancer")
def breast_cancer_61():
    """The same with the squares of all measurements."""
    return _breast_cancer(squares=30)


@study("real", "scikit-learn/breast cancer")
def breast_cancer_121():
    """The same with all squares and 60 products of pairs."""
    return _breast_cancer(squares=30, products=60)
