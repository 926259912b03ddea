"""A call of `generate`, read and checked before anything runs."""

from specdec.request.call import GenerateOptions, Request

__all__ = ["GenerateOptions", "Request"]
