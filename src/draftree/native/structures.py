"""The structures of `layers.c`, field by field in its order; the meaning of each field is described there."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, c_float, c_int32, c_int64, c_void_p


class Matrix(Structure):
    """A matrix in panels (`products.h`)."""

    _fields_ = (
        *((name, c_void_p) for name in ("panels", "bias", "scales")),
        *((name, c_int64) for name in ("inputs", "outputs", "kind", "rounds", "stride")),
        ("beside", c_void_p),
    )


def beside(matrices: Sequence[Matrix]) -> Matrix:
    """Let matrices of blocks with the same inputs be one with the outputs of all; the caller keeps them alive."""
    outputs = sum(matrix.outputs for matrix in matrices)
    for matrix, following in zip(matrices, [*matrices[1:], None], strict=True):
        matrix.stride, matrix.beside = outputs, None if following is None else addressof(following)
    return matrices[0]


class Layer(Structure):
    """The weights of one decoder layer (`layers.c`)."""

    _fields_ = (
        *((name, Matrix) for name in ("qkv", "output", "gate", "up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "query_norm", "key_norm")),
        *((name, c_void_p) for name in ("behind_attention", "behind_mlp", "partner")),
        *((name, c_float) for name in ("input_epsilon", "post_epsilon", "head_epsilon", "behind_epsilon")),
        *((name, c_int32) for name in ("hidden", "kv_heads", "groups", "dim", "wide", "gelu", "rounding")),
        ("window", c_int32),
        *((name, c_float) for name in ("scaling", "cap")),
    )


class Pass(Structure):
    """What is the same for all layers of a pass (`layers.c`)."""

    _fields_ = (
        *((name, c_int64) for name in ("batch", "rows", "first", "capacity")),
        ("starts", POINTER(c_int64)),
        *((name, c_void_p) for name in ("cosine", "sine", "scratch")),
        *((name, c_int64) for name in ("threads", "prefix", "back")),
        *((name, c_void_p) for name in ("visible", "prefix_rows", "scores", "counts", "offsets")),
        ("exact_angles", c_int64),
        *((name, c_void_p) for name in ("laid", "positions")),
    )


class T5Layer(Structure):
    """The weights of one decoder layer of T5, and its attention's source (`t5.h`)."""

    _fields_ = (
        *((name, Matrix) for name in ("qkv", "output", "query", "crossed", "up", "gate", "down")),
        *((name, c_void_p) for name in ("norm", "cross_norm", "mlp_norm", "keys", "values")),
    )


class T5Decoder(Structure):
    """T5's decoder, and what is the same for all rows of a pass (`t5.h`)."""

    _fields_ = (
        *((name, c_void_p) for name in ("layers", "bias", "lengths", "places")),
        *((name, c_void_p) for name in ("embedding", "closing", "head")),
        ("vocabulary", c_int64),
        *((name, c_int64) for name in ("count", "hidden", "heads", "dim", "inner", "columns", "distances")),
        ("epsilon", c_float),
        ("longest", c_int64),
        *((name, c_void_p) for name in ("scores", "distance")),
    )
