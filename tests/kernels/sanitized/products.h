// Weights in panels, products, norms, RoPE and rotations, on memory that ends where theirs does. Included by driver.cpp.
#pragma once

extern "C" {
int64_t akv_panel_bytes(const akv_linear *, int32_t);
void akv_pack(const akv_linear *, int32_t, const akv_part *, int32_t, void *, int32_t);
int32_t akv_multiply(const akv_linear *, const akv_norm *, const akv_product *);
void akv_turn_heads(const akv_turn *, void *, int64_t, int64_t);
void akv_hadamard_heads(const akv_hadamard *, int64_t, void *);
}

namespace {

int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

struct Product {
    int dtype, in, out, rows, apart;  // elements between two rows that belong to neither
    int32_t then;
    bool norm, bias;
};

// Rows of `size` elements, `apart` elements between two of them and none behind the last.
Elements rows_of(int dtype, int rows, int size, int apart) {
    Elements made(dtype, static_cast<size_t>(rows) * (size + apart) - apart);
    for (size_t i = 0; i < static_cast<size_t>(rows) * (size + apart) - apart; ++i) made.set(i, normal());
    return made;
}

double normed(const Elements &from, size_t start, int size, const std::vector<float> &weight, int i) {
    double squares = 0;
    for (int k = 0; k < size; ++k) squares += from.get(start + k) * from.get(start + k);
    return from.get(start + i) / std::sqrt(squares / size + 1e-5) * weight[i];
}

void one_product(const Product &shape, int threads) {
    const bool gated = shape.then == AKV_GATE;
    const int wide = shape.in + shape.apart, results = shape.out + shape.apart, all = gated ? 2 * shape.out : shape.out;
    const int first = gated ? shape.out : (all + 1) / 2;
    Elements upper = rows_of(shape.dtype, first, shape.in, 3);
    Elements lower = rows_of(shape.dtype, all > first ? all - first : 1, shape.in, 0);
    Elements rows = rows_of(shape.dtype, shape.rows, shape.in, shape.apart);
    const Elements before = rows_of(shape.dtype, shape.rows, shape.out, shape.apart);
    const akv_part parts[] = {{upper.data(), shape.in + 3, first}, {lower.data(), shape.in, all - first}};
    std::vector<float> scale(shape.in), bias(static_cast<size_t>(gated ? up_to(shape.out, 16) * 2 : up_to(all, 32)));
    for (float &x : scale) x = static_cast<float>(normal());
    for (float &x : bias) x = static_cast<float>(normal());
    akv_linear linear = {nullptr, shape.bias ? bias.data() : nullptr, shape.in, all, shape.dtype};
    std::vector<char> panels(static_cast<size_t>(akv_panel_bytes(&linear, gated)));
    akv_pack(&linear, gated, parts, 2, panels.data(), threads);
    linear.panels = panels.data();
    const akv_norm norm = {scale.data(), 1e-5f};

    std::vector<double> read;  // what is multiplied: rows as they are, or normed
    for (int r = 0; r < shape.rows; ++r)
        for (int i = 0; i < shape.in; ++i) {
            const size_t start = static_cast<size_t>(r) * wide;
            read.push_back(shape.norm ? normed(rows, start, shape.in, scale, i) : rows.get(start + i));
        }
    const auto product = [&](int r, int o) {
        double found = 0;
        for (int i = 0; i < shape.in; ++i) {
            const double weight = o < first ? upper.get(static_cast<size_t>(o) * (shape.in + 3) + i)
                                            : lower.get(static_cast<size_t>(o - first) * shape.in + i);
            found += read[static_cast<size_t>(r) * shape.in + i] * weight;
        }
        if (!shape.bias) return found;
        return found + (gated ? bias[o % shape.out / 16 * 32 + o % shape.out % 16 + o / shape.out * 16] : bias[o]);
    };
    std::vector<double> all_wanted, all_sizes;  // of every element, and those between rows, which stay
    for (int i = 0; i < shape.rows * results - shape.apart; ++i) {
        const int r = i / results, o = i % results;
        double wanted = before.get(i), size = 1;
        if (o < shape.out) {
            const double found = product(r, o);
            wanted = gated ? found / (1 + std::exp(-found)) * product(r, o + shape.out)
                           : found + (shape.then == AKV_ADD ? wanted : 0);
            size = std::fmax(1, std::fabs(wanted)) * (gated ? std::fmax(1, std::sqrt(shape.in)) : 1);
        }
        all_wanted.push_back(wanted);
        all_sizes.push_back(size);
    }
    for (int isa = 0; isa < AKV_NUM_ISA; ++isa) {
        if (!(akv_supported() >> isa & 1)) continue;
        Elements out = before;
        const akv_product call = {rows.data(), out.data(), wide, results, shape.rows, shape.then, isa, threads};
        expect(akv_multiply(&linear, shape.norm ? &norm : nullptr, &call) == AKV_OK, "rows are multiplied");
        double worst = 0;
        for (size_t i = 0; i < all_wanted.size(); ++i) {
            const double off = std::fabs(out.get(i) - all_wanted[i]) / all_sizes[i];
            if (!(off <= worst)) worst = off;
        }
        const double bound = (shape.dtype == AKV_FP32 ? 2e-6 : 1e-2) * std::fmax(1, std::sqrt(shape.in));
        if (!(worst <= bound)) {
            ++failures;
            printf("failed: isa %d dtype %d, %d rows of %d to %d, apart %d, then %d, norm %d bias %d threads %d: off by %g\n",
                   isa, shape.dtype, shape.rows, shape.in, shape.out, shape.apart, shape.then, shape.norm, shape.bias,
                   threads, worst);
        }
    }
}

void one_turn(int dtype, int size, int tokens, int apart, bool norm, int threads) {
    const int heads = 5, queries = 3, wide = heads * size + apart;
    const Elements before = rows_of(dtype, tokens, heads * size, apart);
    std::vector<float> cosines(static_cast<size_t>(tokens) * size), sines = cosines, scale(size);
    for (float &x : cosines) x = static_cast<float>(normal());
    for (float &x : sines) x = static_cast<float>(normal());
    for (float &x : scale) x = static_cast<float>(normal());
    const akv_norm none = {nullptr, 0}, some = {scale.data(), 1e-5f};
    for (int isa = 0; isa < AKV_NUM_ISA; ++isa) {
        if (!(akv_supported() >> isa & 1)) continue;
        Elements turned = before;
        const akv_turn how = {cosines.data(), sines.data(), norm ? some : none, none, queries, heads, size, dtype, isa, threads};
        akv_turn_heads(&how, turned.data(), wide, tokens);
        double worst = 0;
        for (int t = 0; t < tokens; ++t)
            for (int h = 0; h < heads; ++h)
                for (int i = 0; i < size; ++i) {
                    const size_t start = static_cast<size_t>(t) * wide + static_cast<size_t>(h) * size;
                    const auto head = [&](int k) {
                        return norm && h < queries ? normed(before, start, size, scale, k) : before.get(start + k);
                    };
                    const size_t at = static_cast<size_t>(t) * size + i;
                    const double other = i < size / 2 ? -head(i + size / 2) : head(i - size / 2);
                    const double off = std::fabs(turned.get(start + i) - head(i) * cosines[at] - other * sines[at]);
                    if (!(off <= worst)) worst = off;
                }
        expect(worst <= (dtype == AKV_FP32 ? 1e-5 : 0.3), "heads are turned");
    }
}

// Scores of both rotated are those of the originals, and memory of exactly their size is enough.
void one_rotation(int dtype, int size, int tokens, int apart, int threads) {
    const int heads[] = {3, 2}, block = size & -size;
    Elements rows[] = {rows_of(dtype, tokens, heads[0] * size, apart), rows_of(dtype, tokens, heads[1] * size, apart)};
    for (int isa = 0; isa < AKV_NUM_ISA; ++isa) {
        if (!(akv_supported() >> isa & 1)) continue;
        Elements out = rows_of(dtype, tokens, 5 * size, 0);
        akv_hadamard how = {{}, size, dtype, isa, threads};
        for (int k = 0; k < 2; ++k)
            how.heads[k] = {rows[k].data(), heads[k] * size + apart, size, heads[k], k ? 1.f : 1.f / static_cast<float>(block)};
        akv_hadamard_heads(&how, tokens, out.data());
        double worst = 0;
        for (int t = 0; t < tokens; ++t)
            for (int h = 0; h < heads[0]; ++h) {
                double wanted = 0, found = 0;
                for (int i = 0; i < size; ++i) {
                    wanted += rows[0].get(static_cast<size_t>(t) * (heads[0] * size + apart) + h * size + i) *
                              rows[1].get(static_cast<size_t>(t) * (heads[1] * size + apart) + size + i);
                    found += out.get((static_cast<size_t>(t) * 5 + h) * size + i) * out.get((static_cast<size_t>(t) * 5 + 4) * size + i);
                }
                const double off = std::fabs(found - wanted) / std::sqrt(size);
                if (!(off <= worst)) worst = off;
            }
        expect(worst <= (dtype == AKV_FP32 ? 1e-5 : 0.05), "scores of rotated heads are what they were");
    }
}

void all_products() {
    const int sizes[][2] = {{1, 1}, {2, 31}, {7, 32}, {16, 33}, {33, 16}, {48, 70}, {65, 15}, {4, 100}};
    const int row_counts[] = {1, 2, 5, 13, 26};
    int turn = 0;
    for (const auto &size : sizes)
        for (const int rows : row_counts)
            for (const int dtype : {AKV_FP32, AKV_BF16}) {
                ++turn;
                one_product({dtype, size[0], size[1], rows, turn / 2 % 3, turn % 3, turn / 3 % 2 == 0, turn / 4 % 2 == 0},
                            1 + turn / 5 % 3);
            }
    // Rows 4 KiB apart, and rows in more than one chunk.
    one_product({AKV_FP32, 24, 40, 6, 1000, AKV_WRITE, false, true}, 1);
    one_product({AKV_BF16, 24, 40, 6, 2024, AKV_GATE, false, true}, 2);
    one_product({AKV_FP32, 1, 33, 50, 8192, AKV_ADD, false, true}, 2);
    for (const int size : {2, 16, 22, 40})
        for (const int dtype : {AKV_FP32, AKV_BF16})
            one_turn(dtype, size, 1 + size / 2, size % 3, size != 22, 1 + size % 3);
    for (const int size : {2, 12, 16, 40, 96, 512})
        for (const int dtype : {AKV_FP32, AKV_BF16})
            one_rotation(dtype, size, 1 + size % 31, size % 3, 1 + size % 3);
}

}  // namespace
