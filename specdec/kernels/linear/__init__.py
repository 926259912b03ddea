"""Scaled linear: a linear layer over weights of one byte, for few tokens. See README.md."""
