"""`open_books`: which kind of books a batch gets."""

from torch import Tensor

from specdec.kernels import host
from specdec.kernels.books import Books


def open_books(text: Tensor, *args, **kwargs) -> Books:
    """The books of a batch; see `books.Books`."""
    chosen = host.HostBooks if host.is_at_hand(text) else Books
    return chosen(text, *args, **kwargs)
