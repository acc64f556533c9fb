// Checks of the backward pass and of dropout.
#include "formulas.h"

namespace {

ptrdiff_t padded(const mha_kernels &k, ptrdiff_t n) { return (n + k.lanes - 1) / k.lanes * k.lanes; }
sizes some_rows(const mha_kernels &k) { return {1, k.lanes + 1, k.tile_rows - 1, k.tile_rows}; }
sizes some_widths(const mha_kernels &k) { return {1, k.lanes - 1, k.lanes, k.lanes + 1, 3 * k.lanes + 2, 64}; }
const sizes some_keys = {1, 2, 7, 33, MHA_KEY_BLOCK};

// ---- dropout ---------------------------------------------------------------------------------------------------------

// Salmon et al. 2011, as they print it.
uint32_t philox(const uint32_t (&seed)[2], uint32_t key, uint32_t query, uint32_t head) {
    uint32_t c[4] = {key / 4, query, head, 0}, k[2] = {seed[0], seed[1]};
    for (int round = 0; round < 10; round++, k[0] += 0x9e3779b9, k[1] += 0xbb67ae85) {
        const uint64_t a = uint64_t(c[0]) * 0xd2511f53, b = uint64_t(c[2]) * 0xcd9e8d57;
        const uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ k[0], uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ k[1],
                                  uint32_t(a)};
        memcpy(c, next, sizeof c);
    }
    return c[key % 4];
}

template <class T> void check_dropout(run &r, const mha_kernels &k) {
    static_assert(sizeof(mha_dropout_kernels) == 3 * sizeof(void *),
                  "a new function of mha_dropout_kernels wants its check");
    const ptrdiff_t R = k.tile_rows;
    noise random;
    mha_dropout how = {};
    how.rule.key[0] = 0x12345678, how.rule.key[1] = 0x9abcdef0, how.rule.threshold = 0x40000000, how.rule.factor = 1.25;
    for (ptrdiff_t i = 0; i < MHA_MAX_ROWS; i++)
        how.query[i] = uint32_t(random.bits()), how.head[i] = uint32_t(random.below(100));
    auto right = [&](ptrdiff_t i, ptrdiff_t key) -> wide {
        return philox(how.rule.key, uint32_t(key), how.query[i], how.head[i]) >= how.rule.threshold ? 1.25L : 0;
    };
    for (bool keeping : {true, false}) {
        if (!r.wants(keeping ? "dropout.keep_tile" : "dropout.drop_tile")) continue;
        for (ptrdiff_t n_row : r.of(some_rows(k)))
            for (ptrdiff_t n_key : r.of(some_keys))
                for (ptrdiff_t first : r.of({3, 130, 64})) {
                    r.sized("%td rows, %td keys from %td on", n_row, n_key, first);
                    array<T> tile(r, n_key * R), before(r, n_key * R);
                    before.fill(keeping ? 1 : 3);
                    tile.copy(before);
                    r.call([&] {
                        if (keeping) k.dropout.keep_tile(tile.data, n_row, first, n_key, &how);
                        else k.dropout.drop_tile(tile.data, n_row, first, n_key, &how);
                    });
                    for (ptrdiff_t i = 0; i < n_row && !r.timing; i++)
                        for (ptrdiff_t j = 0; j < n_key; j++)
                            r.equal(tile[j * R + i], before[j * R + i] * right(i, first + j), "factor", j, i);
                }
    }
    if (!r.wants("dropout.drop_row")) return;
    for (ptrdiff_t n_key : r.of({1, 31, MHA_KEY_SPLIT - 1, MHA_KEY_SPLIT}))
        for (ptrdiff_t first : r.of({0, 5, 1030})) {
            r.sized("%td keys from %td on", n_key, first);
            array<T> weight(r, n_key);
            weight.fill(2);
            r.call([&] { k.dropout.drop_row(weight.data, 3, first, n_key, &how); });
            for (ptrdiff_t j = 0; j < n_key && !r.timing; j++)
                r.equal(weight[j], 2 * right(3, first + j), "weight", 0, j);
        }
}

// ---- rows ------------------------------------------------------------------------------------------------------------

template <class S> void check_row_products(run &r, const mha_kernels &k) {
    typedef typename arithmetic<S>::type T;
    if (!r.wants("backward.row_products")) return;
    noise random;
    for (ptrdiff_t n_row : r.of({1, 5, 64}))
        for (ptrdiff_t width : r.of(some_widths(k)))
            for (bool with_lse : {false, true}) {
                r.sized("%td rows, width %td, grad_lse %d", n_row, width, with_lse);
                rows<S> grad(n_row, width, GAPS, random), out(n_row, width, BACKWARD, random);
                array<T> delta(r, n_row), grad_lse(r, n_row);
                std::vector<uint8_t> silent(n_row, 0);
                std::vector<char *> to;
                std::vector<const char *> from = grad.addresses(), other = out.addresses(), lse;
                fill_scores(grad_lse, random, n_row, 1);
                for (ptrdiff_t i = 0; i < n_row; i++)
                    to.push_back((char *)&delta[i]), lse.push_back((char *)&grad_lse[i]);
                if (n_row > 2) {  // a silent row of zeros: the product is 0 whatever the gradient holds
                    silent[2] = 1;
                    for (ptrdiff_t d = 0; d < width; d++) put_number(out.at(2, d), 0);
                    put_number(grad.at(2, 0), wide(NAN));
                }
                r.call([&] {
                    k.backward.row_products(to.data(), from.data(), other.data(), with_lse ? lse.data() : NULL,
                                            silent.data(), n_row, width);
                });
                for (ptrdiff_t i = 0; i < n_row; i++) {
                    wide right = 0, size = 1;
                    for (ptrdiff_t d = 0; d < width && i != 2; d++)
                        right += grad(i, d) * out(i, d), size += fabsl(grad(i, d) * out(i, d));
                    if (with_lse) right -= grad_lse[i], size += fabsl(grad_lse[i]);
                    r.near(delta[i], right, sum_limit<T>(width, size), "delta", i, 0);
                }
            }
}

template <class S> void check_moves(run &r, const mha_kernels &k) {
    typedef typename arithmetic<S>::type T;
    noise random;
    for (ptrdiff_t width : r.of(some_widths(k))) {
        const ptrdiff_t n_row = 5, length = padded(k, width);
        if (r.wants("backward.copy_rows")) {
            r.sized("%td rows, width %td", n_row, width);
            rows<S> from(n_row, width, GAPS, random);
            auto row = from.addresses();
            array<T> block(r, n_row * length);
            r.call([&] { k.backward.copy_rows(block.data, row.data(), n_row, width); });
            for (ptrdiff_t i = 0; i < n_row; i++)
                for (ptrdiff_t d = 0; d < length; d++)
                    r.equal(block[i * length + d], d < width ? from(i, d) : 0, "row", i, d);
        }
        if (r.wants("backward.add_rows")) {
            r.sized("%td rows, width %td", n_row, width);
            array<T> sum(r, n_row * length), out(r, n_row * width);
            std::vector<char *> row;
            fill_scores(sum, random, n_row, length);
            out.fill(0.5L);
            for (ptrdiff_t i = 0; i < n_row; i++) row.push_back((char *)&out[i * width]);
            r.call([&] { k.backward.add_rows(row.data(), sum.data, n_row, width); });
            for (ptrdiff_t i = 0; i < n_row && !r.timing; i++)
                for (ptrdiff_t d = 0; d < width; d++)
                    r.equal(out[i * width + d], T(T(0.5) + sum[i * length + d]), "out", i, d);
        }
        if (r.wants("backward.store_numbers")) {
            r.sized("%td numbers", width);
            array<T> from(r, width);
            array<S> to(r, width);
            fill_scores(from, random, width, 1);
            put_number(from[0], width % 2 ? wide(NAN) : -infinite);
            r.call([&] { k.backward.store_numbers((char *)to.data, from.data, width); });
            for (ptrdiff_t i = 0; i < width; i++)
                r.near(number(to[i]), from[i], isfinite(from[i]) ? rounding<S>(from[i]) : 0, "number", i, 0);
        }
    }
}

// ---- the gradient of scores ------------------------------------------------------------------------------------------

template <class T> void check_differentiate(run &r, const mha_kernels &k) {
    if (!r.wants("backward.differentiate")) return;
    const ptrdiff_t R = k.tile_rows;
    noise random;
    for (ptrdiff_t n_row : r.of(some_rows(k)))
        for (ptrdiff_t n_key : r.of({1, 5, MHA_KEY_BLOCK}))
            for (int options = 0; options < (r.timing ? 1 : 128); options++) {
                const bool capped = options & 1, sloped = options & 2, masked = options & 4, ranged = options & 8,
                           kept = options & 16, of_logit = options & 32, no_grad = options & 64;
                r.sized("%td rows, %td keys, options %d", n_row, n_key, options);
                array<T> score(r, n_key * R), before(r, n_key * R), grad(r, n_key * R), grad_before(r, n_key * R),
                    keep(r, n_key * R), bias(r, n_key * R);
                array<T> slope(r, R), distance(r, R), first(r, R), last(r, R), lse(r, R), delta(r, R), gate(r, R);
                fill_scores(before, random, n_key, R);
                fill_scores(grad_before, random, n_key, R);
                for (ptrdiff_t i = 0; i < n_key * R; i++)
                    put_number(keep[i], random.below(4) ? 1.25L : 0),
                        put_number(bias[i], random.below(4) ? random.normal() : -infinite);
                for (ptrdiff_t i = 0; i < R; i++) {
                    put_number(slope[i], random.uniform()), put_number(distance[i], random.below(100) - 20);
                    put_number(first[i], i % (n_key + 1)), put_number(last[i], n_key - i % 2);
                    put_number(lse[i], 9 + random.normal()), put_number(delta[i], random.normal()),
                        put_number(gate[i], i % 5 == 3 ? 0 : 1 + random.uniform());
                }
                score.copy(before), grad.copy(grad_before);
                mha_adjust adjust = {};
                adjust.score_scale = 1, adjust.softcap = capped ? 2.5 : 0;
                if (sloped) adjust.slope = slope.data, adjust.distance = distance.data;
                if (masked) adjust.bias = bias.data, adjust.bias_row_stride = 1;
                if (ranged) adjust.first = first.data, adjust.last = last.data;
                const bool plain = !(options & 15);
                const mha_backward how = {plain ? NULL : &adjust,  0.3, lse.data, delta.data, gate.data,
                                          kept ? keep.data : NULL, 0.7, of_logit};
                r.call([&] { k.backward.differentiate(score.data, no_grad ? NULL : grad.data, n_row, n_key, &how); });
                if (r.timing) continue;
                mha_adjust scaled = adjust;
                scaled.score_scale = 0.3;
                for (ptrdiff_t i = 0; i < n_row; i++)
                    for (ptrdiff_t j = 0; j < n_key; j++) {
                        const ptrdiff_t at = j * R + i;
                        wide size;
                        const wide logit = right_adjusted<T>(before[at], scaled, slope[i], distance[i], bias[at],
                                                             first[i], last[i], j, size);
                        const wide weight = logit == -infinite ? 0 : expl(fminl(logit - lse[i], 0)),
                                   factor = kept ? wide(keep[at]) : 1;
                        const wide relative = epsilon<T> * (8 + 4 * (size + fabsl(lse[i])));
                        const wide passed = gate[i] == 0 ? 0 : grad_before[at] * factor * gate[i];
                        const wide t = capped ? tanhl(before[at] * 0.3L / 2.5L) : 0, moves = of_logit ? 1 : 1 - t * t;
                        r.near(score[at], weight * gate[i] * factor,
                               relative * weight * gate[i] * factor + 4 * smallest<T>, "weight", j, i);
                        if (no_grad) continue;
                        r.near(grad[at], weight * (passed - delta[i]) * 0.7L * moves,
                               (relative * weight + 4 * smallest<T>)*(1 + fabsl(passed) + fabsl(delta[i])), "gradient",
                               j, i);
                    }
            }
}

// ---- products and sums -----------------------------------------------------------------------------------------------

template <class T> void check_products(run &r, const mha_kernels &k) {
    const ptrdiff_t R = k.tile_rows;
    noise random;
    for (bool to_keys : {true, false}) {
        if (!r.wants(to_keys ? "backward.add_to_keys" : "backward.add_to_rows")) continue;
        for (ptrdiff_t n_row : r.of(some_rows(k)))
            for (ptrdiff_t n_key : r.of(some_keys))
                for (ptrdiff_t width : r.of(some_widths(k)))
                    for (bool guarded : {false, true}) {
                        r.sized("%td rows, %td keys, width %td, guarded %d", n_row, n_key, width, guarded);
                        const ptrdiff_t length = padded(k, width), n_sum = to_keys ? n_key : n_row,
                                        n_term = to_keys ? n_row : n_key;
                        array<T> sum(r, n_sum * length), before(r, n_sum * length), term(r, n_term * length),
                            weight(r, n_key * R), visible(r, n_key * R);
                        fill_scores(before, random, n_sum, length);
                        fill_scores(term, random, n_term, length);
                        for (ptrdiff_t i = 0; i < n_key * R; i++)
                            put_number(weight[i], random.normal()),
                                put_number(visible[i], random.below(3) ? 0 : -infinite);
                        if (guarded) {  // the last term holds NaN, which only the first sum sees
                            for (ptrdiff_t i = 0; i < n_sum; i++)
                                put_number(visible[to_keys ? i * R + n_term - 1 : (n_term - 1) * R + i],
                                           i ? -infinite : 0);
                            put_number(term[(n_term - 1) * length], wide(NAN));
                        }
                        sum.copy(before);
                        auto function = to_keys ? k.backward.add_to_keys : k.backward.add_to_rows;
                        r.call([&] {
                            function(sum.data, weight.data, guarded ? visible.data : NULL, term.data, n_sum, n_term,
                                     width);
                        });
                        if (r.timing) continue;
                        for (ptrdiff_t i = 0; i < n_sum; i++)
                            for (ptrdiff_t d = 0; d < width; d++) {
                                wide right = before[i * length + d], size = fabsl(right);
                                for (ptrdiff_t c = 0; c < n_term; c++) {
                                    const ptrdiff_t at = to_keys ? i * R + c : c * R + i;
                                    if (guarded && visible[at] == -infinite) continue;
                                    right += wide(weight[at]) * term[c * length + d],
                                        size += fabsl(wide(weight[at]) * term[c * length + d]);
                                }
                                r.near(sum[i * length + d], right, sum_limit<T>(n_term, isfinite(size) ? size : 0),
                                       "sum", i, d);
                            }
                    }
    }
}

template <class T> void check_tile_sums(run &r, const mha_kernels &k) {
    const ptrdiff_t R = k.tile_rows;
    noise random;
    for (ptrdiff_t n_row : r.of(some_rows(k)))
        for (ptrdiff_t n_key : r.of(some_keys)) {
            array<T> tile(r, n_key * R);
            fill_scores(tile, random, n_key, R);
            for (bool far : {false, true}) {
                if (!r.wants("backward.add_over_keys")) break;
                r.sized("%td rows, %td keys, distances %d", n_row, n_key, far);
                array<T> sum(r, R), distance(r, R);
                sum.fill(0.5L);
                for (ptrdiff_t i = 0; i < R; i++) put_number(distance[i], i - 7);
                r.call(
                    [&] { k.backward.add_over_keys(sum.data, tile.data, far ? distance.data : NULL, n_row, n_key); });
                for (ptrdiff_t i = 0; i < n_row && !r.timing; i++) {
                    wide right = 0.5L, size = 1;
                    for (ptrdiff_t j = 0; j < n_key; j++) {
                        const wide x = tile[j * R + i] * (far ? fabsl(i - 7 - j) : 1);
                        right += x, size += fabsl(x);
                    }
                    r.near(sum[i], right, sum_limit<T>(n_key, size), "sum", i, 0);
                }
            }
            if (r.wants("backward.sum_over_rows")) {
                r.sized("%td keys", n_key);
                array<T> sum(r, n_key);
                r.call([&] { k.backward.sum_over_rows(sum.data, tile.data, n_key); });
                for (ptrdiff_t j = 0; j < n_key; j++) {
                    wide right = 0, size = 0;
                    for (ptrdiff_t i = 0; i < R; i++) right += tile[j * R + i], size += fabsl(tile[j * R + i]);
                    r.near(sum[j], right, sum_limit<T>(R, size), "sum", j, 0);
                }
            }
            if (r.wants("backward.add_tile")) {
                r.sized("%td rows, %td keys", n_row, n_key);
                array<T> sum(r, n_key * R), noisy(r, n_key * R);
                sum.fill(0.5L);
                noisy.copy(tile);
                for (ptrdiff_t i = n_row; i < R; i++) put_number(noisy[i], wide(NAN));  // lanes without a row
                r.call([&] { k.backward.add_tile(sum.data, noisy.data, n_row, n_key); });
                for (ptrdiff_t i = 0; i < R && !r.timing; i++)
                    for (ptrdiff_t j = 0; j < n_key; j++)
                        r.equal(sum[j * R + i], i < n_row ? T(T(0.5) + tile[j * R + i]) : T(0.5), "sum", j, i);
            }
            if (r.wants("backward.store_tile")) {
                r.sized("%td rows, %td keys", n_row, n_key);
                array<T> out(r, n_row * (n_key + 1));
                std::vector<char *> row;
                for (ptrdiff_t i = 0; i < n_row; i++) row.push_back((char *)&out[i * (n_key + 1)]);
                r.call([&] { k.backward.store_tile(row.data(), tile.data, n_row, n_key); });
                for (ptrdiff_t i = 0; i < n_row; i++) {
                    for (ptrdiff_t j = 0; j < n_key; j++)
                        r.equal(out[i * (n_key + 1) + j], tile[j * R + i], "out", i, j);
                    if (!isnan(out[i * (n_key + 1) + n_key])) r.fail("behind row %td something was written", i);
                }
            }
        }
}

}  // namespace

template <class S> void check_backward(run &r, const mha_kernels &k) {
    typedef typename arithmetic<S>::type T;
    static_assert(sizeof(mha_backward_kernels) == 11 * sizeof(void *),
                  "a new function of mha_backward_kernels wants its check");
    check_dropout<T>(r, k);
    check_row_products<S>(r, k);
    check_moves<S>(r, k);
    check_differentiate<T>(r, k);
    check_products<T>(r, k);
    check_tile_sums<T>(r, k);
}
template void check_backward<float>(run &, const mha_kernels &);
template void check_backward<double>(run &, const mha_kernels &);
template void check_backward<f16>(run &, const mha_kernels &);
template void check_backward<bf16>(run &, const mha_kernels &);
