// Checks of the functions that read masks, of every type and stride.
#include <math.h>

#include "check.h"

namespace {

static_assert(sizeof(mha_mask_kernels) == 2 * sizeof(void *), "a new function of mha_mask_kernels wants its check");

enum mask_content { NUMBERS, ALL_VISIBLE, ALL_EXCLUDED, EXTREMES, N_CONTENT };

wide mask_number(mask_content content, noise &random, bool is_bool) {
    static const wide extremes[] = {wide(NAN), infinite, 0x1p101L, -0x1p101L, 65504, 1e300L, -1e300L, -0x1p-1000L};
    const bool excluded = content == ALL_EXCLUDED || (content != ALL_VISIBLE && random.below(3) == 0);
    if (is_bool) return excluded ? 0 : 1 + random.below(2);
    if (excluded) return -infinite;
    return content == EXTREMES && random.below(3) == 0 ? extremes[random.below(8)] : random.normal();
}

// A finite number past float32's range stays finite: it does not exclude.
template <class T> wide as_bias(wide stored, bool is_bool) {
    const wide most = sizeof(T) == 4 ? wide(__FLT_MAX__) : wide(__DBL_MAX__);
    if (is_bool) return stored ? 0 : -infinite;
    if (isfinite(stored)) return stored > most ? most : stored < -most ? -most : wide(T(stored));
    return stored;
}

template <class T> int what_holds(const std::vector<wide> &bias) {
    const wide harmless = sizeof(T) == 4 ? 0x1p100L : 0x1p960L;
    int holds = 0;
    for (wide b : bias) {
        holds |= b == -infinite ? MHA_MASK_EXCLUDED : MHA_MASK_VISIBLE;
        if (b != -infinite && !(fabsl(b) <= harmless)) holds |= MHA_MASK_LARGE;
    }
    return holds;
}

// Rows of a mask of elements E, whose keys may lie apart, or the other way round.
template <class E> struct mask_rows {
    ptrdiff_t key_stride, row_stride;
    ending_page page;
    char *first;
    mask_rows(ptrdiff_t n_row, ptrdiff_t n_key, int kind)
        : key_stride(ptrdiff_t(sizeof(E)) * (kind == GAPS       ? 2
                                             : kind == BACKWARD ? -1
                                             : kind == REPEATED ? 0
                                                                : 1)),
          row_stride((n_key - 1) * (key_stride < 0 ? -key_stride : key_stride) + sizeof(E)),
          page(n_row * row_stride) {
        memset(page.memory, 0xff, page.end - page.memory);
        first = page.end - n_row * row_stride - (key_stride < 0 ? (n_key - 1) * key_stride : 0);
    }
    E &at(ptrdiff_t r, ptrdiff_t j) { return *(E *)(first + r * row_stride + j * key_stride); }
};

void put_mask(uint8_t &x, wide v) { x = uint8_t(v); }
template <class E> void put_mask(E &x, wide v) {
    put_number(x, v);
    if (v != -infinite && number(x) == -infinite) put_number(x, 0);  // 16 bits do not hold every number
}
wide get_mask(uint8_t x) { return x; }
template <class E> wide get_mask(E x) { return number(x); }

template <class S, class E> void check_mask_row(run &r, const mha_kernels &k, mha_storage storage) {
    typedef typename arithmetic<S>::type T;
    const bool is_bool = storage == MHA_BOOL;
    noise random;
    for (ptrdiff_t n_key : r.of({1, k.lanes - 1, k.lanes, k.lanes + 1, 64, 257, MHA_KEY_SPLIT}))
        for (int kind = TIGHT; kind < (r.timing ? 1 : N_STRIDE); kind++)
            for (int content = 0; content < (r.timing ? 1 : N_CONTENT); content++) {
                r.sized("storage %d, %td keys, stride %d, content %d", storage, n_key, kind, content);
                mask_rows<E> mask(1, n_key, kind);
                for (ptrdiff_t j = 0; j < n_key; j++)
                    put_mask(mask.at(0, j), mask_number((mask_content)content, random, is_bool));
                std::vector<wide> right;
                for (ptrdiff_t j = 0; j < n_key; j++) right.push_back(as_bias<T>(get_mask(mask.at(0, j)), is_bool));
                array<T> bias(r, (n_key + k.lanes - 1) / k.lanes * k.lanes);
                int holds = 0;
                r.call([&] { holds = k.mask.row(bias.data, mask.first, mask.key_stride, n_key, storage); });
                r.equal(holds, what_holds<T>(right), "holds", 0, 0);
                for (ptrdiff_t j = 0; j < n_key; j++) r.equal(bias[j], right[j], "bias", 0, j);
            }
}

template <class S, class E>
void check_mask_tile(run &r, const mha_kernels &k, mha_mask_tile tile, ptrdiff_t most_rows, mha_storage storage) {
    typedef typename arithmetic<S>::type T;
    const bool is_bool = storage == MHA_BOOL;
    noise random;
    for (ptrdiff_t n_row : r.of({1, k.lanes + 1, most_rows - 1, most_rows}))
        for (ptrdiff_t n_key : r.of({1, 2, 7, 16, 33, MHA_KEY_BLOCK - 1, MHA_KEY_BLOCK}))
            for (int kind = TIGHT; kind < (r.timing ? 1 : N_STRIDE); kind++)
                for (int content = 0; content < (r.timing ? 1 : N_CONTENT); content++) {
                    r.sized("storage %d, %td rows, %td keys, stride %d, content %d", storage, n_row, n_key, kind,
                            content);
                    mask_rows<E> mask(n_row, n_key, kind);
                    std::vector<const char *> row;
                    std::vector<wide> right, all;
                    for (ptrdiff_t i = 0; i < n_row; i++) {
                        const ptrdiff_t shared = content == NUMBERS ? i / 2 * 2 : i;  // rows of heads that share a mask
                        row.push_back((const char *)&mask.at(shared, 0));
                        if (shared == i)
                            for (ptrdiff_t j = 0; j < n_key; j++)
                                put_mask(mask.at(i, j), mask_number((mask_content)content, random, is_bool));
                        for (ptrdiff_t j = 0; j < n_key; j++)
                            right.push_back(as_bias<T>(get_mask(mask.at(shared, j)), is_bool));
                    }
                    array<T> bias(r, n_key * most_rows), work(r, k.lanes * MHA_KEY_BLOCK);
                    const int holds_right = what_holds<T>(right);
                    int holds = 0;
                    r.call([&] {
                        holds = tile(bias.data, work.data, row.data(), n_row, mask.key_stride, n_key, storage);
                    });
                    r.equal(holds, holds_right, "holds", 0, 0);
                    if (is_bool && holds_right != (MHA_MASK_VISIBLE | MHA_MASK_EXCLUDED))
                        continue;  // need not be written
                    for (ptrdiff_t i = 0; i < n_row; i++)
                        for (ptrdiff_t j = 0; j < n_key; j++)
                            r.equal(bias[j * most_rows + i], right[i * n_key + j], "bias", j, i);
                }
}

}  // namespace

template <class S> void check_mask_tiles(run &r, const mha_kernels &k, mha_mask_tile tile, ptrdiff_t most_rows) {
    check_mask_tile<S, uint8_t>(r, k, tile, most_rows, MHA_BOOL);
    check_mask_tile<S, f16>(r, k, tile, most_rows, MHA_FLOAT16);
    check_mask_tile<S, bf16>(r, k, tile, most_rows, MHA_BFLOAT16);
    check_mask_tile<S, float>(r, k, tile, most_rows, MHA_FLOAT32);
    check_mask_tile<S, double>(r, k, tile, most_rows, MHA_FLOAT64);
}

template <class S> void check_masks(run &r, const mha_kernels &k) {
    if (r.wants("mask.row")) {
        check_mask_row<S, uint8_t>(r, k, MHA_BOOL);
        check_mask_row<S, f16>(r, k, MHA_FLOAT16);
        check_mask_row<S, bf16>(r, k, MHA_BFLOAT16);
        check_mask_row<S, float>(r, k, MHA_FLOAT32);
        check_mask_row<S, double>(r, k, MHA_FLOAT64);
    }
    if (r.wants("mask.tile")) check_mask_tiles<S>(r, k, k.mask.tile, k.tile_rows);
}

#define FOR_ELEMENT(S)                                        \
    template void check_masks<S>(run &, const mha_kernels &); \
    template void check_mask_tiles<S>(run &, const mha_kernels &, mha_mask_tile, ptrdiff_t);
FOR_ELEMENT(float)
FOR_ELEMENT(double)
FOR_ELEMENT(f16)
FOR_ELEMENT(bf16)
