"""Race: a draw by an exponential race, with noise of the position in the text. See README.md."""
