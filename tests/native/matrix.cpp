// Checks of the matrix unit: what stands alone, and whole rows of attention through its pipeline.
#include "formulas.h"

// tiles.cpp
template <class T> void check_begin(run &r, void (*begin)(void *, void *, void *, ptrdiff_t, ptrdiff_t),
                                    ptrdiff_t most_rows);
template <class T>
void check_adjust(run &r, void (*adjust)(void *, void *, ptrdiff_t, ptrdiff_t, const mha_adjust *), ptrdiff_t lanes,
                  ptrdiff_t R);
template <class S> void check_finish(run &r, decltype(mha_tile_kernels::finish) finish, ptrdiff_t lanes, ptrdiff_t R);
template <class S> void check_mask_tiles(run &r, const mha_kernels &k, mha_mask_tile tile, ptrdiff_t most_rows);

namespace {

constexpr ptrdiff_t R = MHA_MATRIX_ROWS, panel = MHA_MATRIX_PANEL, chunk = MHA_MATRIX_CHUNK;

ptrdiff_t chunks(ptrdiff_t width) { return (width + chunk - 1) / chunk; }
ptrdiff_t row_bytes(const mha_matrix_kernels &m, ptrdiff_t width) { return chunks(width) * chunk * 2 * m.n_term; }

struct setting {
    ptrdiff_t n_row, n_key, width, value_width;
    bool natural, outliers, low;  // low: so small that the scores may be short
};

// The pipeline as the loop runs it, for one sub-tile.
template <class S> struct pipeline {
    run &r;
    const mha_matrix_kernels &m;
    const setting &at;
    rows<S> &query, &key, &value;
    array<char> packed_query, packed_key[2], packed_value[2];
    array<float> score[2], visible, bias, first, last, unused_maximum, sum, maximum, total, product, unused, passing;
    array<char> weight[3];
    mha_matrix_item item[12];
    mha_pipeline pipe = {};
    mha_packed query_report;
    ptrdiff_t n_item = 0;

    static array<float> floats(run &r, ptrdiff_t n) { return array<float>(r, n); }
    pipeline(run &to, const mha_matrix_kernels &kernels, const setting &s, rows<S> &q, rows<S> &k, rows<S> &v)
        : r(to),
          m(kernels),
          at(s),
          query(q),
          key(k),
          value(v),
          packed_query(r, R * row_bytes(m, at.width)),
          packed_key{{r, m.block_keys * row_bytes(m, at.width)}, {r, m.block_keys * row_bytes(m, at.width)}},
          packed_value{{r, m.block_keys * row_bytes(m, at.value_width)},
                       {r, m.block_keys * row_bytes(m, at.value_width)}},
          score{{r, R * MHA_MATRIX_PIECE}, {r, R * MHA_MATRIX_PIECE}},
          visible(r, R * m.block_keys),
          bias(r, R * m.block_keys),
          first(r, R),
          last(r, R),
          unused_maximum(r, R),
          sum(r, R * chunks(at.value_width) * chunk),
          maximum(r, R),
          total(r, R),
          product(r, R * chunks(at.value_width) * chunk),
          unused(r, R * panel),
          passing(r, MHA_MATRIX_PASSING * R * panel),
          weight{{r, R * m.block_keys * 2 * m.n_term},
                 {r, R * m.block_keys * 2 * m.n_term},
                 {r, R * m.block_keys * 2 * m.n_term}} {
        for (int i = 0; i < 12; i++) item[i].score = score[i % 2].data, item[i].weight = weight[i % 3].data;
        pipe.query_chunks = chunks(at.width), pipe.value_chunks = chunks(at.value_width), pipe.exp_scale = exp_scale();
        pipe.product = product.data, pipe.unused = pipe.pending = unused.data, pipe.passing = passing.data;
    }
    static double exp_scale() { return 0.18; }

    void advance(mha_matrix_item *next) {
        pipe.in_scores = next;
        m.step(&pipe);
        pipe.in_sum = pipe.in_values, pipe.in_values = pipe.in_softmax, pipe.in_softmax = next;
    }
    void drain() {
        while (pipe.in_sum || pipe.in_values || pipe.in_softmax) advance(NULL);
    }

    mha_adjust adjustment(ptrdiff_t from, ptrdiff_t n_key) {
        mha_adjust how = {};
        how.score_scale = 1;
        for (ptrdiff_t i = 0; i < R; i++)
            put_number(first[i], 0), put_number(last[i], at.n_key - from < n_key ? at.n_key - from : n_key);
        how.first = first.data, how.last = last.data;
        if (!at.natural) return how;
        for (ptrdiff_t j = 0; j < n_key; j++)
            for (ptrdiff_t i = 0; i < R; i++) put_number(bias[j * R + i], right_bias(i, from + j));
        how.bias = bias.data, how.bias_row_stride = 1;
        return how;
    }
    static wide right_bias(ptrdiff_t i, ptrdiff_t j) {
        return (i + j) % 7 == 3 ? -infinite : wide((i * 3 + j) % 5) / 4;
    }

    void take_block(ptrdiff_t from, int slot) {
        const ptrdiff_t n_real = at.n_key - from < m.block_keys ? at.n_key - from : m.block_keys;
        const mha_packed keys =
            m.pack_keys(packed_key[slot].data, key.first + from * key.stride, key.stride, n_real, at.width);
        const mha_packed values = m.pack_values(packed_value[slot].data, value.first + from * value.stride,
                                                value.stride, n_real, at.value_width);
        const bool whole = n_real % panel == 0, repaired = query_report.has_outliers || keys.has_outliers;
        const bool is_short = at.low && m.most_short > 0 && whole && !at.natural && !repaired;
        const ptrdiff_t most = is_short ? m.block_keys : ptrdiff_t(MHA_MATRIX_PIECE);
        for (ptrdiff_t start = 0; start < n_real; start += most) {
            const ptrdiff_t n_here = n_real - start < most ? n_real - start : most,
                            n_panel = (n_here + panel - 1) / panel;
            mha_matrix_item *next = &item[n_item++ % 12];
            next->query = packed_query.data, next->n_row = at.n_row, next->n_panel = n_panel;
            next->key = packed_key[slot].data + start * row_bytes(m, at.width);
            next->value = packed_value[slot].data + start * chunk * 2 * m.n_term;
            next->sum = sum.data, next->maximum = maximum.data, next->total = total.data;
            next->adjusted = at.natural || !whole || repaired, next->short_scores = is_short;
            mha_adjust how = adjustment(from + start, n_panel * panel);
            advance(next);
            auto row = query.addresses();
            if (repaired)
                m.repair_scores(next->score, row.data(), at.n_row, 1, key.first + (from + start) * key.stride,
                                key.stride, n_here, at.width);
            if (next->adjusted) m.adjust(next->score, next->block_maximum, at.n_row, n_panel * panel, &how);
            if (!values.has_outliers) continue;
            drain();
            visible.fill(0);
            m.adjust(visible.data, unused_maximum.data, at.n_row, n_panel * panel, &how);
            m.add_outliers(sum.data, next->weight, visible.data, value.first + (from + start) * value.stride,
                           value.stride, n_here, at.value_width);
        }
        drain();
    }

    void attend(char *const *out, char *const *lse) {
        auto row = query.addresses();
        m.acquire();
        query_report = m.pack_queries(packed_query.data, row.data(), at.n_row, at.width, 1);
        m.begin(sum.data, maximum.data, total.data, R, chunks(at.value_width) * chunk);
        for (ptrdiff_t from = 0, slot = 0; from < at.n_key; from += m.block_keys, slot ^= 1) take_block(from, slot);
        m.release();
        mha_finish how = {};
        how.lse_scale = exp_scale() * 0.693147180559945309, how.out_scale = 1, how.lse = lse;
        m.finish(out, sum.data, maximum.data, total.data, at.n_row, at.value_width, &how);
    }
};

template <class S> wide right_score(rows<S> &query, rows<S> &key, ptrdiff_t i, ptrdiff_t j) {
    wide s = 0;
    for (ptrdiff_t d = 0; d < query.width; d++) s += query(i, d) * key(j, d);
    return s;
}

template <class S> void compare(run &r, const mha_matrix_kernels &m, const setting &at, rows<S> &query, rows<S> &key,
                                rows<S> &value, array<S> &out, array<float> &lse) {
    const wide error = m.n_term == 3 ? 4e-6L : m.n_term == 2 ? 4e-4L : at.low ? 0.02L : 0.015L;
    const wide exp_scale = pipeline<S>::exp_scale();
    for (ptrdiff_t i = 0; i < at.n_row; i++) {
        std::vector<wide> s;
        wide most = -infinite, total = 0;
        for (ptrdiff_t j = 0; j < at.n_key; j++) {
            const wide b = at.natural ? pipeline<S>::right_bias(i, j) : 0;
            s.push_back(b == -infinite ? -infinite : right_score(query, key, i, j) + b);
            most = s[j] > most ? s[j] : most;
            if (isnan(s[j])) most = s[j];
            if (isnan(most)) break;
        }
        if (!isfinite(most)) {  // NaN or an infinite score: every weight is NaN; no key: zeros
            for (ptrdiff_t d = 0; d < at.value_width; d++)
                r.equal(number(out[i * at.value_width + d]), most == -infinite ? 0 : wide(NAN), "out", i, d);
            continue;
        }
        for (wide x : s) total += right_weight(x, most, exp_scale);
        r.near(lse[i], (most * exp_scale + log2l(total)) * logl(2), error * 2 * (1 + fabsl(most * exp_scale)), "lse", i,
               0);
        for (ptrdiff_t d = 0; d < at.value_width; d++) {
            wide right = 0, size = 0;
            for (ptrdiff_t j = 0; j < at.n_key; j++) {
                if (s[j] == -infinite) continue;
                right += right_weight(s[j], most, exp_scale) / total * value(j, d);
                size += right_weight(s[j], most, exp_scale) / total * (isfinite(value(j, d)) ? fabsl(value(j, d)) : 1);
            }
            r.near(number(out[i * at.value_width + d]), right,
                   error * (size + 0.2L) + rounding<S>(isfinite(right) ? right : 0), "out", i, d);
        }
    }
}

template <class S> void check_attention(run &r, const mha_matrix_kernels &m, const setting &at, noise &random) {
    r.sized("%td rows, %td keys, widths %td and %td, natural %d, outliers %d, low %d", at.n_row, at.n_key, at.width,
            at.value_width, at.natural, at.outliers, at.low);
    const int kind = int((at.n_key + at.width) % REPEATED);
    rows<S> query(at.n_row, at.width, kind, random, at.low ? 0.3L : 1), key(at.n_key, at.width, kind, random),
        value(at.n_key, at.value_width, kind, random);
    if (at.outliers) {
        put_number(value.at(at.n_key / 2, at.value_width - 1), infinite);
        if (at.n_key > 3) put_number(value.at(3, 0), wide(NAN));
        if (at.n_row > 2 && std::is_same<S, float>::value)
            put_number(query.at(1, 0), 0x1p70L), put_number(query.at(2, 0), wide(NAN));
        if (at.natural) put_number(key.at(at.n_key / 3, 0), infinite);
    }
    array<S> out(r, at.n_row * at.value_width);
    array<float> lse(r, at.n_row);
    std::vector<char *> row, lse_row;
    for (ptrdiff_t i = 0; i < at.n_row; i++)
        row.push_back((char *)&out[i * at.value_width]), lse_row.push_back((char *)&lse[i]);
    pipeline<S> pipe(r, m, at, query, key, value);
    r.call([&] { pipe.attend(row.data(), lse_row.data()); });
    if (!r.timing) compare(r, m, at, query, key, value, out, lse);
}

// Scores of rows with a number that the unit cannot take are computed anew, the others stay.
template <class S> void check_repair(run &r, const mha_matrix_kernels &m) {
    noise random;
    for (ptrdiff_t n_row : r.of({1, 17, R}))
        for (ptrdiff_t n_key : r.of({1, 33, MHA_MATRIX_PIECE}))
            for (ptrdiff_t width : r.of({1, 17, 65})) {
                r.sized("%td rows, %td keys, width %td", n_row, n_key, width);
                rows<S> query(n_row, width, GAPS, random), key(n_key, width, BACKWARD, random);
                const ptrdiff_t bad_row = n_row / 2, bad_key = n_key / 2;
                put_number(query.at(bad_row, width - 1), infinite),
                    put_number(key.at(bad_key, 0), n_key % 2 ? wide(NAN) : infinite);
                array<float> score(r, n_key * R);
                auto row = query.addresses();
                score.fill(7);
                r.call(
                    [&] { m.repair_scores(score.data, row.data(), n_row, -1, key.first, key.stride, n_key, width); });
                for (ptrdiff_t i = 0; i < n_row; i++)
                    for (ptrdiff_t j = 0; j < n_key; j++)
                        r.equal(score[j * R + i], i == bad_row || j == bad_key ? -right_score(query, key, i, j) : 7,
                                "score", j, i);
            }
}

template <class S> void check_all(run &r, const mha_kernels &k, const mha_matrix_kernels &m) {
    static_assert(sizeof(mha_matrix_kernels) == 16 * sizeof(void *),
                  "a new member of mha_matrix_kernels wants its check");
    if (r.wants("matrix.begin")) check_begin<float>(r, m.begin, R);
    if (r.wants("matrix.adjust")) check_adjust<float>(r, m.adjust, k.lanes, R);
    if (r.wants("matrix.mask_tile")) check_mask_tiles<S>(r, k, m.mask_tile, R);
    if (r.wants("matrix.finish")) check_finish<S>(r, m.finish, k.lanes, R);
    if (r.wants("matrix.repair_scores")) check_repair<S>(r, m);
    if (!r.wants("matrix.step")) return;
    noise random;
    for (ptrdiff_t n_row : r.of({1, 17, R - 1, R}))
        for (ptrdiff_t n_key : r.of({1, panel - 1, panel, panel + 1, 100, MHA_MATRIX_PIECE + 33, m.block_keys + panel}))
            for (ptrdiff_t width : r.of({1, 31, 33, 96, 64})) {
                const ptrdiff_t value_width = r.timing ? 64 : 1 + (n_row * 7 + n_key * 3 + width) % 70;
                check_attention<S>(r, m, {n_row, n_key, width, value_width, false, false, false}, random);
                if (r.timing) continue;
                check_attention<S>(r, m, {n_row, n_key, width, value_width, true, false, false}, random);
                if (m.most_short > 0)
                    check_attention<S>(r, m, {n_row, n_key, width, value_width, false, false, true}, random);
                if (width == 33) {
                    check_attention<S>(r, m, {n_row, n_key, width, value_width, false, true, false}, random);
                    check_attention<S>(r, m, {n_row, n_key, width, value_width, true, true, false}, random);
                }
            }
}

}  // namespace

void check_matrix(run &r, const mha_kernels &k, const mha_matrix_kernels &m, mha_storage storage) {
    if (storage == MHA_FLOAT32) check_all<float>(r, k, m);
    if (storage == MHA_FLOAT16) check_all<f16>(r, k, m);
    if (storage == MHA_BFLOAT16) check_all<bf16>(r, k, m);
}
