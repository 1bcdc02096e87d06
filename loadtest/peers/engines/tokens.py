"""Greedy tokens of two engines side by side.

A side has lists with an entry for each sequence: its `tokens`, and in `logprobs` for each token `{token: log-probability}` of the likeliest ones.
"""

# The distance between bf16 numbers from 4 to 8, where the largest logits of a random model lie: engines round logits to bf16.
TIE = 2.0**-5


def first_difference(mine, theirs):
    """The first place at which two lists differ, or None."""
    if mine == theirs:
        return None
    return next((at for at, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))


def gap(logprobs):
    """The difference between the two largest log-probabilities, or None if there are fewer."""
    best = sorted(logprobs.values(), reverse=True)[:2]
    return round(best[0] - best[1], 5) if len(best) == 2 else None


def compare(stock, other, tie=TIE):
    """What an engine's tokens share with stock's.

    Up to the first difference of a sequence both engines have seen the same tokens, so that stock's two best log-probabilities at that place
    say whether the choice was a tie: they differ by at most `tie`. `largest_error` is the largest difference between log-probabilities of
    tokens that both chose.
    """
    if len(stock["tokens"]) != len(other["tokens"]):
        raise ValueError(f"stock has {len(stock['tokens'])} sequences, and the other engine {len(other['tokens'])}")
    differences, errors = [], []
    for number, (mine, theirs) in enumerate(zip(stock["tokens"], other["tokens"])):
        place = first_difference(mine, theirs)
        for at in range(len(mine) if place is None else place):
            a, b = (side["logprobs"][number][at].get(str(mine[at])) for side in (stock, other))
            if a is not None and b is not None:
                errors.append(abs(a - b))
        if place is None:
            continue
        here = {"sequence": number, "step": place}
        if place < min(len(mine), len(theirs)):
            likely = stock["logprobs"][number][place]
            here["stock_gap"], here["gap"] = gap(likely), gap(other["logprobs"][number][place])
            here["tie"] = here["stock_gap"] is not None and here["stock_gap"] <= tie
            here["is_stocks_second"] = sorted(likely, key=likely.get, reverse=True)[1:2] == [str(theirs[place])]
        differences.append(here)
    return {
        "sequences": len(stock["tokens"]),
        "equal": len(stock["tokens"]) - len(differences),
        "ties": sum(here.get("tie", False) for here in differences),
        "differences": differences,
        "largest_error": round(max(errors), 5) if errors else None,
    }
