"""The quickstart learns through KDA and nothing else, decodes what it trained, and says what is wrong with input."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
sys.path.insert(0, str(QUICKSTART))

import decoding  # noqa: E402
import main  # noqa: E402
import text  # noqa: E402
import training  # noqa: E402
from model import LanguageModel, Size  # noqa: E402

SMALL = Size(layers=2, width=64, hidden=256, heads=2)
STEPS = 100
GAP = 0.4  # nats per byte that KDA must be worth; after so few steps it is worth about 0.6


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def manual():
    return text.split(text.load(None))


def trained(learned, silence_kda):
    torch.manual_seed(0)
    model = LanguageModel(SMALL)
    if silence_kda:
        for block in model.blocks:
            block.kda.out.weight.requires_grad_(False).zero_()
    for _ in training.train(model, learned, training.by_steps(STEPS)):
        pass
    return model


@pytest.fixture(scope="module")
def model(manual):
    return trained(manual[0], silence_kda=False)


# --- the network -----------------------------------------------------------------------------------------------------


def test_what_is_learnt_beyond_byte_pairs_comes_through_kda(model, manual):
    learned, held_out = manual
    measured = text.windows(held_out, 256, 64)
    loss = training.evaluate(model, measured)
    without = training.evaluate(trained(learned, silence_kda=True), measured)
    bigram = text.bigram_loss(learned, measured.flatten())
    assert loss <= without - GAP, f"{loss:.3f} with KDA, {without:.3f} without"
    assert without >= bigram - 0.05, f"{without:.3f} without KDA is better than byte pairs, {bigram:.3f}"


def test_a_byte_changes_no_earlier_prediction(model, manual):
    tokens = manual[1][None, :100].clone()
    with torch.no_grad():
        before, _ = model(tokens)
        tokens[0, 60] += 1
        after, _ = model(tokens)
    assert torch.equal(before[:, :60], after[:, :60])
    assert (before[:, 60:] != after[:, 60:]).any(-1).all()


def test_decoding_agrees_with_the_chunked_pass(model, manual):
    assert decoding.disagreement(model, manual[1][None, :256]) <= decoding.TOLERANCE


def test_a_lost_state_is_noticed(model, manual):
    def forgetful(tokens, states=None, *operator):
        return model(tokens, None, *operator)

    assert decoding.disagreement(forgetful, manual[1][None, :256]) > 100 * decoding.TOLERANCE


def test_a_seed_fixes_the_training(manual):
    def losses(seed):
        torch.manual_seed(seed)
        return [step.loss for step in training.train(LanguageModel(SMALL), manual[0], training.by_steps(3), seed)]

    assert losses(1) == losses(1) != losses(2)


def test_training_by_time_counts_the_time_of_steps(manual):
    steps = []
    for step in training.train(LanguageModel(SMALL), manual[0], training.by_time(0.5)):
        steps.append(step)
        time.sleep(0.01)  # whoever looks at a step meanwhile takes nothing from the training
    *before, last = steps
    assert last.done == 1 and last.seconds >= 0.5
    assert all(step.done == step.seconds / 0.5 < 1 for step in before)
    assert last.seconds <= 0.5 + (last.seconds - before[-1].seconds)


# --- the text --------------------------------------------------------------------------------------------------------


def test_the_manual_repeats_no_paragraph():
    paragraphs = text.python_manual().split(b"\n\n")
    assert len(set(paragraphs)) == len(paragraphs) > 1000


def test_the_end_is_held_out():
    learned, held_out = text.split(torch.arange(1000))
    assert learned.tolist() == list(range(900))
    assert held_out.tolist() == list(range(900, 1000))


def test_windows_cover_the_text_once():
    windows = text.windows(torch.arange(100), 10)
    assert windows[:, :-1].flatten().tolist() == list(range(90))
    assert torch.equal(windows[:-1, -1], windows[1:, 0])
    assert text.windows(torch.arange(100), 10, 3)[:, 0].tolist() == [0, 30, 60]


def test_a_bigram_model_knows_the_byte_before():
    alternating = text.tensor(b"ab" * 5000)
    random = torch.randint(97, 101, (100_000,), generator=torch.Generator().manual_seed(0))  # four letters
    assert text.bigram_loss(alternating, alternating) < 0.01
    assert text.bigram_loss(*text.split(random)) == pytest.approx(torch.tensor(4.0).log().item(), abs=0.01)


# --- the program -----------------------------------------------------------------------------------------------------


def refusal(capsys, *arguments):
    """The one line with which the program refuses."""
    assert main.main(["--steps", "1", *map(str, arguments)]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    message, = written.err.splitlines()
    assert message.startswith("quickstart: ")
    return message


@pytest.fixture
def prose(tmp_path):
    file = tmp_path / "prose.txt"
    file.write_text("All work and no play makes Jack a dull boy, says the book that nobody reads.\n" * 300)
    return file


def test_missing_file(capsys, tmp_path):
    message = refusal(capsys, "--text", tmp_path / "nowhere.txt")
    assert re.search(r"cannot read .*nowhere\.txt: No such file or directory; give --text a plain text file", message)


def test_unreadable_file(capsys, tmp_path):
    assert "cannot read" in refusal(capsys, "--text", tmp_path)  # a directory: even root cannot read it


def test_binary_file(capsys, tmp_path):
    (tmp_path / "picture").write_bytes(bytes(range(256)) * 100)
    assert "it is no text" in refusal(capsys, "--text", tmp_path / "picture")


def test_short_file(capsys, tmp_path):
    (tmp_path / "note.txt").write_text("short")
    assert "too short: 5 bytes; at least 20,000 are needed" in refusal(capsys, "--text", tmp_path / "note.txt")


def test_python_without_its_manual(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data", None)
    monkeypatch.delitem(sys.modules, "pydoc_data.topics", raising=False)
    assert "give another one with --text FILE" in refusal(capsys)


def test_unknown_backend(capsys, prose):
    message = refusal(capsys, "--text", prose, "--backend", "abacus")
    assert "asks for `abacus`, which no one registered; known: " in message and "reference" in message


def test_unknown_device(capsys, prose):
    assert "no device 'abacus' here" in refusal(capsys, "--text", prose, "--device", "abacus")


def test_output_that_is_a_file(capsys, prose):
    assert "give --output a directory" in refusal(capsys, "--text", prose, "--output", prose)


@pytest.mark.parametrize("option", ["--steps", "--seconds"])
def test_no_training_at_all(option, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main([option, "0"])
    assert stop.value.code == 2
    assert f"argument {option}: 0 is not above 0" in capsys.readouterr().err


def test_disagreement_fails_the_program(prose, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(main, "disagreement", lambda model, tokens: float("nan"))
    assert main.main(["--steps", "1", "--text", str(prose), "--output", str(tmp_path)]) == 1
    assert "disagrees with the chunked pass" in capsys.readouterr().err


def test_two_steps_from_start_to_plot(prose, tmp_path):
    """As Bazel runs it: from a directory of Bazel's, with paths relative to the user's."""
    (tmp_path / "elsewhere").mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "BUILD_WORKING_DIRECTORY": str(tmp_path)}
    arguments = ["--steps", "2", "--text", prose.name, "--output", "plots", "--backend", "reference"]
    run = subprocess.run([sys.executable, QUICKSTART / "main.py", *arguments], env=environment,
                         cwd=tmp_path / "elsewhere", capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "step 2, loss" in run.stderr and "tokens/s" in run.stderr
    assert re.search(r"logits differ by \S+ at most \(allowed: 1e-03\)", run.stdout)
    for operator in ("chunk_kda", "fused_recurrent_kda"):
        errors = re.search(rf"^{operator} +reference +(\S+) output, (\S+) state", run.stdout, re.MULTILINE).groups()
        assert all(0 < float(error) < 1e-5 for error in errors)
    assert re.search(r"gradients \(worst: \w+\)", run.stdout)
    assert re.search(r"held-out loss \d\.\d{3} nats per byte\nbigram model  \d\.\d{3}\nplot +\S+\.png$", run.stdout)
    assert (tmp_path / "plots" / "quickstart.loss.png").read_bytes().startswith(b"\x89PNG")
