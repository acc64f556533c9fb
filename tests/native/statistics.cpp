// Checks of the measurements: a block taken in, a row finished, weights received.
#include "formulas.h"

namespace {

template <class T> struct moments {
    array<T> maximum, total, moment, far, set, best, confident;
    std::vector<int64_t> best_key;
    mha_moments plain;
    moments(run &r, ptrdiff_t R, ptrdiff_t n_set)
        : maximum(r, R),
          total(r, R),
          moment(r, R),
          far(r, R),
          set(r, n_set * R),
          best(r, R),
          confident(r, R),
          best_key(R, -1),
          plain{maximum.data, total.data,     moment.data,     far.data, set.data,
                best.data,    confident.data, best_key.data(), n_set} {
        for (array<T> *zero : {&total, &moment, &far, &set}) zero->fill(0);
        for (array<T> *least : {&maximum, &best, &confident}) least->fill(-infinite);
    }
};

// Two blocks, one after the other, then every row's measurements.
template <class T> void check_measure(run &r, const mha_kernels &k, bool finishing) {
    const ptrdiff_t R = k.tile_rows, n_set = 2, n_offset = 2;
    const double exp_scale = 1.44269504;
    noise random;
    for (ptrdiff_t n_row : r.of({1, k.lanes + 1, R - 1, R}))
        for (ptrdiff_t n_key : r.of({1, 7, MHA_KEY_BLOCK}))
            for (int options = 0; options < (r.timing ? 1 : 8); options++) {
                r.sized("%td rows, %td keys, options %d", n_row, n_key, options);
                moments<T> sums(r, R, n_set);
                std::vector<std::vector<wide>> scores(R);
                std::vector<uint8_t> members(2 * n_key * n_set), ignored(2 * n_key);
                for (auto &m : members) m = random.below(2);
                for (auto &m : ignored) m = random.below(3) == 0;
                for (int b = 0; b < 2; b++) {
                    array<T> score(r, n_key * R), highest(r, R), distance(r, R);
                    fill_scores(score, random, n_key, R);
                    for (ptrdiff_t i = 0; i < R; i++) {
                        wide most = -infinite;
                        put_number(distance[i], i - b * n_key);
                        for (ptrdiff_t j = 0; j < n_key; j++) {
                            if (i % 4 == 3 || (i + j) % 6 == 5) put_number(score[j * R + i], -infinite);
                            most = fmaxl(most, score[j * R + i]);
                            scores[i].push_back(score[j * R + i]);
                        }
                        put_number(highest[i], most);
                    }
                    mha_measured_block block = {
                        b * n_key,           n_key,     distance.data, options & 1 ? &ignored[b * n_key] : NULL,
                        &members[b * n_key], 2 * n_key, exp_scale};
                    if (finishing) k.statistics.measure(&sums.plain, score.data, highest.data, n_row, &block);
                    else r.call([&] { k.statistics.measure(&sums.plain, score.data, highest.data, n_row, &block); });
                    if (r.timing && !finishing) return;
                }
                for (ptrdiff_t i = 0; i < n_row; i++) {
                    wide most = -infinite, confident = -infinite, total = 0, moment = 0, far = 0, set[2] = {};
                    ptrdiff_t best = -1;
                    for (ptrdiff_t j = 0; j < 2 * n_key; j++) {
                        if (scores[i][j] > most) most = scores[i][j], best = j;
                        if (!(options & 1 && ignored[j])) confident = fmaxl(confident, scores[i][j]);
                    }
                    for (ptrdiff_t j = 0; j < 2 * n_key; j++) {
                        const wide w = right_weight(scores[i][j], most, exp_scale);
                        total += w, far += w * fabsl(i - j);
                        if (w > 0) moment += w * (scores[i][j] - most) * exp_scale;
                        for (int s = 0; s < 2; s++) set[s] += members[s * 2 * n_key + j] * w;
                    }
                    const wide limit = epsilon<T> * 100 * (1 + 2 * n_key);
                    if (!finishing) {
                        r.equal(sums.maximum[i], most, "maximum", i, 0);
                        r.equal(sums.confident[i], confident, "confident", i, 0);
                        r.equal(sums.best_key[i], best, "best key", i, 0);
                        r.near(sums.total[i], total, limit, "total", i, 0);
                        r.near(sums.moment[i], moment, limit * 20, "moment", i, 0);
                        r.near(sums.far[i], far, limit * (1 + 2 * n_key + R), "far", i, 0);
                        for (int s = 0; s < 2; s++) r.near(sums.set[s * R + i], set[s], limit, "set", s, i);
                        continue;
                    }
                    array<double> out(r, MHA_N_MEASURED + n_offset + n_set);
                    array<T> lse(r, R);
                    row_ends ends;
                    describe_ends(ends, lse, random, options & ~2, n_row);  // statistics know no gates
                    const double offset_score[n_offset] = {double(scores[i][0]), -INFINITY};
                    r.call([&] {
                        k.statistics.finish(out.data, &sums.plain, i, exp_scale, &ends.how, offset_score, n_offset);
                    });
                    wide right_lse;
                    const wide factor = right_factor<T>(most, total, ends.how.lse_scale,
                                                        ends.how.sink ? &ends.sink[i] : NULL, NULL, right_lse);
                    const wide small = epsilon<T> * 400 * (1 + n_key);
                    const bool none = total == 0;
                    r.near(out[MHA_ENTROPY],
                           none || factor == 0 ? 0 : -logl(2) * factor * (moment + total * log2l(factor)), small,
                           "entropy", i, 0);
                    r.near(out[MHA_CONFIDENCE], none ? 0 : factor * right_weight(confident, most, exp_scale), small,
                           "confidence", i, 0);
                    r.near(out[MHA_DISTANCE], far * factor, small * (1 + R + n_key), "distance", i, 0);
                    r.equal(out[MHA_TOP_KEY], none ? -1 : best, "top key", i, 0);
                    r.equal(out[MHA_MAXIMUM], most, "maximum", i, 0);
                    r.near(out[MHA_FACTOR], factor, small * (1 + factor), "factor", i, 0);
                    r.near(out[MHA_N_MEASURED], none ? 0 : factor * right_weight(scores[i][0], most, exp_scale), small,
                           "offset", i, 0);
                    r.equal(out[MHA_N_MEASURED + 1], 0, "offset", i, 1);
                    for (int s = 0; s < 2; s++)
                        r.near(out[MHA_N_MEASURED + n_offset + s], set[s] * factor, small, "set", i, s);
                    if (r.timing) return;
                }
            }
}

template <class T> void check_add_received(run &r, const mha_kernels &k) {
    if (!r.wants("statistics.add_received")) return;
    const ptrdiff_t R = k.tile_rows;
    noise random;
    for (ptrdiff_t n_row : r.of({1, k.lanes + 1, R - 1, R}))
        for (ptrdiff_t n_key : r.of({1, 7, MHA_KEY_BLOCK})) {
            r.sized("%td rows, %td keys", n_row, n_key);
            array<T> score(r, n_key * R), maximum(r, R), factor(r, R);
            array<double> received(r, n_key);
            fill_scores(score, random, n_key, R);
            received.fill(0.5L);
            for (ptrdiff_t i = 0; i < R; i++) {  // lanes without a row have factor 0
                put_number(maximum[i], i % 5 == 4 ? -infinite : 9),
                    put_number(factor[i], i >= n_row || i % 5 == 4 ? 0 : random.uniform());
                for (ptrdiff_t j = 0; j < n_key; j++)
                    if (i % 5 == 4 || (i + j) % 4 == 0)
                        put_number(score[j * R + i], i % 2 && factor[i] == 0 ? wide(NAN) : -infinite);
            }
            r.call([&] {
                k.statistics.add_received(received.data, score.data, maximum.data, factor.data, n_row, n_key, 0.5);
            });
            if (r.timing) continue;
            for (ptrdiff_t j = 0; j < n_key; j++) {
                wide right = 0.5L;
                for (ptrdiff_t i = 0; i < n_row; i++)
                    if (factor[i] != 0) right += right_weight(score[j * R + i], maximum[i], 0.5L) * factor[i];
                r.near(received[j], right, epsilon<T> * 40 * right, "received", j, 0);
            }
        }
}

}  // namespace

template <class S> void check_statistics(run &r, const mha_kernels &k) {
    typedef typename arithmetic<S>::type T;
    static_assert(sizeof(mha_statistics_kernels) == 3 * sizeof(void *),
                  "a new function of mha_statistics_kernels wants its check");
    if (r.wants("statistics.measure")) check_measure<T>(r, k, false);
    if (r.wants("statistics.finish")) check_measure<T>(r, k, true);
    check_add_received<T>(r, k);
}
template void check_statistics<float>(run &, const mha_kernels &);
template void check_statistics<double>(run &, const mha_kernels &);
template void check_statistics<f16>(run &, const mha_kernels &);
template void check_statistics<bf16>(run &, const mha_kernels &);
