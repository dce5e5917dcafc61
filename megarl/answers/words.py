"""Words with a value or a meaning of their own."""

_UNITS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")

NUMBERS = {
    **{word: n for n, word in enumerate(_UNITS)},
    **{word: 10 * n for n, word in enumerate(_TENS, 2)},
    **{f"{ten}{mark}{_UNITS[k]}": 10 * n + k for n, ten in enumerate(_TENS, 2) for k in range(1, 10) for mark in "- "},
    "one hundred": 100, "one thousand": 1000, "one million": 1000000,
}  # fmt: skip

PHRASES = {
    **dict.fromkeys(("no solution", "no solutions", "no real solution", "no real solutions", "there is no solution",
                     "there are no solutions", "empty set", "the empty set", "no such number exists"), "empty"),
    **dict.fromkeys((
        "all real numbers", "all reals", "all real x", "the real numbers", "real numbers", "all real number",
    ), "reals"),
    **dict.fromkeys(("does not exist", "dne", "limit does not exist", "the limit does not exist"), "dne"),
    "it is correct": "correct",
}  # fmt: skip
