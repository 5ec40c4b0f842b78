"""What `make test` leaves out still leaves it every value of every axis."""

from few import crossed


def quick(parameters):
    return [parameter.values for parameter in parameters if not parameter.marks]


def test_every_value_of_every_axis_runs_every_day():
    axes = ("ab", [1, 2, 3], [True, False], "wxyz")
    chosen = quick(crossed(*axes))
    assert len(chosen) == 4
    for values, axis in zip(zip(*chosen, strict=True), axes, strict=True):
        assert set(values) == set(axis)
    assert len({parameter.values for parameter in crossed(*axes)}) == 2 * 3 * 2 * 4
