"""Small least-squares problems in normal form with non-negative unknowns (Lawson and Hanson's active set)."""

from __future__ import annotations

from math import inf, sqrt
from typing import Final

Matrix = list[list[float]]
Vector = list[float]

_RIDGE: Final = 1e-10  # relative to the unit diagonal: what two equal columns have in common is then shared
_TOLERANCE: Final = 1e-9


def solve_non_negative(gram: Matrix, moment: Vector) -> Vector:
    """The x >= 0 that minimises x'Gx - 2 m'x for a symmetric positive semidefinite G; unseen columns get 0."""
    scales = _scales(gram)
    size = len(scales)
    scaled = _scaled(gram, scales)
    target = [value * scale for value, scale in zip(moment, scales, strict=True)]
    free = [index for index in range(size) if scales[index] > 0]
    solution = [0.0] * size
    for _ in range(3 * size):
        values = _solve(scaled, target, free)
        solution = [0.0] * size
        for index, value in zip(free, values, strict=True):
            solution[index] = value
        lowest = min(free, key=lambda index: solution[index], default=None)
        if lowest is not None and solution[lowest] < 0:
            free.remove(lowest)
            continue
        held = [index for index in range(size) if scales[index] > 0 and index not in free]
        pull = [target[i] - sum(scaled[i][j] * solution[j] for j in free) for i in held]
        strongest = max(range(len(held)), key=lambda at: pull[at], default=None)
        if strongest is None or pull[strongest] <= _TOLERANCE * abs(target[held[strongest]]):
            break
        free.append(held[strongest])
    return [max(0.0, value) * scale for value, scale in zip(solution, scales, strict=True)]


def inverse_diagonal(gram: Matrix) -> Vector:
    """The diagonal of G's inverse, the variances of the unknowns per unit of noise; infinite where not seen."""
    scales = _scales(gram)
    scaled = _scaled(gram, scales)
    seen = [index for index in range(len(scales)) if scales[index] > 0]
    diagonal = [inf] * len(scales)
    for index in seen:
        unit = [0.0] * len(scales)
        unit[index] = 1.0
        variance = _solve(scaled, unit, seen)[seen.index(index)] * scales[index] ** 2
        diagonal[index] = variance if variance > 0 else inf
    return diagonal


def inverse_form(gram: Matrix, vector: Vector) -> float:
    """v'(G^-1)v, the variance of v'x per unit of noise; infinite where v has what was not seen."""
    scales = _scales(gram)
    seen = [index for index in range(len(scales)) if scales[index] > 0]
    if any(value and index not in seen for index, value in enumerate(vector)):
        return inf
    target = [value * scale for value, scale in zip(vector, scales, strict=True)]
    solution = _solve(_scaled(gram, scales), target, seen)
    return max(0.0, sum(target[index] * value for index, value in zip(seen, solution, strict=True)))


def _scales(gram: Matrix) -> Vector:
    return [1.0 / sqrt(gram[index][index]) if gram[index][index] > 1e-300 else 0.0 for index in range(len(gram))]


def _scaled(gram: Matrix, scales: Vector) -> Matrix:
    return [
        [value * scale * other for value, other in zip(line, scales, strict=True)]
        for line, scale in zip(gram, scales, strict=True)
    ]


def _solve(matrix: Matrix, target: Vector, unknowns: list[int]) -> Vector:
    """Gaussian elimination with a ridge; the matrix has a unit diagonal, so that no pivoting is needed."""
    rows = [[*(matrix[i][j] for j in unknowns), target[i]] for i in unknowns]
    size = len(rows)
    for index in range(size):
        rows[index][index] += _RIDGE
    for index in range(size):
        pivot_row = rows[index]
        pivot = max(pivot_row[index], _RIDGE)
        for other in rows[index + 1 :]:
            factor = other[index] / pivot
            if factor:
                for column in range(index, size + 1):
                    other[column] -= factor * pivot_row[column]
    values = [0.0] * size
    for index in range(size - 1, -1, -1):
        row = rows[index]
        rest = row[size] - sum(row[column] * values[column] for column in range(index + 1, size))
        values[index] = rest / max(row[index], _RIDGE)
    return values
