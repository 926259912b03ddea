"""Race: a draw by an exponential race, with noise of the position in the text. See README.md."""

from specdec.kernels.race.reference import exponentials, first_arrival, race_weights

__all__ = ["exponentials", "first_arrival", "race_weights"]
