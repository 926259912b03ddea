"""What changes a private view of a model: of the user's own, and specdec's."""
