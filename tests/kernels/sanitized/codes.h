// Products with codes of 8 and 4 bits, on memory that ends where theirs does. Included by driver.cpp, behind products.h.
#pragma once

extern "C" {
void akv_pack_codes(const akv_linear *, int32_t, const int8_t *, const void *, const void *, void *, int32_t);
}

namespace {

struct Coded {
    int bits, in, out, rows, apart;
    int32_t then;
    bool norm;
};

void one_coded(const Coded &shape, int threads) {
    const bool gated = shape.then == AKV_GATE;
    const int all = gated ? 2 * shape.out : shape.out, groups = shape.bits == 8 ? 1 : shape.in / 32;
    const int wide = shape.in + shape.apart, results = shape.out + shape.apart;
    std::vector<int8_t> codes(static_cast<size_t>(all) * shape.in);
    for (int8_t &code : codes) code = static_cast<int8_t>(shape.bits == 8 ? uniform() * 255 - 127 : std::floor(uniform() * 16) - 8);
    Elements scales = rows_of(AKV_BF16, all, groups, 0), middles = rows_of(AKV_BF16, all, groups, 0);
    Elements rows = rows_of(AKV_BF16, shape.rows, shape.in, shape.apart);
    const Elements before = rows_of(AKV_BF16, shape.rows, shape.out, shape.apart);
    std::vector<float> scale(shape.in);
    for (float &x : scale) x = static_cast<float>(normal());
    akv_linear linear = {nullptr, nullptr, shape.in, all, AKV_BF16, shape.bits};
    std::vector<char> panels(static_cast<size_t>(akv_panel_bytes(&linear, gated)));
    akv_pack_codes(&linear, gated, codes.data(), scales.data(), shape.bits == 8 ? nullptr : middles.data(), panels.data(), threads);
    linear.panels = panels.data();
    const akv_norm norm = {scale.data(), 1e-5f};

    double weights = 0;  // the largest, which errors are measured by
    const auto weight = [&](int o, int i) {
        const size_t group = static_cast<size_t>(o) * groups + (shape.bits == 8 ? 0 : i / 32);
        const double found = codes[static_cast<size_t>(o) * shape.in + i] * scales.get(group);
        return found + (shape.bits == 8 ? 0 : middles.get(group));
    };
    for (int o = 0; o < all; ++o)
        for (int i = 0; i < shape.in; ++i) weights = std::fmax(weights, std::fabs(weight(o, i)));
    const auto product = [&](int r, int o) {
        double found = 0;
        for (int i = 0; i < shape.in; ++i) {
            const size_t start = static_cast<size_t>(r) * wide;
            found += (shape.norm ? normed(rows, start, shape.in, scale, i) : rows.get(start + i)) * weight(o, i);
        }
        return found;
    };
    for (int isa = 0; isa < AKV_NUM_ISA; ++isa) {
        if (!(akv_supported() >> isa & 1)) continue;
        Elements out = before;
        const akv_product call = {rows.data(), out.data(), wide, results, shape.rows, shape.then, isa, threads};
        expect(akv_multiply(&linear, shape.norm ? &norm : nullptr, &call) == AKV_OK, "rows are multiplied with codes");
        double worst = 0;
        for (int r = 0; r < shape.rows; ++r)
            for (int o = 0; o < results && r * results + o < shape.rows * results - shape.apart; ++o) {
                const double was = before.get(static_cast<size_t>(r) * results + o);
                double wanted = was, size = 1;
                if (o < shape.out) {
                    const double gate = product(r, o), other = gated ? product(r, o + shape.out) : 1;
                    wanted = gated ? gate / (1 + std::exp(-gate)) * other : gate + (shape.then == AKV_ADD ? was : 0);
                    size = weights * std::sqrt(shape.in) * (gated ? std::fmax(1, std::fmax(std::fabs(gate), std::fabs(other))) : 1);
                }
                const double off = std::fabs(out.get(static_cast<size_t>(r) * results + o) - wanted) / size;
                if (!(off <= worst)) worst = off;
            }
        if (!(worst <= 0.03)) {
            ++failures;
            printf("failed: isa %d, %d bits, %d rows of %d to %d, apart %d, then %d, norm %d, threads %d: off by %g\n", isa,
                   shape.bits, shape.rows, shape.in, shape.out, shape.apart, shape.then, shape.norm, threads, worst);
        }
    }
}

void all_codes() {
    int turn = 0;
    for (const int bits : {8, 4})
        for (const int in : {32, 96})
            for (const int out : {1, 33, 47})
                for (const int rows : {1, 3, 8}) {
                    ++turn;
                    one_coded({bits, in, out, rows, turn % 3, turn % 3, turn % 2 == 0}, 1 + turn % 2);
                }
    for (const int in : {1, 7, 33}) one_coded({8, in, 20, 5, 1, AKV_WRITE, true}, 2);
}

}  // namespace
