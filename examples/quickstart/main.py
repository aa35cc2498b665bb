"""Train a small language model of Kimi Delta Attention layers on text, here and now, and show that it is right.

    tools/bazel run //:quickstart
    tools/bazel run //:quickstart -- --text FILE --device cuda
"""

import argparse
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import plot
import report
import text
import torch
import training
from decoding import TOLERANCE, disagreement, sample
from model import LanguageModel
from torch import Tensor
from tqdm import tqdm

import facade

# Where the user is: Bazel runs programs from a directory of its own.
HERE = Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
PLOT = "quickstart.loss.png"
POINTS = 6  # of the held-out curve
WINDOW, WINDOWS = 256, 160  # bytes that a measurement reads before it starts afresh; how often, at most
PROMPT = b"The following "


class Unusable(Exception):
    """What the user asked for cannot be done; the message says why."""


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        with facade.use_backend(options.backend) if options.backend else nullcontext():
            return run(options)
    except (Unusable, text.UnusableText) as problem:
        print(f"quickstart: {problem}", file=sys.stderr)
        return 2


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="quickstart", description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, metavar="FILE", help="text to learn (default: Python's own manual)")
    parser.add_argument("--seconds", type=positive(float), default=60, help="of training (default: 60)")
    parser.add_argument("--steps", type=positive(int), help="of training, instead of --seconds")
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=found, help=f"cpu, cuda ... (default: what is here, {found})")
    parser.add_argument("--backend", metavar="NAME", help="force a backend for every operator")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and sample (default: 0)")
    parser.add_argument("--output", type=Path, default=Path("."), metavar="DIR",
                        help=f"where {PLOT} goes (default: here)")
    return parser.parse_args(arguments)


def positive(kind):
    def number(word):
        if (value := kind(word)) <= 0:
            raise argparse.ArgumentTypeError(f"{word} is not above 0")
        return value

    return number


def run(options: argparse.Namespace) -> int:
    picture = folder(HERE / options.output) / PLOT
    learned, held_out = text.split(text.load(options.text and HERE / options.text))
    bigram = text.bigram_loss(learned, held_out)
    device = usable(options.device)
    torch.manual_seed(options.seed)
    model = LanguageModel().to(device)
    learned, held_out = learned.to(device), held_out.to(device)
    check_routes(model, held_out[None, :WINDOW])

    print(f"{len(learned):,} bytes to learn, {len(held_out):,} held out")
    torch.set_num_threads(1)  # the operations of so small a network lose by being split over cores
    measured = text.windows(held_out, WINDOW, WINDOWS)
    losses, points = train(model, learned, measured, options)
    held_out_loss = training.evaluate(model, measured)
    plot.save(picture, losses, [*points, (len(losses), held_out_loss)], bigram)

    difference = disagreement(model, held_out[None, :WINDOW])
    print(f"\nbyte by byte against in chunks: logits differ by {difference:.1e} at most (allowed: {TOLERANCE:.0e})")
    print(f"\n{sample(model, PROMPT, 300, seed=options.seed)}\n")
    batch = text.windows(held_out, training.LENGTH, training.BATCH)[:, 1:]
    print(report.table(report.measure(model, batch)))
    print(f"\nheld-out loss {held_out_loss:.3f} nats per byte\nbigram model  {bigram:.3f}\nplot          {picture}")
    if not difference <= TOLERANCE:
        print("quickstart: decoding byte by byte disagrees with the chunked pass", file=sys.stderr)
        return 1
    return 0


def train(model: LanguageModel, learned: Tensor, measured: Tensor, options: argparse.Namespace):
    """→ (loss of every batch, losses on ``measured`` on the way), by step; shows a progress bar meanwhile."""
    progress = training.by_steps(options.steps) if options.steps else training.by_time(options.seconds)
    losses, points = [], []
    with tqdm(total=100, bar_format="{l_bar}{bar}| {elapsed}{postfix}", mininterval=0.5) as bar:
        for step in training.train(model, learned, progress, options.seed):
            losses.append((step.number, step.loss))
            if (len(points) + 1) / POINTS <= step.done < 1:
                points.append((step.number, training.evaluate(model, measured)))
            bar.set_postfix_str(f"step {step.number}, loss {step.loss:.2f}, {step.speed:,.0f} tokens/s", refresh=False)
            bar.update(100 * step.done - bar.n)
    return losses, points


def folder(path: Path) -> Path:
    """The directory ``path``, made where it does not exist."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unusable(f"cannot write to {path}: {error.strerror}; give --output a directory") from error
    if not os.access(path, os.W_OK):
        raise Unusable(f"cannot write to {path}; give --output a directory of yours")
    return path


def usable(name: str) -> torch.device:
    """The device, tried out."""
    try:
        return torch.zeros((), device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise Unusable(f"no device {name!r} here ({reason}); leave --device out to run on what there is") from error


def check_routes(model: LanguageModel, tokens: Tensor) -> None:
    """Ask before training whether a forced backend will run."""
    try:
        routes = report.routes(report.operands(model, tokens))
    except ValueError as error:
        raise Unusable(str(error)) from error
    for route in routes:
        if route.backend == "none":
            raise Unusable("; ".join(reason for _, reason in route.refusals))


if __name__ == "__main__":
    sys.exit(main())
