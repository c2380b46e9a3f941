"""Linear attention of many tokens, a run of four at a time.

With S the state before a run, d_i what token i keeps of it, E_i = d_0 ... d_i and D_ij = d_(j+1)
... d_i, what token i adds is k_i u_i^T (arXiv:2412.06464, section 3.3, with chunks of four):

    u_i = beta_i (v_i - E_i S^T k_i - sum over j < i of D_ij (k_i.k_j) u_j)
    o_i = scale (E_i S^T q_i + sum over j <= i of D_ij (q_i.k_j) u_j)

    S <- E_3 S + sum over j of D_3j k_j u_j^T

Without `delta` u_i = beta_i v_i.

So a state is read twice and written once for four tokens, all in float32. It lies in the thread's
memory meanwhile, some columns after the other: in the pool, rows of a state are so far apart that
they share places in a cache. Of `TOKENS` tokens at a time, queries and keys are laid out and what
does not depend on a column is computed, then the columns are gone through.

A run that ends behind its sequence takes the last token again, keeps all and adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from mtmd.kernels.cpu.native.emit import F32, I64, SIZES, Emitter, Value, vec

LANES = 16
RUN = 4  # tokens
PAIR = 2 * RUN  # tokens whose keys and queries fill a vector
TOKENS = 2 * PAIR
FACTORS = 32  # float32 of a run
# Places in them: E, beta, D_3j, D_ij (k_i.k_j), scale D_ij (q_i.k_j), scale E
KEEP, STRENGTH, LATER, OF_KEYS, OF_QUERIES, SEEN = 0, 4, 8, 11, 17, 27
BEFORE = [(i, j) for i in range(RUN) for j in range(i)]
UP_TO = [(i, j) for i in range(RUN) for j in range(i + 1)]


def _columns(wide: bool) -> int:
    """Columns of a state that are worked on at once, as registers allow."""
    return LANES * (2 if wide else 1)


def scratch_bytes(size: int, value: int) -> int:
    """Return the bytes of scratch memory for states of `size` rows and `value` columns."""
    columns = -(-value // _columns(True)) * _columns(True)
    laid = TOKENS // PAIR * -(-size // LANES) * LANES * LANES
    return 4 * (columns * size + laid + TOKENS // RUN * FACTORS)


def emit_linear_runs(e: Emitter, q: str, k: str, v: str, delta: bool) -> None:
    """`recurrent.emit_linear` with its args, in `scratch_bytes` of scratch memory."""
    LinearRuns(e, q, k, v, delta).write()


class LinearRuns:
    def __init__(self, e: Emitter, q: str, k: str, v: str, delta: bool):
        self.e, self.types = e, (k, q)
        self.v_type, self.delta = v, delta
        self.q, self.q_token, self.q_group = e.arg_ptr(0), e.arg(1), e.arg(2)
        self.k, self.k_token, self.k_group = e.arg_ptr(3), e.arg(4), e.arg(5)
        self.v, self.v_token, self.v_head = e.arg_ptr(6), e.arg(7), e.arg(8)
        self.decay, self.beta, self.state, self.starts, self.slots, self.out = (
            e.arg_ptr(i) for i in range(9, 15)
        )
        self.tokens, self.groups, self.heads, self.size, self.count = (
            e.arg(i) for i in range(15, 20)
        )
        self.scale = e.arg_f32(20)
        self.columns = _columns(e.has("avx512f"))
        self.kind = vec(F32, LANES)
        # In scratch memory: a state, then keys and queries, then factors
        blocks = (self.count + (self.columns - 1)) // self.columns
        self.laid_row = (self.size + (LANES - 1)) // LANES * (LANES * LANES)
        self.saved = e.scratch
        self.laid = self.saved.at(blocks * self.columns * self.size, F32)
        self.factors = self.laid.at(self.laid_row * (TOKENS // PAIR), F32)

    def write(self) -> None:
        e, heads, count = self.e, self.heads, self.count
        with e.loop(e.first, e.last) as unit:
            s = unit // heads
            h = unit - s * heads
            start, stop = e.load(self.starts, I64, s), e.load(self.starts, I64, s + 1)
            slot = e.load(self.slots, I64, s)
            pooled = self.state.at((slot * self.size * heads + h) * count, F32)
            packed = self.out.at(((self.tokens + s * self.size) * heads + h) * count, F32)
            self._copy(pooled, False)
            with e.loop(start, stop, TOKENS) as first:
                end = e.minimum(first + TOKENS, stop)
                with e.loop(first, end, PAIR) as at:
                    self._lay(at, h, (at - first) // PAIR, stop)
                with e.loop(first, end, RUN) as at:
                    self._find_factors(at, h, (at - first) // RUN, stop)
                for c, masks in self._blocks():
                    with e.loop(first, end, RUN) as at:
                        self._run(c, masks, at, h, (at - first) // RUN, stop)
            self._copy(packed, True)

    def _blocks(self) -> Iterator[tuple[Value, list[Value | None]]]:
        """Columns of a state, so many at a time; of the last ones, which there are."""
        e, count, each = self.e, self.count, self.columns
        whole = count // each * each
        with e.loop(0, whole, each) as c:
            yield c, [None] * (each // LANES)
        with e.when(whole < count):
            yield whole, [e.mask(count - whole - n, LANES) for n in range(0, each, LANES)]

    def _copy(self, pool: Value, back: bool) -> None:
        """A state into the thread's memory, or back."""
        e, row = self.e, self.heads * self.count
        for c, masks in self._blocks():
            with e.loop(0, self.size) as i:
                for n, mask in enumerate(masks):
                    there, here = i * row + c + n * LANES, self._at(c, i, n)
                    if back:
                        value = e.load(self.saved, self.kind, here, align=64)
                        e.write(pool, "f32", there, value, mask)
                    else:
                        value = e.read(pool, "f32", there, LANES, mask)
                        e.store(self.saved, value, here, align=64)

    def _at(self, c: Value, i: Value, n: int) -> Value:
        """Place of row i of a state, of vector n of the columns from c on."""
        return c * self.size + i * self.columns + n * LANES

    def _rows(self, at: Value, h: Value, stop: Value) -> list[list[Value]]:
        """Return where the keys, then the queries, of a run begin."""
        e, g = self.e, h * self.groups // self.heads
        tokens = [e.minimum(at + i, stop - 1) for i in range(RUN)]
        return [
            [x.at((t * token + g * group) * SIZES[kind]) for t in tokens]
            for x, token, group, kind in (
                (self.k, self.k_token, self.k_group, self.types[0]),
                (self.q, self.q_token, self.q_group, self.types[1]),
            )
        ]

    def _lay(self, at: Value, h: Value, pair: Value, stop: Value) -> None:
        """Keys and queries of two runs: [row of the state, run, key or query, token]."""
        e, to = self.e, self.laid.at(pair * self.laid_row, F32)
        rows = [
            (row, kind)
            for n in range(2)
            for part, kind in zip(self._rows(at + n * RUN, h, stop), self.types, strict=True)
            for row in part
        ]
        for i, mask in e.spans(0, self.size, LANES):
            vectors = [e.read(row, kind, i, LANES, mask) for row, kind in rows]
            for n, vector in enumerate(e.transposed(vectors)):
                e.store(to, vector, (i + n) * LANES, align=64)

    def _find_factors(self, at: Value, h: Value, run: Value, stop: Value) -> None:
        e, to = self.e, self.factors.at(run * FACTORS, F32)
        keys, queries = self._rows(at, h, stop)
        before = BEFORE if self.delta else []
        sums = [e.var(self.kind, 0.0) for _ in (*before, *UP_TO)]
        for c, mask in e.spans(0, self.size, LANES):
            ks = [e.read(row, self.types[0], c, LANES, mask) for row in keys]
            qs = [e.read(row, self.types[1], c, LANES, mask) for row in queries]
            pairs = [(ks[i], ks[j]) for i, j in before] + [(qs[i], ks[j]) for i, j in UP_TO]
            for total, (a, b) in zip(sums, pairs, strict=True):
                total.set(e.fma(a, b, total.get()))
        none = [e.f32(0.0, LANES)] * (LANES - len(sums))
        all_dots = e.sums([*(total.get() for total in sums), *none])
        dots = {
            (of, i, j): all_dots[n]
            for n, (of, i, j) in enumerate(
                [("k", i, j) for i, j in before] + [("q", i, j) for i, j in UP_TO]
            )
        }
        decays: list[Value] = []
        since: dict[tuple[int, int], Value] = {}
        for i in range(RUN):
            token, real = e.minimum(at + i, stop - 1) * self.heads + h, at + i < stop
            keep = e.select(real, e.exp(e.load(self.decay, F32, token)), e.f32(1.0))
            e.store(to, e.select(real, e.load(self.beta, F32, token), e.f32(0.0)), STRENGTH + i)
            decays.append(decays[-1] * keep if decays else keep)
            for j in range(i):
                since[i, j] = since[i - 1, j] * keep
            since[i, i] = e.f32(1.0)
            e.store(to, decays[i], KEEP + i)
            e.store(to, decays[i] * self.scale, SEEN + i)
        for j in range(RUN - 1):
            e.store(to, since[RUN - 1, j], LATER + j)
        for n, (i, j) in enumerate(before):
            e.store(to, since[i, j] * dots["k", i, j], OF_KEYS + n)
        for n, (i, j) in enumerate(UP_TO):
            e.store(to, since[i, j] * dots["q", i, j] * self.scale, OF_QUERIES + n)

    def _run(
        self, c: Value, masks: list[Value | None], at: Value, h: Value, run: Value, stop: Value
    ) -> None:
        """Results of a run and the state after it, of the columns from c on."""
        e, kind = self.e, self.kind
        laid = self.laid.at(run // 2 * self.laid_row + run % 2 * PAIR, F32)
        factors = self.factors.at(run * FACTORS, F32)

        def factor(n: int) -> Value:
            return e.load(factors, F32, n).splat(LANES)

        def saved(i: Value) -> list[Value]:
            return [
                e.load(self.saved, kind, self._at(c, i, n), align=64) for n in range(len(masks))
            ]

        # S^T k, with `delta`, and S^T q, by their place in `laid`
        sums = {
            one: [e.var(kind, 0.0) for _ in masks] for one in range(0 if self.delta else RUN, PAIR)
        }
        with e.loop(0, self.size) as line:
            rows = saved(line)
            for one, totals in sums.items():
                number = e.load(laid, F32, line * LANES + one).splat(LANES)
                for row, total in zip(rows, totals, strict=True):
                    total.set(e.fma(number, row, total.get()))
        added: list[list[Value]] = []
        for i in range(RUN):
            token = e.minimum(at + i, stop - 1)
            keep, strength, seen = factor(KEEP + i), factor(STRENGTH + i), factor(SEEN + i)
            new = []
            for n, mask in enumerate(masks):
                location = token * self.v_token + h * self.v_head + c + n * LANES
                value = e.read(self.v, self.v_type, location, LANES, mask)
                if self.delta:
                    value = value - sums[i][n].get() * keep
                    for j in range(i):
                        value = value - factor(OF_KEYS + BEFORE.index((i, j))) * added[j][n]
                new.append(value * strength)
            added.append(new)
            for n, mask in enumerate(masks):
                result = sums[RUN + i][n].get() * seen
                for j in range(i + 1):
                    share = factor(OF_QUERIES + UP_TO.index((i, j)))
                    result = e.fma(share, added[j][n], result)
                with e.when(at + i < stop):
                    location = (token * self.heads + h) * self.count + c + n * LANES
                    e.write(self.out, "f32", location, result, mask)
        later = [
            [value * factor(LATER + j) if j < RUN - 1 else value for value in values]
            for j, values in enumerate(added)
        ]
        keep = factor(KEEP + RUN - 1)
        with e.loop(0, self.size) as line:
            rows = [row * keep for row in saved(line)]
            for j, values in enumerate(later):
                number = e.load(laid, F32, line * LANES + j).splat(LANES)
                rows = [e.fma(number, u, row) for u, row in zip(values, rows, strict=True)]
            for n, row in enumerate(rows):
                e.store(self.saved, row, self._at(c, line, n), align=64)
