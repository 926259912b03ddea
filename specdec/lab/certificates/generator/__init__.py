"""Audits and powered tests of whole generations."""
