"""Methods by name; each is data plus pure functions that any engine can run."""

from fald.lab.methods.composed import composed
from fald.lab.methods.consensus import consensus, consensus_parametric
from fald.lab.methods.de_sgld import de_sgld
from fald.lab.methods.dsgld import dsgld
from fald.lab.methods.elf import elf
from fald.lab.methods.fedpa import fedpa
from fald.lab.methods.fsgld import Surrogates, fit_surrogates, fsgld
from fald.lab.methods.laplace import laplace
from fald.lab.methods.marina import marina
from fald.lab.methods.qlsd import qlsd
from fald.lab.methods.qlsd_plus import qlsd_plus
from fald.lab.methods.scaffold import scaffold
from fald.lab.methods.vr_fald import vr_fald
from fald.langevin.fald import FALD, fald, fedavg, sgld
from fald.langevin.method import Method, Spent, Upload
from fald.langevin.registry import METHODS, by_name

__all__ = [
    "FALD", "METHODS", "Method", "Spent", "Surrogates", "Upload", "by_name", "composed",
    "consensus", "consensus_parametric", "de_sgld", "dsgld", "elf", "fald", "fedavg", "fedpa",
    "fit_surrogates", "fsgld", "laplace", "marina", "qlsd", "qlsd_plus", "scaffold", "sgld",
    "vr_fald",
]  # fmt: skip
