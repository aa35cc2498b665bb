"""Test cases from axes, crossed pairwise: every two values of two axes meet in some case."""

import itertools
import random

CANDIDATES = 40  # random completions tried per case
SEED = 0


SAMPLES = 400  # random cases looked at for traits that no case has


def pairwise(axes: dict[str, list], valid, traits=None) -> list[dict]:
    """Cases that cover every pair of values which some valid case can hold, and every ``traits(case)`` that random
    valid cases have. Same axes, same cases."""
    chance = random.Random(SEED)
    names = list(axes)
    open_pairs = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
    }
    cases = []
    while open_pairs:
        seed_pair = min(open_pairs, key=repr)
        best, best_count = None, 0
        for _ in range(CANDIDATES):
            choice = _complete(axes, dict(seed_pair), valid, chance)
            if choice is None:
                continue
            count = sum(1 for pair in itertools.combinations(choice.items(), 2) if pair in open_pairs)
            if count > best_count:
                best, best_count = choice, count
        if best is None:  # no valid case holds this pair
            open_pairs.discard(seed_pair)
            continue
        open_pairs -= set(itertools.combinations(best.items(), 2))
        cases.append({name: axes[name][index] for name, index in best.items()})
    if traits is not None:
        met = {traits(case) for case in cases}
        for _ in range(SAMPLES):
            choice = _complete(axes, {}, valid, chance)
            case = choice and {name: axes[name][index] for name, index in choice.items()}
            if case and traits(case) not in met:
                met.add(traits(case))
                cases.append(case)
    return cases


def _complete(axes, fixed, valid, chance):
    """A random valid choice of an index per axis that holds ``fixed``."""
    for _ in range(200):
        choice = {name: fixed.get(name, chance.randrange(len(values))) for name, values in axes.items()}
        if valid({name: axes[name][index] for name, index in choice.items()}):
            return choice
    return None
