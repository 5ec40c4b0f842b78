"""The version of the package, on the lowest floor since files that are written say which one wrote them."""

__version__ = "0.2.0"
