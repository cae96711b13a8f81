"""The same trouble is told of once a minute."""

from agent.troubles import QUIET, Troubles


def test_the_same_is_news_once_a_minute_and_another_at_once() -> None:
    troubles = Troubles()
    told = [(what, now) for now in range(150) for what in ("a", "b") if troubles.is_news(what, now)]
    assert told == [(what, now) for now in (0, 60, 120) for what in ("a", "b")]


def test_what_was_told_long_ago_is_forgotten() -> None:
    """Else what differs each time, as a name in a message, would be kept for ever."""
    troubles = Troubles()
    for number in range(1000):
        assert troubles.is_news(number, float(number))
    assert len(troubles._told) == QUIET  # noqa: SLF001 - nobody else has to know
