"""Derive the polynomial coefficients of the kernel's exponential (``src/kernels/elementary.h``).

Run as ``python -m bench.fit_polynomials`` (needs mpmath).  For each case it prints the coefficients of ``g`` in

    2**r = 1 + r * g(r)

so that 2**0 is exactly 1 (a row with one visible key must return that key's value to the bit) and so that
``2**r - 1 = r * g(r)`` keeps its relative accuracy near 0, which is what tanh needs.

Method: Remez exchange on the relative error, in 60-digit arithmetic.
"""

from mpmath import lu_solve, matrix, mp, mpf

mp.dps = 60


def relative_error(coefficients, r):
    """Return (1 + r g(r)) / 2**r - 1, with the sign of r.

    The factor r makes the plain error change sign at 0; times sign(r) it alternates like that of g itself.
    """
    g = mpf(0)
    for c in reversed(coefficients):
        g = g * r + c
    return mp.sign(r) * ((1 + r * g) / mpf(2) ** r - 1)


def remez(n_coefficient, low, high, n_iteration=12):
    """Minimax coefficients of g (lowest order first) and the largest relative error on [low, high]."""
    low, high = mpf(low), mpf(high)
    n_point = n_coefficient + 1
    middle, half = (low + high) / 2, (high - low) / 2
    # The error vanishes at r = 0 whatever g is, so the points must not fall on it.
    points = [middle - half * mp.cos(mp.pi * (i + mpf("0.31")) / n_point) for i in range(n_point)]
    for _ in range(n_iteration):
        system = matrix(n_point, n_point)
        right = matrix(n_point, 1)
        for i, r in enumerate(points):
            weight = abs(r) / mpf(2) ** r
            for k in range(n_coefficient):
                system[i, k] = weight * r**k
            system[i, n_coefficient] = (-1) ** i
            right[i] = mp.sign(r) * (1 - 1 / mpf(2) ** r)
        solution = lu_solve(system, right)
        coefficients = [solution[k] for k in range(n_coefficient)]
        points = extrema(coefficients, low, high, n_point)
    return coefficients, max(abs(relative_error(coefficients, r)) for r in points)


def extrema(coefficients, low, high, n_point):
    """The n_point largest alternating extrema of the error, from a dense grid."""
    n_grid = 4000
    grid = [low + (high - low) * i / n_grid for i in range(n_grid + 1)]
    errors = [relative_error(coefficients, r) for r in grid]
    runs = []
    for r, e in zip(grid, errors, strict=True):
        if e == 0:
            continue
        if runs and (runs[-1][1] > 0) == (e > 0):
            if abs(e) > abs(runs[-1][1]):
                runs[-1] = (r, e)
        else:
            runs.append((r, e))
    while len(runs) > n_point:
        runs.pop(0 if abs(runs[0][1]) < abs(runs[-1][1]) else -1)
    return [r for r, _ in runs]


def main():
    """Print the cases that the kernel uses."""
    for name, n_coefficient, low, high in (
        ("float32, r in [0, 1)", 6, 0, 1),
        ("float32, r in [-1/2, 1/2]", 6, -0.5, 0.5),
        ("float64, r in [0, 1)", 11, 0, 1),
        ("float64, r in [-1/2, 1/2]", 11, -0.5, 0.5),
    ):
        coefficients, error = remez(n_coefficient, low, high)
        print(f"{name}: largest relative error {mp.nstr(error, 3)}")
        for c in coefficients:
            print(f"    {mp.nstr(c, 20)}")


if __name__ == "__main__":
    main()
