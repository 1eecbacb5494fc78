"""What a run says of its pace, where nobody watches a bar."""

from fald.runtime import progress


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now


def shown(monkeypatch, capsys, *moments, few=False):
    """What is printed at (second, round) by a run of which two rounds were done before."""
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    with progress.Progress(1_000, 2, True, few=few) as display:
        for second, done in moments:
            clock.now = 100.0 + second
            display.update(done, "energy 1")
    return capsys.readouterr().err.splitlines()


def test_the_rounds_that_compile_are_not_taken_for_the_pace(monkeypatch, capsys):
    assert shown(monkeypatch, capsys, (10, 3), (30, 13), (40, 103)) == [
        "round 3 of 1,000: energy 1",
        "round 13 of 1,000: 2 s a round, energy 1, 1,974 s left",
        "round 103 of 1,000: 3 rounds/s, energy 1, 269 s left",
    ]


def test_few_rounds_have_a_line_each(monkeypatch, capsys):
    lines = shown(monkeypatch, capsys, (1, 3), (4, 4), (5, 1_000), few=True)
    assert lines[0] == "round 3: energy 1; at most 997 s left"
    assert lines[1:] == ["round 4: energy 1; at most 1,992 s left", "round 1000: energy 1"]
