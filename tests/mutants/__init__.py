"""Hand-made mutants by the part they break, each after a bug that a public project, or a trial of
this one, has shown.

Issues are named as repository#number; the row in brackets is that of the project's catalogue of
such bugs.
"""

from mutants.attention import ATTENTION
from mutants.drafters import DRAFTERS
from mutants.eagle import EAGLE
from mutants.graphs import GRAPHS
from mutants.habits import HABITS
from mutants.laws import LAWS
from mutants.loop import LOOP
from mutants.mask_token import MASK_TOKEN
from mutants.mtp import MTP
from mutants.noise import NOISE
from mutants.outcomes import OUTCOMES
from mutants.rules import RULES
from mutants.slots import SLOTS
from mutants.workbench import WORKBENCH

MUTANTS = [
    *RULES, *LAWS, *NOISE, *SLOTS, *ATTENTION, *LOOP, *OUTCOMES, *DRAFTERS, *EAGLE, *MASK_TOKEN,
    *MTP, *GRAPHS, *HABITS, *WORKBENCH,
]  # fmt: skip
