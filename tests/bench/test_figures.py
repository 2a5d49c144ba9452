import pytest

from kvcache_core.bench.figures import Figure, Samples, Series


def test_samples_are_divided_round_by_round_not_median_by_median() -> None:
    ratio = Samples((1.0, 4.0, 9.0)) / Samples((1.0, 2.0, 9.0))
    assert ratio.values == (1.0, 2.0, 1.0)
    assert ratio.median == 1.0


def test_samples_of_different_rounds_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Samples((1.0, 2.0)) / Samples((1.0,))


def test_samples_scale_and_turn_into_rates() -> None:
    samples = Samples((1.0, 2.0, 4.0))
    assert (samples * 10).values == (10.0, 20.0, 40.0)
    assert (samples / 2).values == (0.5, 1.0, 2.0)
    assert samples.inverse(8).values == (8.0, 4.0, 2.0)


def test_quartiles_enclose_half_of_the_values() -> None:
    assert Samples(tuple(map(float, range(1, 6)))).quartiles == (2.0, 4.0)
    assert Samples((3.0,)).quartiles == (3.0, 3.0)


@pytest.mark.parametrize(
    ("value", "limits", "met", "target"),
    [
        (1.0, {}, None, ""),
        (1.0, {"at_most": 1.0}, True, "≤ 1 x"),
        (1.1, {"at_most": 1.0}, False, "≤ 1 x"),
        (1.4, {"at_least": 1.4}, True, "≥ 1.4 x"),
        (1.3, {"at_least": 1.4}, False, "≥ 1.4 x"),
    ],
)
def test_a_figure_knows_whether_it_met_its_target(
    value: float, limits: dict[str, float], met: bool | None, target: str
) -> None:
    figure = Figure(name="a ratio", value=value, unit="x", **limits)
    assert (figure.met, figure.target) == (met, target)
    assert figure.as_dict()["met"] is met


def test_a_figure_of_samples_has_their_median_and_quartiles() -> None:
    figure = Figure.of("time", Samples((5.0, 1.0, 3.0, 2.0, 4.0)), "µs", peer="transformers", at_most=9.0)
    assert (figure.value, figure.low, figure.high, figure.peer, figure.at_most) == (3.0, 2.0, 4.0, "transformers", 9.0)


def test_a_series_collects_points_by_line() -> None:
    series = Series(name="a plot", x="tokens", y="µs")
    series.add("ours", 1, 10)
    series.add("theirs", 1, 20)
    series.add("ours", 2, 11)
    assert series.as_dict()["lines"] == {"ours": [(1, 10), (2, 11)], "theirs": [(1, 20)]}
