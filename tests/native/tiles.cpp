// Checks of the functions for tiles of rows, and of those that widen rows.
#include <math.h>

#include "formulas.h"

namespace {

sizes some_rows(const mha_kernels &k) { return {1, k.lanes - 1, k.lanes + 1, k.tile_rows - 1, k.tile_rows}; }
sizes some_widths(const mha_kernels &k) { return {1, k.lanes - 1, k.lanes, k.lanes + 1, 2 * k.lanes + 3, 64}; }
const sizes some_keys = {1, 2, 7, 16, 33, MHA_KEY_BLOCK - 1, MHA_KEY_BLOCK};

template <class S> void check_widen(run &r, const mha_kernels &k) {
    if (!k.widen || !r.wants("widen")) return;
    noise random;
    for (ptrdiff_t n_row : r.of({1, 2, MHA_KEY_BLOCK}))
        for (ptrdiff_t width : r.of(some_widths(k)))
            for (int kind = TIGHT; kind < (r.timing ? 1 : N_STRIDE); kind++) {
                r.sized("%td rows, width %td, stride %d", n_row, width, kind);
                const ptrdiff_t padded = (width + k.lanes - 1) / k.lanes * k.lanes;
                rows<S> narrow(n_row, width, kind, random, 100);
                put_number(narrow.at(0, 0), infinite);
                if (width > 1)
                    put_number(narrow.at(0, 1), 1e-7L), put_number(narrow.at(n_row - 1, width - 1), wide(NAN));
                array<float> block(r, n_row * padded);
                r.call([&] { k.widen(block.data, padded * sizeof(float), narrow.first, narrow.stride, n_row, width); });
                for (ptrdiff_t i = 0; i < n_row; i++)
                    for (ptrdiff_t d = 0; d < width; d++) r.equal(block[i * padded + d], narrow(i, d), "row", i, d);
            }
}

template <class S> void check_pack_query(run &r, const mha_kernels &k) {
    typedef typename arithmetic<S>::type T;
    if (!r.wants("tile.pack_query")) return;
    noise random;
    for (ptrdiff_t n_row : r.of(some_rows(k)))
        for (ptrdiff_t width : r.of({1, k.lanes - 1, k.lanes, k.lanes + 1, 2 * k.lanes, 2 * k.lanes + 3, 64}))
            for (int kind = TIGHT; kind < (r.timing ? 1 : N_STRIDE); kind++)
                for (double scale : {-1.0, 1.0}) {
                    r.sized("%td rows, width %td, stride %d", n_row, width, kind);
                    rows<S> query(n_row, width, kind, random);
                    auto row = query.addresses();
                    array<T> packed(r, width * k.tile_rows);
                    r.call([&] { k.tile.pack_query(packed.data, row.data(), n_row, width, scale); });
                    for (ptrdiff_t d = 0; d < width; d++)
                        for (ptrdiff_t i = 0; i < n_row; i++)
                            r.equal(packed[d * k.tile_rows + i], query(i, d) * scale, "query", d, i);
                }
}

}  // namespace

template <class T>
void check_begin(run &r, void (*begin)(void *, void *, void *, ptrdiff_t, ptrdiff_t), ptrdiff_t most_rows) {
    for (ptrdiff_t n_row : r.of({1, most_rows - 1, most_rows}))
        for (ptrdiff_t width : r.of({0, 1, 65})) {
            r.sized("%td rows, width %td", n_row, width);
            array<T> sum(r, width * most_rows), maximum(r, most_rows), total(r, most_rows);
            r.call([&] { begin(sum.data, maximum.data, total.data, n_row, width); });
            for (ptrdiff_t i = 0; i < n_row; i++) {
                r.equal(maximum[i], -infinite, "maximum", i, 0);
                r.equal(total[i], 0, "total", i, 0);
                for (ptrdiff_t d = 0; d < width; d++) r.equal(sum[d * most_rows + i], 0, "sum", d, i);
            }
        }
}

namespace {

template <class T> void check_scores(run &r, const mha_kernels &k) {
    if (!r.wants("tile.scores")) return;
    noise random;
    for (ptrdiff_t n_row : r.of(some_rows(k)))
        for (ptrdiff_t n_key : r.of(some_keys))
            for (ptrdiff_t width : r.of({0, 1, 2, 3, 17, 64}))
                for (int kind = TIGHT; kind < (r.timing ? 1 : N_STRIDE); kind++) {
                    r.sized("%td rows, %td keys, width %td, stride %d", n_row, n_key, width, kind);
                    const ptrdiff_t R = k.tile_rows;
                    rows<T> key(n_key, width, kind, random);
                    if (width > 2 && n_key > 2 && kind == TIGHT && !r.timing)
                        put_number(key.at(1, 1), n_row % 2 ? infinite : wide(NAN));
                    array<T> query(r, width * R), score(r, n_key * R), highest(r, R);
                    fill_scores(query, random, width, R);
                    const mha_prefetch then = {key.first, key.stride, n_key, width, NULL},
                                       ahead = {key.first, key.stride, 1, 8, &then};
                    r.call([&] {
                        k.tile.scores(score.data, highest.data, query.data, n_row, key.first, key.stride, n_key, width,
                                      kind ? &ahead : NULL);
                    });
                    for (ptrdiff_t i = 0; i < n_row; i++) {
                        wide most = -infinite;
                        bool ordered = true;
                        for (ptrdiff_t j = 0; j < n_key; j++) {
                            wide right = 0, size = 0;
                            for (ptrdiff_t d = 0; d < width; d++)
                                right += key(j, d) * query[d * R + i], size += fabsl(key(j, d) * query[d * R + i]);
                            r.near(score[j * R + i], right, sum_limit<T>(width, size), "score", j, i);
                            ordered &= !isnan(score[j * R + i]);
                            most = score[j * R + i] > most ? wide(score[j * R + i]) : most;
                        }
                        if (ordered) r.equal(highest[i], most, "block_maximum", i, 0);
                    }
                }
}

}  // namespace

// ---- adjust ----

template <class T>
void check_adjust(run &r, void (*adjust)(void *, void *, ptrdiff_t, ptrdiff_t, const mha_adjust *), ptrdiff_t lanes,
                  ptrdiff_t R) {
    noise random;
    for (ptrdiff_t n_row : r.of({1, lanes + 1, R - 1, R}))
        for (ptrdiff_t n_key : r.of({1, 5, MHA_KEY_BLOCK}))
            for (int options = 0; options < (r.timing ? 1 : 64); options++) {
                const bool capped = options & 1, sloped = options & 2, masked = options & 4, shared = options & 8,
                           ranged = options & 16, wild = options & 32;
                if (shared && !masked) continue;
                r.sized("%td rows, %td keys, options %d", n_row, n_key, options);
                array<T> score(r, n_key * R), before(r, n_key * R), highest(r, R), slope(r, R), distance(r, R),
                    bias(r, n_key * R), first(r, R), last(r, R);
                fill_scores(before, random, n_key, R);
                for (ptrdiff_t i = 0; i < R; i++) {
                    put_number(slope[i], random.uniform()), put_number(distance[i], random.below(200) - 50);
                    const ptrdiff_t a = random.below(n_key + 1), b = random.below(n_key + 1);
                    put_number(first[i], i % 3 ? (a < b ? a : b) : 0),
                        put_number(last[i], i % 3 ? (a < b ? b : a) : n_key);
                }
                for (ptrdiff_t i = 0; i < n_key * R; i++)
                    put_number(bias[i], random.below(4) ? random.normal() : -infinite);
                if (wild && !capped)  // an excluded key loses even a NaN score; a finite mask never excludes
                    for (ptrdiff_t i = 0; i < n_key * R; i++) {
                        if (random.below(5) == 0) put_number(before[i], random.below(2) ? wide(NAN) : -infinite);
                        if (random.below(5) == 0)
                            put_number(bias[i], sizeof(T) == 4 ? -wide(__FLT_MAX__) : -wide(__DBL_MAX__));
                    }
                score.copy(before);
                mha_adjust how = {};
                how.score_scale = capped ? 0.3 : 1, how.softcap = capped ? 2.5 : 0;
                if (sloped) how.slope = slope.data, how.distance = distance.data;
                if (masked) how.bias = bias.data, how.bias_row_stride = !shared, how.bias_harmless = !wild;
                if (ranged) how.first = first.data, how.last = last.data;
                r.call([&] { adjust(score.data, highest.data, n_row, n_key, &how); });
                for (ptrdiff_t i = 0; i < n_row; i++) {
                    wide most = -infinite;
                    bool ordered = true;
                    for (ptrdiff_t j = 0; j < n_key; j++) {
                        wide size;
                        const wide right =
                            right_adjusted<T>(before[j * R + i], how, slope[i], distance[i],
                                              shared ? bias[j] : bias[j * R + i], first[i], last[i], j, size);
                        r.near(score[j * R + i], right, epsilon<T> * 6 * size + smallest<T>, "score", j, i);
                        ordered &= !isnan(score[j * R + i]);
                        most = score[j * R + i] > most ? wide(score[j * R + i]) : most;
                    }
                    if (ordered) r.equal(highest[i], most, "block_maximum", i, 0);
                }
            }
}

namespace {

// ---- the online softmax ----

template <class T> void check_softmax(run &r, const mha_kernels &k) {
    if (!r.wants("tile.softmax")) return;
    noise random;
    const ptrdiff_t R = k.tile_rows;
    for (ptrdiff_t n_row : r.of(some_rows(k)))
        for (ptrdiff_t n_key : r.of(some_keys))
            for (double exp_scale : {1.0, 1.4426950408889634, 0.05}) {
                r.sized("%td rows, %td keys, exp_scale %g", n_row, n_key, exp_scale);
                array<T> score(r, n_key * R), before(r, n_key * R), highest(r, R), maximum(r, R), total(r, R),
                    rescale(r, R);
                std::vector<wide> old_maximum, old_total;
                fill_scores(before, random, n_key, R);
                for (ptrdiff_t i = 0; i < R; i++) {
                    wide most = -infinite;
                    for (ptrdiff_t j = 0; j < n_key; j++) {
                        if (i % 4 == 1 && !r.timing) put_number(before[j * R + i], -infinite);  // all excluded
                        if (i % 4 == 2 && j % 2) put_number(before[j * R + i], j % 3 ? -infinite : -1e4L);
                        most = before[j * R + i] > most ? wide(before[j * R + i]) : most;
                    }
                    put_number(highest[i], most);
                    put_number(maximum[i], i % 3 ? random.normal() * 4 : -infinite);
                    put_number(total[i], i % 3 ? 1 + random.uniform() : 0);
                    old_maximum.push_back(maximum[i]), old_total.push_back(total[i]);
                }
                score.copy(before);
                r.call([&] {
                    k.tile.softmax(score.data, highest.data, maximum.data, total.data, rescale.data, n_row, n_key,
                                   exp_scale);
                });
                if (r.timing) continue;
                for (ptrdiff_t i = 0; i < n_row; i++) {
                    const wide now = wide(highest[i]) > old_maximum[i] ? wide(highest[i]) : old_maximum[i],
                               base = now == -infinite ? 0 : now;
                    r.equal(maximum[i], now, "maximum", i, 0);
                    const wide factor = right_weight(old_maximum[i], now, exp_scale);
                    r.near(rescale[i], factor, weight_limit<T>(factor, (old_maximum[i] - base) * exp_scale), "rescale",
                           i, 0);
                    wide sum = old_total[i] * factor,
                         limit = sum_limit<T>(n_key, 4 * n_key + old_total[i]) +
                                 4 * weight_limit<T>(factor, (old_maximum[i] - base) * exp_scale);
                    for (ptrdiff_t j = 0; j < n_key; j++) {
                        const wide right = right_weight(before[j * R + i], now, exp_scale),
                                   exponent = (before[j * R + i] - base) * exp_scale;
                        r.near(score[j * R + i], right, weight_limit<T>(right, exponent), "weight", j, i);
                        sum += right, limit += weight_limit<T>(right, exponent);
                    }
                    r.near(total[i], sum, limit, "total", i, 0);
                }
            }
}

template <class T> void check_values(run &r, const mha_kernels &k) {
    noise random;
    const ptrdiff_t R = k.tile_rows;
    for (bool guarded : {false, true}) {
        if (!r.wants(guarded ? "tile.values_guarded" : "tile.values")) continue;
        for (ptrdiff_t n_row : r.of(some_rows(k)))
            for (ptrdiff_t n_key : r.of({1, 2, 7, MHA_KEY_BLOCK}))
                for (ptrdiff_t width : r.of({1, 2, 3, 13, 23, 64}))
                    for (int kind = TIGHT; kind < (r.timing ? 1 : N_STRIDE); kind++) {
                        r.sized("%td rows, %td keys, width %td, stride %d", n_row, n_key, width, kind);
                        rows<T> value(n_key, width, kind, random);
                        array<T> sum(r, width * R), before(r, width * R), rescale(r, R), weight(r, n_key * R),
                            visible(r, n_key * R);
                        fill_scores(before, random, width, R);
                        for (ptrdiff_t i = 0; i < R; i++) put_number(rescale[i], random.uniform());
                        for (ptrdiff_t i = 0; i < n_key * R; i++) {
                            const bool seen = random.below(3) > 0;
                            put_number(visible[i], seen ? 0 : -infinite),
                                put_number(weight[i], seen || !guarded ? random.uniform() : 0);
                        }
                        if (guarded && n_key > 1) {  // a value that no row but the first sees
                            put_number(value.at(1, width - 1), n_row % 2 ? wide(NAN) : infinite);
                            for (ptrdiff_t i = 1; i < R; i++)
                                if (kind != REPEATED)
                                    put_number(visible[R + i], -infinite), put_number(weight[R + i], 0);
                        }
                        sum.copy(before);
                        r.call([&] {
                            if (guarded)
                                k.tile.values_guarded(sum.data, rescale.data, weight.data, visible.data, n_row,
                                                      value.first, value.stride, n_key, width);
                            else
                                k.tile.values(sum.data, rescale.data, weight.data, n_row, value.first, value.stride,
                                              n_key, width, NULL);
                        });
                        if (r.timing) continue;
                        for (ptrdiff_t i = 0; i < n_row; i++)
                            for (ptrdiff_t d = 0; d < width; d++) {
                                wide right = wide(before[d * R + i]) * rescale[i], size = fabsl(right);
                                for (ptrdiff_t j = 0; j < n_key; j++) {
                                    if (guarded && visible[j * R + i] == -infinite) continue;
                                    right += weight[j * R + i] * value(j, d),
                                        size += fabsl(weight[j * R + i] * value(j, d));
                                }
                                r.near(sum[d * R + i], right, sum_limit<T>(n_key, isfinite(size) ? size : 0), "sum", d,
                                       i);
                            }
                    }
    }
}

template <class S> void check_all_finite(run &r, const char *name,
                                         int (*all_finite)(const char *, ptrdiff_t, ptrdiff_t, ptrdiff_t),
                                         const sizes &widths) {
    if (!r.wants(name)) return;
    noise random;
    for (ptrdiff_t n_row : r.of({1, 3, MHA_KEY_BLOCK}))
        for (ptrdiff_t width : r.of(widths))
            for (int kind = TIGHT; kind < (r.timing ? 1 : N_STRIDE); kind++)
                for (wide bad : {wide(0), wide(NAN), infinite, -infinite}) {
                    r.sized("%td rows, width %td, stride %d, with %Lg", n_row, width, kind, bad);
                    rows<S> value(n_row, width, kind, random, 1e4L);
                    put_number(value.at(random.below(n_row), random.below(width)), bad);
                    int found = -1;
                    r.call([&] { found = all_finite(value.first, value.stride, n_row, width); });
                    r.equal(found != 0, bad == 0, "all finite", 0, 0);
                }
}

}  // namespace

// ---- the end of a row ------------------------------------------------------------------------------------------------

// S is stored, T computed; sum is [width][R].
template <class S>
void check_finish(run &r, decltype(mha_tile_kernels::finish) finish, ptrdiff_t lanes, ptrdiff_t R) {
    typedef typename arithmetic<S>::type T;
    noise random;
    for (ptrdiff_t n_row : r.of({1, lanes + 1, R - 1, R}))
        for (ptrdiff_t width : r.of({1, 2, lanes - 1, lanes, lanes + 1, 2 * lanes, 2 * lanes + 1, 64}))
            for (int options = 0; options < (r.timing ? 1 : 32); options++) {
                r.sized("%td rows, width %td, options %d", n_row, width, options);
                const ptrdiff_t row_size = width + options % 3;
                array<T> sum(r, width * R), before(r, width * R), maximum(r, R), total(r, R), lse(r, R);
                array<S> out(r, n_row * row_size);
                std::vector<char *> row;
                row_ends ends;
                fill_scores(before, random, width, R);
                for (ptrdiff_t i = 0; i < R; i++) {
                    put_number(maximum[i], i % 5 == 4 ? -infinite : random.normal());
                    put_number(total[i], i % 5 == 4 ? 0 : 1 + 5 * random.uniform());
                    if (i % 5 == 4) put_number(before[i], wide(NAN));  // 0 * NaN: no key, so the output is 0
                }
                for (ptrdiff_t i = 0; i < n_row; i++) row.push_back((char *)&out[i * row_size]);
                describe_ends(ends, lse, random, options, n_row);
                uint64_t not_finite = 1;
                r.call([&] {
                    sum.copy(before);
                    not_finite = finish(row.data(), sum.data, maximum.data, total.data, n_row, width, &ends.how);
                });
                if (not_finite) r.fail("row bits %llx, but all sums are finite", (unsigned long long)not_finite);
                for (ptrdiff_t i = 0; i < n_row; i++) {
                    wide right_lse;
                    const wide factor =
                        right_factor<T>(maximum[i], total[i], ends.how.lse_scale, ends.how.sink ? &ends.sink[i] : NULL,
                                        ends.how.gate ? &ends.gate[i] : NULL, right_lse) *
                        ends.how.out_scale;
                    if (ends.how.lse)
                        r.near(lse[i], right_lse, epsilon<T> * 4 * (1 + fabsl(isfinite(right_lse) ? right_lse : 0)),
                               "lse", i, 0);
                    for (ptrdiff_t d = 0; d < width; d++) {
                        const wide right = factor == 0 ? 0 : before[d * R + i] * factor;
                        r.near(number(out[i * row_size + d]), right,
                               epsilon<T> * 4 * fabsl(right) + smallest<T> + rounding<S>(right), "out", i, d);
                    }
                    for (ptrdiff_t d = width; d < row_size; d++)
                        if (!isnan(number(out[i * row_size + d]))) r.fail("behind row %td something was written", i);
                }
            }
}

// Which rows are not finite, and what replaces them.
template <class S> void check_rows_not_finite(run &r, decltype(mha_tile_kernels::finish) finish, ptrdiff_t R) {
    typedef typename arithmetic<S>::type T;
    noise random;
    for (ptrdiff_t n_row : r.of({1, R - 1, R}))
        for (ptrdiff_t width : r.of({1, 7, 64})) {
            r.sized("%td rows, width %td, not finite", n_row, width);
            const ptrdiff_t bad[] = {0, n_row / 2, n_row - 1};
            array<T> sum(r, width * R), maximum(r, R), total(r, R);
            array<S> out(r, n_row * width);
            std::vector<char *> row;
            row_ends ends;
            uint64_t right = 0, found = 0;
            fill_scores(sum, random, width, R);
            for (ptrdiff_t i = 0; i < R; i++) put_number(maximum[i], 0), put_number(total[i], 1);
            for (ptrdiff_t i : bad) put_number(sum[(width - 1) * R + i], i % 2 ? infinite : wide(NAN)), right |= 1ull << i;
            for (ptrdiff_t i = 0; i < n_row; i++) row.push_back((char *)&out[i * width]);
            ends.how.lse_scale = ends.how.out_scale = 1;
            r.call([&] { found = finish(row.data(), sum.data, maximum.data, total.data, n_row, width, &ends.how); });
            if (found != right) r.fail("row bits %llx", (unsigned long long)found);
        }
}

namespace {

template <class T> void check_finish_factors(run &r, const mha_kernels &k) {
    if (!r.wants("tile.finish_factors")) return;
    noise random;
    const ptrdiff_t R = k.tile_rows;
    for (ptrdiff_t n_row : r.of(some_rows(k)))
        for (int options = 0; options < (r.timing ? 1 : 32); options++) {
            r.sized("%td rows, options %d", n_row, options);
            array<T> factor(r, R), maximum(r, R), total(r, R), lse(r, R);
            row_ends ends;
            for (ptrdiff_t i = 0; i < R; i++)
                put_number(maximum[i], i % 5 == 4 ? -infinite : random.normal()),
                    put_number(total[i], i % 5 == 4 ? 0 : 1 + random.uniform());
            describe_ends(ends, lse, random, options, n_row);
            r.call([&] { k.tile.finish_factors(factor.data, maximum.data, total.data, n_row, &ends.how); });
            for (ptrdiff_t i = 0; i < n_row; i++) {
                wide right_lse;
                const wide right =
                    right_factor<T>(maximum[i], total[i], ends.how.lse_scale, ends.how.sink ? &ends.sink[i] : NULL,
                                    ends.how.gate ? &ends.gate[i] : NULL, right_lse) *
                        ends.how.out_scale;
                r.near(factor[i], right, epsilon<T> * 4 * fabsl(right), "factor", i, 0);
                if (ends.how.lse)
                    r.near(lse[i], right_lse, epsilon<T> * 4 * (1 + fabsl(isfinite(right_lse) ? right_lse : 0)), "lse",
                           i, 0);
            }
        }
}

template <class S> void check_replace_not_finite(run &r, const mha_kernels &k) {
    if (!r.wants("tile.replace_not_finite")) return;
    for (ptrdiff_t width : r.of({1, 2, 17, 64})) {
        r.sized("width %td", width);
        array<S> out(r, width), second(r, width);
        const wide first[] = {1, infinite, -infinite, wide(NAN), 0, -2};
        for (ptrdiff_t d = 0; d < width; d++) put_number(second[d], 8);
        r.call([&] {
            for (ptrdiff_t d = 0; d < width; d++) put_number(out[d], first[d % 6]);
            k.tile.replace_not_finite((char *)out.data, (const char *)second.data, width);
        });
        for (ptrdiff_t d = 0; d < width; d++)
            r.near(number(out[d]), d % 6 >= 1 && d % 6 <= 3 ? wide(8) : first[d % 6], 0, "out", 0, d);
    }
}

template <class S> void check_store_weights(run &r, const mha_kernels &k) {
    typedef typename arithmetic<S>::type T;
    if (!r.wants("tile.store_weights")) return;
    noise random;
    const ptrdiff_t R = k.tile_rows;
    for (ptrdiff_t n_row : r.of(some_rows(k)))
        for (ptrdiff_t n_key : r.of(some_keys)) {
            r.sized("%td rows, %td keys", n_row, n_key);
            array<T> score(r, n_key * R), maximum(r, R), factor(r, R);
            array<S> out(r, n_row * (n_key + 1));
            std::vector<char *> row;
            fill_scores(score, random, n_key, R);
            for (ptrdiff_t i = 0; i < R; i++) {
                wide most = -infinite;
                for (ptrdiff_t j = 0; j < n_key; j++) {
                    if (i % 4 == 3 || (i + j) % 5 == 0) put_number(score[j * R + i], -infinite);
                    most = score[j * R + i] > most ? wide(score[j * R + i]) : most;
                }
                put_number(maximum[i], most), put_number(factor[i], i % 7 == 6 ? wide(NAN) : random.uniform());
            }
            for (ptrdiff_t i = 0; i < n_row; i++) row.push_back((char *)&out[i * (n_key + 1)]);
            r.call([&] {
                k.tile.store_weights(row.data(), score.data, maximum.data, factor.data, n_row, n_key, 1.44269504);
            });
            for (ptrdiff_t i = 0; i < n_row; i++) {
                for (ptrdiff_t j = 0; j < n_key; j++) {
                    const wide s = score[j * R + i], weight = right_weight(s, maximum[i], 1.44269504L),
                               right = s == -infinite ? 0 : weight * factor[i];
                    r.near(number(out[i * (n_key + 1) + j]), right,
                           weight_limit<T>(weight, (s - maximum[i]) * 1.44L) * 2 + rounding<S>(right), "weight", i, j);
                }
                if (!isnan(number(out[i * (n_key + 1) + n_key]))) r.fail("behind row %td something was written", i);
            }
        }
}

}  // namespace

template <class S> void check_tiles(run &r, const mha_kernels &k) {
    typedef typename arithmetic<S>::type T;
    static_assert(sizeof(mha_tile_kernels) == 12 * sizeof(void *),
                  "a new function of mha_tile_kernels wants its check");
    check_widen<S>(r, k);
    check_pack_query<S>(r, k);
    if (r.wants("tile.begin")) check_begin<T>(r, k.tile.begin, k.tile_rows);
    check_scores<T>(r, k);
    if (r.wants("tile.adjust")) check_adjust<T>(r, k.tile.adjust, k.lanes, k.tile_rows);
    check_softmax<T>(r, k);
    check_values<T>(r, k);
    check_all_finite<T>(r, "tile.all_finite", k.tile.all_finite, some_widths(k));
    check_all_finite<S>(r, "decode.all_finite", k.decode.all_finite, some_widths(k));
    if (r.wants("tile.finish")) {
        check_finish<S>(r, k.tile.finish, k.lanes, k.tile_rows);
        check_rows_not_finite<S>(r, k.tile.finish, k.tile_rows);
    }
    check_finish_factors<T>(r, k);
    check_replace_not_finite<S>(r, k);
    check_store_weights<S>(r, k);
}

#define FOR_ELEMENT(S)                                        \
    template void check_tiles<S>(run &, const mha_kernels &); \
    template void check_finish<S>(run &, decltype(mha_tile_kernels::finish), ptrdiff_t, ptrdiff_t);
FOR_ELEMENT(float)
FOR_ELEMENT(double)
FOR_ELEMENT(f16)
FOR_ELEMENT(bf16)
template void check_begin<float>(run &, void (*)(void *, void *, void *, ptrdiff_t, ptrdiff_t), ptrdiff_t);
template void check_adjust<float>(run &, void (*)(void *, void *, ptrdiff_t, ptrdiff_t, const mha_adjust *), ptrdiff_t,
                                  ptrdiff_t);
