"""Methods by name; each is data plus pure functions that any engine can run."""

from fald.samplers.base import Method, Spent, Upload
from fald.samplers.composed import composed
from fald.samplers.consensus import consensus, consensus_parametric
from fald.samplers.de_sgld import de_sgld
from fald.samplers.dsgld import dsgld
from fald.samplers.elf import elf
from fald.samplers.fald import FALD, fald, fedavg, sgld
from fald.samplers.fedpa import fedpa
from fald.samplers.fsgld import Surrogates, fit_surrogates, fsgld
from fald.samplers.laplace import laplace
from fald.samplers.marina import marina
from fald.samplers.names import METHODS, by_name
from fald.samplers.qlsd import qlsd
from fald.samplers.qlsd_plus import qlsd_plus
from fald.samplers.scaffold import scaffold
from fald.samplers.vr_fald import vr_fald

__all__ = [
    "FALD",
    "METHODS",
    "Method",
    "Spent",
    "Surrogates",
    "Upload",
    "by_name",
    "composed",
    "consensus",
    "consensus_parametric",
    "de_sgld",
    "dsgld",
    "elf",
    "fald",
    "fedavg",
    "fedpa",
    "fit_surrogates",
    "fsgld",
    "laplace",
    "marina",
    "qlsd",
    "qlsd_plus",
    "scaffold",
    "sgld",
    "vr_fald",
]
