"""``fald federation log``: what a site has answered, in words."""

import json

from hostile import FEW_ROUND, NAMES, Coordinator, honest_server, kinds
from typer.testing import CliRunner

from fald.cli.federation import app
from fald.core.errors import StorageError
from fald.federation.site.record import RECORD


def test_a_study_is_told_in_words(tmp_path):
    coordinator = Coordinator(tmp_path)
    coordinator.begin(coordinator.open({**FEW_ROUND, "title": "Aspirin <b>"}))
    assert kinds(coordinator.ask(next(honest_server(FEW_ROUND)))) == ["reply"] * 3
    coordinator.ask({"states": [[1e5, 0.0, 0.0]]}, 2)
    home = tmp_path / "a"
    (home / "site.toml").write_text('name = "a"\n')
    document = json.loads(CliRunner().invoke(app, ["log", str(home), "--json"]).output)
    opened, _, answered, refused = document["record"]
    assert (opened["asked"], opened["title"], opened["columns"]) == ("open", "Aspirin <b>", ["y", "u", "v"])
    assert opened["left"] == {"number of rows": 1}
    assert {"value", "hessian", "precision"} <= set(answered["left"])
    assert "not passed on" in refused["refused"]
    assert refused["left"] == {}
    text = CliRunner().invoke(app, ["log", str(home)]).output
    assert "4 requests, the record is whole" in text
    page = tmp_path / "record.html"
    assert CliRunner().invoke(app, ["log", str(home), "--page", str(page)]).exit_code == 0
    assert "Aspirin &lt;b&gt;" in page.read_text()
    path = home / "state" / RECORD
    path.write_text(path.read_text().replace("Aspirin", "Placebo"))
    assert isinstance(CliRunner().invoke(app, ["log", str(home)]).exception, StorageError)
    assert coordinator.say("a", "end").kind == "reply"  # its last line is untouched, and it goes on
    assert NAMES[0] == document["site"]
