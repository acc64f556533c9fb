// Checks of the functions for few rows: query and sum are [row][padded width], scores [row][MHA_KEY_SPLIT].
#include "formulas.h"

namespace {

const sizes some_rows = {1, 2, 3, 5, MHA_MAX_DECODE_ROWS - 1, MHA_MAX_DECODE_ROWS};

ptrdiff_t padded(const mha_kernels &k, ptrdiff_t n) { return (n + k.lanes - 1) / k.lanes * k.lanes; }
sizes some_keys(const mha_kernels &k) {
    return {1, k.lanes - 1, k.lanes, k.lanes + 1, 31, 33, MHA_KEY_SPLIT - 1, MHA_KEY_SPLIT};
}
sizes some_widths(const mha_kernels &k) { return {1, k.lanes - 1, k.lanes, k.lanes + 1, 2 * k.lanes + 3, 65, 128}; }

template <class S> void check_pack_query(run &r, const mha_kernels &k) {
    typedef typename arithmetic<S>::type T;
    if (!r.wants("decode.pack_query")) return;
    noise random;
    for (ptrdiff_t n_row : r.of(some_rows))
        for (ptrdiff_t width : r.of(some_widths(k)))
            for (int kind = TIGHT; kind < (r.timing ? 1 : N_STRIDE); kind++) {
                r.sized("%td rows, width %td, stride %d", n_row, width, kind);
                rows<S> query(n_row, width, kind, random);
                auto row = query.addresses();
                array<T> packed(r, n_row * padded(k, width));
                r.call([&] { k.decode.pack_query(packed.data, row.data(), n_row, width, -1); });
                for (ptrdiff_t i = 0; i < n_row; i++)
                    for (ptrdiff_t d = 0; d < padded(k, width); d++)
                        r.equal(packed[i * padded(k, width) + d], d < width ? -query(i, d) : 0, "query", i, d);
            }
}

template <class S> void check_scores(run &r, const mha_kernels &k) {
    typedef typename arithmetic<S>::type T;
    if (!r.wants("decode.scores")) return;
    noise random;
    for (ptrdiff_t n_row : r.of(some_rows))
        for (ptrdiff_t n_key : r.of(some_keys(k)))
            for (ptrdiff_t width : r.of({0, 1, k.lanes - 1, k.lanes, k.lanes + 1, 65}))
                for (int kind = TIGHT; kind < (r.timing ? 1 : N_STRIDE); kind++) {
                    r.sized("%td rows, %td keys, width %td, stride %d", n_row, n_key, width, kind);
                    const ptrdiff_t stride = padded(k, width);
                    rows<S> key(n_key, width, kind, random);
                    array<T> query(r, n_row * stride), score(r, n_row * MHA_KEY_SPLIT);
                    query.fill(0);
                    for (ptrdiff_t i = 0; i < n_row; i++)
                        for (ptrdiff_t d = 0; d < width; d++) put_number(query[i * stride + d], random.normal());
                    if (n_key > 2 && width && kind == GAPS) put_number(key.at(2, 0), n_row % 2 ? wide(NAN) : infinite);
                    r.call(
                        [&] { k.decode.scores(score.data, query.data, n_row, key.first, key.stride, n_key, width); });
                    if (r.timing) continue;
                    for (ptrdiff_t i = 0; i < n_row; i++)
                        for (ptrdiff_t j = 0; j < padded(k, n_key); j++) {
                            wide right = j < n_key ? 0 : -infinite, size = 0;
                            for (ptrdiff_t d = 0; j < n_key && d < width; d++) {
                                const wide product = key(j, d) * query[i * stride + d];
                                right += product, size += fabsl(product);
                            }
                            r.near(score[i * MHA_KEY_SPLIT + j], right, sum_limit<T>(width, size), "score", i, j);
                        }
                }
}

template <class T> void check_adjust(run &r, const mha_kernels &k) {
    if (!r.wants("decode.adjust")) return;
    noise random;
    for (ptrdiff_t n_key : r.of(some_keys(k)))
        for (int options = 0; options < (r.timing ? 1 : 16); options++) {
            r.sized("%td keys, options %d", n_key, options);
            array<T> score(r, padded(k, n_key)), before(r, padded(k, n_key)), bias(r, padded(k, n_key)), one(r, 4);
            fill_scores(before, random, padded(k, n_key), 1);
            for (ptrdiff_t j = 0; j < padded(k, n_key); j++)
                put_number(bias[j], random.below(4) ? random.normal() : -infinite);
            put_number(one[0], 0.7L), put_number(one[1], n_key / 2 - 3), put_number(one[2], n_key / 3),
                put_number(one[3], n_key - n_key / 4);
            mha_adjust how = {};
            how.score_scale = options & 1 ? 0.3 : 1, how.softcap = options & 1 ? 2.5 : 0;
            if (options & 2) how.slope = &one[0], how.distance = &one[1];
            if (options & 4) how.bias = bias.data, how.bias_row_stride = 1;
            if (options & 8) how.first = &one[2], how.last = &one[3];
            score.copy(before);
            r.call([&] { k.decode.adjust(score.data, n_key, &how); });
            for (ptrdiff_t j = 0; j < padded(k, n_key); j++) {
                wide size, right = right_adjusted<T>(before[j], how, one[0], one[1], bias[j], one[2], one[3], j, size);
                r.near(score[j], j < n_key ? right : -infinite, epsilon<T> * 6 * size + smallest<T>, "score", 0, j);
            }
        }
}

template <class T> void check_softmax(run &r, const mha_kernels &k) {
    if (!r.wants("decode.softmax")) return;
    noise random;
    for (ptrdiff_t n_row : r.of(some_rows))
        for (ptrdiff_t n_key : r.of(some_keys(k))) {
            r.sized("%td rows, %td keys", n_row, n_key);
            const wide exp_scale = 1.25L;
            array<T> score(r, n_row * MHA_KEY_SPLIT), before(r, n_row * MHA_KEY_SPLIT), maximum(r, n_row),
                total(r, n_row);
            before.fill(-infinite);
            for (ptrdiff_t i = 0; i < n_row; i++)
                for (ptrdiff_t j = 0; j < n_key; j++)
                    if (i != 3 && (i + j) % 7 != 6)
                        put_number(before[i * MHA_KEY_SPLIT + j], (i + j) % 11 ? random.normal() * 3 : -1e4L);
            score.copy(before);
            r.call([&] { k.decode.softmax(score.data, maximum.data, total.data, n_row, n_key, double(exp_scale)); });
            if (r.timing) continue;
            for (ptrdiff_t i = 0; i < n_row; i++) {
                wide most = -infinite, sum = 0, limit = sum_limit<T>(n_key, n_key);
                for (ptrdiff_t j = 0; j < n_key; j++) most = fmaxl(most, before[i * MHA_KEY_SPLIT + j]);
                r.equal(maximum[i], most, "maximum", i, 0);
                for (ptrdiff_t j = 0; j < n_key; j++) {
                    const wide s = before[i * MHA_KEY_SPLIT + j], right = right_weight(s, most, exp_scale);
                    const wide limit_here = weight_limit<T>(right, (s - most) * exp_scale);
                    r.near(score[i * MHA_KEY_SPLIT + j], right, limit_here, "weight", i, j);
                    sum += right, limit += limit_here;
                }
                r.near(total[i], sum, limit, "total", i, 0);
            }
        }
}

template <class S> void check_values(run &r, const mha_kernels &k) {
    typedef typename arithmetic<S>::type T;
    noise random;
    for (bool guarded : {false, true}) {
        if (!r.wants(guarded ? "decode.values_guarded" : "decode.values")) continue;
        for (ptrdiff_t n_row : r.of(some_rows))
            for (ptrdiff_t n_key : r.of({1, 31, 32, 33, 65, MHA_KEY_SPLIT}))
                for (ptrdiff_t width : r.of(some_widths(k)))
                    for (int kind = TIGHT; kind < (r.timing ? 1 : N_STRIDE); kind++) {
                        if (n_key == MHA_KEY_SPLIT && !r.timing && (kind || n_row % 2 == 0)) continue;
                        r.sized("%td rows, %td keys, width %td, stride %d", n_row, n_key, width, kind);
                        const ptrdiff_t stride = padded(k, width);
                        rows<S> value(n_key, width, kind, random);
                        array<T> sum(r, n_row * stride), weight(r, n_row * MHA_KEY_SPLIT),
                            visible(r, n_row * MHA_KEY_SPLIT);
                        for (ptrdiff_t i = 0; i < n_row * MHA_KEY_SPLIT; i++) {
                            const bool seen = !guarded || random.below(3) > 0;
                            put_number(visible[i], seen ? 0 : -infinite),
                                put_number(weight[i], seen ? random.uniform() : 0);
                        }
                        if (guarded && n_key > 1) put_number(value.at(1, width - 1), n_row % 2 ? wide(NAN) : infinite);
                        r.call([&] {
                            if (guarded)
                                k.decode.values_guarded(sum.data, weight.data, visible.data, n_row, value.first,
                                                        value.stride, n_key, width);
                            else k.decode.values(sum.data, weight.data, n_row, value.first, value.stride, n_key, width);
                        });
                        if (r.timing) continue;
                        for (ptrdiff_t i = 0; i < n_row; i++)
                            for (ptrdiff_t d = 0; d < width; d++) {
                                wide right = 0, size = 0;
                                for (ptrdiff_t j = 0; j < n_key; j++) {
                                    if (visible[i * MHA_KEY_SPLIT + j] == -infinite) continue;
                                    const wide product = weight[i * MHA_KEY_SPLIT + j] * value(j, d);
                                    right += product, size += fabsl(product);
                                }
                                r.near(sum[i * stride + d], right, sum_limit<T>(n_key, isfinite(size) ? size : 0),
                                       "sum", i, d);
                            }
                    }
    }
}

template <class S> void check_combine(run &r, const mha_kernels &k) {
    typedef typename arithmetic<S>::type T;
    if (!r.wants("decode.combine")) return;
    noise random;
    for (ptrdiff_t n_partial : r.of({1, 2, 5}))
        for (ptrdiff_t width : r.of(some_widths(k)))
            for (int options = 0; options < (r.timing ? 1 : 32); options++) {
                r.sized("%td partial results, width %td, options %d", n_partial, width, options);
                const bool empty = options & 16;  // no part has a key
                const ptrdiff_t stride = (padded(k, width) + 2 + 15) / 16 * 16;
                array<T> partial(r, n_partial * stride), work(r, n_partial), lse(r, 1);
                array<S> out(r, width);
                row_ends ends;
                for (ptrdiff_t i = 0; i < n_partial; i++) {
                    T *p = &partial[i * stride];
                    const bool none = empty || i == 1;
                    for (ptrdiff_t d = 0; d < padded(k, width); d++) put_number(p[d], none ? 0 : random.normal());
                    put_number(p[padded(k, width)], none ? -infinite : random.normal() * 3);
                    put_number(p[padded(k, width) + 1], none ? 0 : 1 + 9 * random.uniform());
                }
                describe_ends(ends, lse, random, options, 1);
                const T *maximum = &partial[padded(k, width)], *total = maximum + 1;
                int is_finite = 0;
                r.call([&] {
                    is_finite = k.decode.combine((char *)out.data, partial.data, maximum, total, stride * sizeof(T),
                                                 n_partial, width, 1.44269504, work.data, &ends.how);
                });
                if (!is_finite) r.fail("the sum is said not to be finite");
                wide most = -infinite, all = 0, right_lse;
                for (ptrdiff_t i = 0; i < n_partial; i++) most = fmaxl(most, maximum[i * stride]);
                for (ptrdiff_t i = 0; i < n_partial; i++)
                    all += total[i * stride] * right_weight(maximum[i * stride], most, 1.44269504L);
                const wide factor =
                    right_factor<T>(most, all, ends.how.lse_scale, ends.how.sink, ends.how.gate, right_lse) *
                    ends.how.out_scale;
                if (ends.how.lse)
                    r.near(lse[0], right_lse, epsilon<T> * 4 * (1 + fabsl(isfinite(right_lse) ? right_lse : 0)), "lse",
                           0, 0);
                for (ptrdiff_t d = 0; d < width; d++) {
                    wide right = 0, size = 0;
                    for (ptrdiff_t i = 0; i < n_partial; i++) {
                        const wide share =
                            partial[i * stride + d] * right_weight(maximum[i * stride], most, 1.44269504L) * factor;
                        right += share, size += fabsl(share);
                    }
                    r.near(number(out[d]), right, epsilon<T> * 12 * size + smallest<T> + rounding<S>(right), "out", 0,
                           d);
                }
            }
}

}  // namespace

template <class S> void check_decode(run &r, const mha_kernels &k) {
    typedef typename arithmetic<S>::type T;
    static_assert(sizeof(mha_decode_kernels) == 8 * sizeof(void *),
                  "a new function of mha_decode_kernels wants its check");
    check_pack_query<S>(r, k);
    check_scores<S>(r, k);
    check_adjust<T>(r, k);
    check_softmax<T>(r, k);
    check_values<S>(r, k);
    check_combine<S>(r, k);
}
template void check_decode<float>(run &, const mha_kernels &);
template void check_decode<double>(run &, const mha_kernels &);
template void check_decode<f16>(run &, const mha_kernels &);
template void check_decode<bf16>(run &, const mha_kernels &);
