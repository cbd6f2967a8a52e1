"""Compiled parser of svmlight text: lines to CSR arrays, decimal numbers to the nearest float64.

Numbers are identical to those of Python's `float`, by the method of Lemire, "Number parsing at a gigabyte per
second" (2021): exact products with small powers of ten, else one or two products with a 128-bit power of
five. The few numbers of more than 19 digits that the method cannot decide are listed for the caller.
"""

from __future__ import annotations

import numba
import numpy as np

from scalelatent.kernels.jit import entry, in_array, out_array, subkernel
from scalelatent.kernels.philox import mulhi

STATE = (
    "rows", "entries", "labels", "undecided", "lines", "lowest", "highest", "commas", "bare", "fractions",
    "error", "position", "lowest_label", "highest_label",
)  # fmt: skip
"""Names of the counters of `parse_lines`.

lowest, highest: columns. bare: rows without a label. fractions: labels that are not integers. undecided:
numbers left to the caller. position: byte of the error, or of the last line.
"""
N_STATE = len(STATE)
(
    ROWS, ENTRIES, LABELS, UNDECIDED, LINES, LOWEST, HIGHEST, COMMAS, BARE, FRACTIONS,
    ERROR, POSITION, LOWEST_LABEL, HIGHEST_LABEL,
) = range(N_STATE)  # fmt: skip
BAD_LABEL, BAD_COLUMN, NO_VALUE, BAD_VALUE, FULL = 1, 2, 3, 4, 5
"""Values of the counter `error`. FULL: the arrays of the caller are too short."""

# Exponents of ten outside this range give 0 or infinity.
_MIN_POWER, _MAX_POWER = -342, 308


def _powers_of_five() -> np.ndarray:
    """Return the first 128 bits of 5**q for q from -342 to 308, as rows (high, low) of uint64."""
    out = np.empty((_MAX_POWER - _MIN_POWER + 1, 2), np.uint64)
    for q in range(_MIN_POWER, _MAX_POWER + 1):
        if q < 0:
            power = 5**-q
            bits = (power - 1).bit_length()
            value = 2 ** (bits + 127 if q >= -27 else 2 * bits + 128) // power + 1
        else:
            value = 5**q << 128
        value >>= value.bit_length() - 128
        out[q - _MIN_POWER] = value >> 64, value & (2**64 - 1)
    return out


def new_state() -> np.ndarray:
    """Return the initial counters of `parse_lines`: int64 (N_STATE,)."""
    state = np.zeros(N_STATE, np.int64)
    limits = np.iinfo(np.int64)
    state[[LOWEST, LOWEST_LABEL]] = limits.max
    state[[HIGHEST, HIGHEST_LABEL]] = limits.min
    return state


FIVES = _powers_of_five()
TENS = np.array([float(10**k) for k in range(23)])
TWOS = np.array([np.ldexp(1.0, k) for k in range(-1074, 1024)])
_ONE, _TEN = np.uint64(1), np.uint64(10)
# The 64 - 55 bits of a product that decide whether a second product is needed.
_LOW_BITS = np.uint64(0x1FF)
_TOP_BIT = np.uint64(1 << 63)


@subkernel
def _leading_zeros(w: np.uint64) -> int:
    count = 0
    while not w & _TOP_BIT:
        w = w << _ONE
        count += 1
    return count


@subkernel
def _to_float(w: np.uint64, q: int) -> float:
    """Return w * 10**q, rounded to the nearest float64; w > 0."""
    if -22 <= q <= 22 and w <= np.uint64(1 << 53):
        exact = np.float64(w)
        return exact * TENS[q] if q >= 0 else exact / TENS[-q]
    if q < _MIN_POWER:
        return 0.0
    if q > _MAX_POWER:
        return np.inf
    zeros = _leading_zeros(w)
    w = w << np.uint64(zeros)
    five, rest = FIVES[q - _MIN_POWER, 0], FIVES[q - _MIN_POWER, 1]
    high, low = mulhi(w, five), w * five
    if high & _LOW_BITS == _LOW_BITS:
        more = mulhi(w, rest)
        low += more
        if more > low:
            high += _ONE
    upper = np.int64(high >> np.uint64(63))
    shift = np.uint64(upper + 64 - 52 - 3)
    mantissa = high >> shift
    power = ((217706 * q) >> 16) + 63 + upper - zeros + 1023
    if power <= 0:  # below the smallest normal number
        if -power + 1 >= 64:
            return 0.0
        mantissa = mantissa >> np.uint64(-power + 1)
        mantissa = (mantissa + (mantissa & _ONE)) >> _ONE
        return np.float64(mantissa) * TWOS[0]
    if low <= _ONE and -4 <= q <= 23 and mantissa & np.uint64(3) == _ONE and mantissa << shift == high:
        mantissa = mantissa & ~_ONE  # exactly halfway: round to even
    mantissa = (mantissa + (mantissa & _ONE)) >> _ONE
    if mantissa >= np.uint64(1 << 53):
        mantissa = np.uint64(1 << 52)
        power += 1
    if power >= 0x7FF:
        return np.inf
    return np.float64(mantissa) * TWOS[power - 1075 + 1074]


@subkernel
def _starts_with(text: np.ndarray, at: int, stop: int, lower: bytes) -> bool:
    """Return whether the text continues with a word, in either case."""
    if at + len(lower) > stop:
        return False
    for k in range(len(lower)):  # noqa: SIM110  numba has no all()
        if text[at + k] | 32 != lower[k]:
            return False
    return True


_INF, _INFINITY, _NAN, _QID = b"inf", b"infinity", b"nan", b"qid:"


@subkernel
def _number(text: np.ndarray, at: int, stop: int) -> tuple[float, int, bool]:
    """Return the number that starts at a byte, the byte after it, and whether its last bit is certain.

    If there is no number, the byte after it is the first byte.
    """
    first, negative = at, False
    if at < stop and (text[at] == 43 or text[at] == 45):
        negative = text[at] == 45
        at += 1
    for name, value in ((_INFINITY, np.inf), (_INF, np.inf), (_NAN, np.nan)):
        if _starts_with(text, at, stop, name):
            return -value if negative else value, at + len(name), True
    w, digits, kept, scale, more = np.uint64(0), 0, 0, 0, False
    point: bool = False
    while at < stop:
        c = text[at]
        if 48 <= c <= 57:
            digits += 1
            if kept < 19:
                w = w * _TEN + np.uint64(c - 48)
                kept += 1 if w else 0
                scale -= 1 if point else 0
            else:
                more = more or c != 48
                scale += 0 if point else 1
        elif c == 46 and not point:
            point = True
        else:
            break
        at += 1
    if digits == 0:
        return 0.0, first, True
    if at < stop and text[at] | 32 == 101:  # e
        after, sign, power, some = at + 1, 1, 0, False
        if after < stop and (text[after] == 43 or text[after] == 45):
            sign = -1 if text[after] == 45 else 1
            after += 1
        while after < stop and 48 <= text[after] <= 57:
            power = min(power * 10 + (np.int64(text[after]) - 48), 99999)  # type: ignore[assignment]
            some = True
            after += 1
        if some:
            at = after
            scale += sign * power
    if w == 0:
        return -0.0 if negative else 0.0, at, True
    value = _to_float(w, scale)
    certain = not more or value == _to_float(w + _ONE, scale)
    return -value if negative else value, at, certain


@subkernel
def _is_space(c: int) -> bool:
    return c <= 32 and c != 10  # all control characters separate words


@subkernel
def _is_end_of_content(text: np.ndarray, at: int, stop: int) -> bool:
    """Return whether the content of a line ends here: at a newline, a comment or the end of the text."""
    return at >= stop or text[at] == 10 or text[at] == 35


@subkernel
def _skip_spaces(text: np.ndarray, at: int, stop: int) -> int:
    while at < stop and _is_space(text[at]):
        at += 1
    return at


@subkernel
def _word_end(text: np.ndarray, at: int, stop: int) -> int:
    while at < stop and text[at] > 32 and text[at] != 35:
        at += 1
    return at


@subkernel
def _read_labels(
    text: np.ndarray,
    place: int,
    stop: int,
    keep: bool,
    labels: np.ndarray,
    undecided: np.ndarray,
    state: np.ndarray,
) -> tuple[int, int]:
    """Read the labels in the first word, unless it is an entry; return the byte after them and a count."""
    count, end = 0, _word_end(text, place, stop)
    for k in range(place, end):
        if text[k] == 58:
            state[BARE] += 1
            return place, 0
    while place < end:
        value, after, certain = _number(text, place, end)
        if after == place or (after < end and (text[after] != 44 or after + 1 == end)):
            state[ERROR], state[POSITION] = BAD_LABEL, place
            return place, 0
        if keep:
            if not certain:
                undecided[2 * state[UNDECIDED]] = -1 - state[LABELS]
                undecided[2 * state[UNDECIDED] + 1] = place
                state[UNDECIDED] += 1
            labels[state[LABELS]] = value
        state[LABELS] += 1
        count += 1
        if value == np.floor(value) and abs(value) < 9e15:
            state[LOWEST_LABEL] = min(state[LOWEST_LABEL], np.int64(value))
            state[HIGHEST_LABEL] = max(state[HIGHEST_LABEL], np.int64(value))
        else:
            state[FRACTIONS] += 1
        place = after
        if place < end:
            state[COMMAS] += 1
            place += 1
    return end, count


@entry(
    in_array("u1", 1),
    numba.int64,
    numba.boolean,
    out_array("f8", 1),
    out_array("i8", 1),
    out_array("i8", 1),
    out_array("f8", 1),
    out_array("i8", 1),
    out_array("i8", 1),
    out_array("i8", 1),
)
def parse_lines(
    text: np.ndarray,
    stop: int,
    keep: bool,
    data: np.ndarray,
    columns: np.ndarray,
    row_entries: np.ndarray,
    labels: np.ndarray,
    row_labels: np.ndarray,
    undecided: np.ndarray,
    state: np.ndarray,
) -> None:
    """Parse the whole lines in `text[:stop]` and count them; skip blank lines, '#' comments and 'qid:'.

    With `keep` the numbers are stored: values, columns, entries of each row, labels, labels of each row.
    `undecided` receives pairs (index, byte) of numbers for the caller; the index of label k is -1 - k.
    """
    at = 0
    while at < stop:
        state[POSITION] = at
        place = _skip_spaces(text, at, stop)
        n_labels, n_entries, empty = 0, 0, _is_end_of_content(text, place, stop)
        if not empty:
            if keep and state[ROWS] >= row_entries.shape[0]:
                state[ERROR] = FULL
                return
            place, n_labels = _read_labels(text, place, stop, keep, labels, undecided, state)
            if state[ERROR]:
                return
        while True:
            place = _skip_spaces(text, place, stop)
            if _is_end_of_content(text, place, stop):
                break
            if text[place] == 113 and _starts_with(text, place, stop, _QID):
                place = _word_end(text, place, stop)
                continue
            first, column = place, 0
            while place < stop and 48 <= text[place] <= 57 and place - first < 18:
                column = column * 10 + (np.int64(text[place]) - 48)  # type: ignore[assignment]
                place += 1
            if place == first or place >= stop or text[place] != 58:
                state[ERROR], state[POSITION] = BAD_COLUMN, first
                return
            place += 1
            if _is_end_of_content(text, place, stop) or _is_space(text[place]):
                state[ERROR], state[POSITION] = NO_VALUE, first
                return
            if keep:
                value, after, certain = _number(text, place, stop)
                if after == place or not (_is_end_of_content(text, after, stop) or _is_space(text[after])):
                    state[ERROR], state[POSITION] = BAD_VALUE, first
                    return
                if state[ENTRIES] >= data.shape[0]:
                    state[ERROR] = FULL
                    return
                if not certain:
                    undecided[2 * state[UNDECIDED]] = state[ENTRIES]
                    undecided[2 * state[UNDECIDED] + 1] = place
                    state[UNDECIDED] += 1
                data[state[ENTRIES]] = value
                columns[state[ENTRIES]] = column
                place = after
            else:
                place = _word_end(text, place, stop)
            state[LOWEST] = min(state[LOWEST], column)
            state[HIGHEST] = max(state[HIGHEST], column)
            state[ENTRIES] += 1
            n_entries += 1
        while place < stop and text[place] != 10:  # a comment
            place += 1
        at = place + 1
        state[LINES] += 1
        if not empty:
            if keep:
                row_entries[state[ROWS]] = n_entries
                row_labels[state[ROWS]] = n_labels
            state[ROWS] += 1
