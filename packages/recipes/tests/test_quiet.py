"""Third parties' words go to the log, and afterwards everything is as it was."""

import logging
import threading
import warnings

import pytest
from transformers.utils import logging as transformers_logging

from offbeat_recipes.run.terminal import logs_to


def say_everything():
    logging.getLogger("some.library").info("an info")
    transformers_logging.get_logger("transformers.models").warning("from transformers")
    warnings.warn("a warning", UserWarning, stacklevel=1)


def test_all_that_is_said_goes_to_the_file_and_not_to_the_screen(tmp_path, capfd):
    path = tmp_path / "logs" / "driver.log"
    with logs_to(path):
        say_everything()
    assert capfd.readouterr() == ("", "")
    text = path.read_text()
    for words in ("some.library INFO an info", "transformers.models WARNING from transformers", "a warning"):
        assert words in text


def test_what_a_thread_fails_of_goes_to_the_file(tmp_path, capfd):
    def fail():
        raise OSError("no room")

    with logs_to(tmp_path / "driver.log"):
        thread = threading.Thread(target=fail, name="a writer")
        thread.start()
        thread.join()
    assert capfd.readouterr() == ("", "")
    assert "a writer ended by an error" in (tmp_path / "driver.log").read_text()
    assert "OSError: no room" in (tmp_path / "driver.log").read_text()


def test_a_full_disk_is_not_told_record_by_record(tmp_path, capfd):
    (tmp_path / "driver.log").symlink_to("/dev/full")
    with logs_to(tmp_path / "driver.log"):
        logging.getLogger("some.library").warning("lost")
    assert capfd.readouterr() == ("", "")


def test_a_second_run_in_the_same_folder_adds(tmp_path):
    path = tmp_path / "driver.log"
    for _ in range(2):
        with logs_to(path):
            logging.getLogger("some.library").warning("once more")
    assert path.read_text().count("once more") == 2


def state():
    root, library = logging.getLogger(), logging.getLogger("transformers")
    return (
        root.handlers[:],
        root.level,
        library.handlers[:],
        library.propagate,
        list(warnings.filters),
        warnings.showwarning,
        transformers_logging.is_progress_bar_enabled(),
    )


@pytest.mark.parametrize("error", [None, KeyError])
def test_afterwards_everything_is_as_it_was(tmp_path, error):
    before = state()
    if error is None:
        with logs_to(tmp_path / "log"):
            assert state() != before
    else:
        with pytest.raises(error), logs_to(tmp_path / "log"):
            raise error
    assert state() == before
    with pytest.raises(UserWarning, match="a warning"):  # this project's pytest makes errors of them
        warnings.warn("a warning", UserWarning, stacklevel=1)


def test_no_message_forges_a_line_or_moves_a_terminal(tmp_path):
    """A reward that raises `cannot parse {completion}` brings what a model wrote into the log."""
    path = tmp_path / "driver.log"
    hostile = "\x1b[2J\x1b]0;owned\x07 and\r\n2026-11-23 00:00:00,000 offbeat ERROR forged"
    with logs_to(path):
        logging.getLogger("offbeat").warning("cannot parse %s", hostile)
        try:
            raise ValueError(hostile)
        except ValueError:
            logging.getLogger("offbeat").exception("the reward raised")
    text = path.read_text()
    assert not [char for char in text if char != "\n" and not char.isprintable()]
    own = [line for line in text.splitlines() if not line.startswith("    ")]
    assert [line.split(" offbeat ")[1].split()[0] for line in own] == ["WARNING", "ERROR"]
    assert "Traceback (most recent call last):" in text
