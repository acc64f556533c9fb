// Measurements of the weights in the same pass as the online softmax: no weight is kept.
#pragma once

#include "../contract/statistics.h"
#include "finish.h"
#include "row_tile.h"

namespace {
namespace MHA_ISA_NAMESPACE {

// Sums move to a new maximum as in the online softmax.  With a = 2**d, d = (old - new maximum) * exp_scale <= 0, every
// weight becomes a * w and its logarithm log2(w) + d, so the moment becomes a * (moment + d * total).
template <class T>
MHA_INLINE void move_maximum(mha_moments *sums, const T *block_maximum, ptrdiff_t row, T exp_scale, vec<T> &base) {
    T *maximum = (T *)sums->maximum + row, *total = (T *)sums->total + row, *moment = (T *)sums->moment + row;
    const raised<T> step = raise_maximum<T>(maximum, load(block_maximum + row), exp_scale);
    const vec<T> d = step.exponent, a = exp2_nonpositive<T>(d);
    base = step.base;
    // before the first key d is -inf and everything is 0
    store(moment, a == T(0) ? vec<T>{} : a * (load(moment) + d * load(total)));
    store(total, load(total) * a);
    T *far = (T *)sums->far + row;
    store(far, load(far) * a);
    for (ptrdiff_t i = 0; i < sums->n_set; i++) {
        T *set = (T *)sums->set + i * tile_rows<T> + row;
        store(set, load(set) * a);
    }
}

template <class T>
void measure(mha_moments *sums, void *score_, const void *block_maximum, ptrdiff_t n_row,
             const mha_measured_block *block) {
    const T exp_scale = T(block->exp_scale), negligible = T(-1100);  // log2 below which 2**x is 0 in either type
    T found[tile_rows<T>];
    for (ptrdiff_t row = 0; row < n_row; row += lanes<T>) {
        vec<T> base;
        move_maximum<T>(sums, (const T *)block_maximum, row, exp_scale, base);
        const vec<T> distance = load((const T *)block->distance + row);
        vec<T> total = {}, moment = {}, far = {}, key_found = splat(T(-1));
        vec<T> best = load((T *)sums->best + row), confident = load((T *)sums->confident + row);
        for (ptrdiff_t j = 0; j < block->n_key; j++) {
            T *at = (T *)score_ + j * tile_rows<T> + row;
            const vec<T> s = load(at), x = (s - base) * exp_scale, w = exp2_nonpositive<T>(x);
            total += w;
            moment += w * larger<T>(splat(negligible), x);  // 0 * -inf must not come out of it
            far += w * magnitude<T>(distance - T(j));
            key_found = s > best ? splat(T(j)) : key_found;
            best = s > best ? s : best;
            if (!block->ignored || !block->ignored[j]) confident = s > confident ? s : confident;
            store(at, w);
        }
        for (ptrdiff_t i = 0; i < sums->n_set; i++) {
            vec<T> mass = load((T *)sums->set + i * tile_rows<T> + row);
            for (ptrdiff_t j = 0; j < block->n_key; j++)
                if (block->key_set[i * block->set_stride + j]) mass += load((T *)score_ + j * tile_rows<T> + row);
            store((T *)sums->set + i * tile_rows<T> + row, mass);
        }
        store((T *)sums->total + row, load((T *)sums->total + row) + total);
        store((T *)sums->moment + row, load((T *)sums->moment + row) + moment);
        store((T *)sums->far + row, load((T *)sums->far + row) + far);
        store((T *)sums->best + row, best);
        store((T *)sums->confident + row, confident);
        store(found + row, key_found);
    }
    for (ptrdiff_t row = 0; row < n_row; row++)
        if (found[row] >= 0) sums->best_key[row] = block->first + ptrdiff_t(found[row]);
}

// Entropy in nats: P = w / L with L the total and the sink, so -sum P ln P = ln 2 (total log2 L - moment) / L.
template <class T>
void finish_measure(double *out, const mha_moments *sums, ptrdiff_t row, double exp_scale, const mha_finish *how,
                    const double *offset_score, ptrdiff_t n_offset) {
    constexpr double ln_2 = 0.693147180559945309417;
    const double maximum = ((T *)sums->maximum)[row], total = ((T *)sums->total)[row];
    const double factor = finish_row<T>(maximum, total, row, how), moment = ((T *)sums->moment)[row];
    const double confident = ((T *)sums->confident)[row];
    const bool no_key = total == 0;
    // a sink can take all the weight: 0 ln 0 is 0
    out[MHA_ENTROPY] = no_key || factor == 0 ? 0 : -ln_2 * factor * (moment + total * __builtin_log2(factor));
    auto weight = [=](double score) { return no_key ? 0 : factor * __builtin_exp2((score - maximum) * exp_scale); };
    out[MHA_CONFIDENCE] = weight(confident);
    out[MHA_DISTANCE] = ((T *)sums->far)[row] * factor;
    out[MHA_TOP_KEY] = no_key || total != total ? -1 : double(sums->best_key[row]);
    out[MHA_MAXIMUM] = maximum;
    out[MHA_FACTOR] = factor;
    for (ptrdiff_t i = 0; i < n_offset; i++) out[MHA_N_MEASURED + i] = weight(offset_score[i]);
    for (ptrdiff_t i = 0; i < sums->n_set; i++)
        out[MHA_N_MEASURED + n_offset + i] = ((T *)sums->set)[i * tile_rows<T> + row] * factor;
}

template <class T>
void add_received(double *received, const void *score_, const void *maximum_, const void *factor_, ptrdiff_t n_row,
                  ptrdiff_t n_key, double exp_scale_) {
    const T *score = (const T *)score_, *maximum = (const T *)maximum_, *factor = (const T *)factor_;
    const T exp_scale = T(exp_scale_);
    for (ptrdiff_t j = 0; j < n_key; j++) {
        vec<T> sum = {};
        for (ptrdiff_t row = 0; row < n_row; row += lanes<T>) {
            const vec<T> f = load(factor + row), s = load(score + j * tile_rows<T> + row);
            const vec<T> w = known_weight<T>(s, load(maximum + row), exp_scale, f);
            sum += f == T(0) ? vec<T>{} : w;
        }
        received[j] += lane_sum<T>(sum);
    }
}

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
