// Every function of the kernels' C interface, on memory that ends where theirs does, against plain loops in double.
//
// Compiled with -fsanitize=address,undefined it finds reads beyond pages and buffers, for those lie at the ends of
// allocations. Prints what differs, and returns how much did.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "../../../kernels/agentkv_kernels/cpu/src/layout.h"

extern "C" {
int32_t akv_supported(void);
int32_t akv_attend(const akv_layer *, const akv_step *, const akv_call *);
int64_t akv_keys_read(const akv_layer *, const akv_step *, const akv_call *);
uint64_t akv_read(const akv_layer *, const akv_step *, const akv_call *);
int32_t akv_store(const akv_layer *, const void *, int64_t, int64_t, const void *, int64_t, int64_t, const int64_t *,
                  int64_t, int32_t);
int32_t akv_copy(const akv_layer *, int64_t, const int64_t *, const int64_t *, int64_t);
void akv_export(const akv_layer *, const int64_t *, int64_t, void *, void *);
void akv_import(const akv_layer *, const int64_t *, int64_t, void *, void *);
void akv_export_scales(const akv_layer *, const int64_t *, int64_t, void *);
void akv_import_scales(const akv_layer *, const int64_t *, int64_t, void *);
int32_t akv_fill(const akv_layer *, const int64_t *, int64_t, float);
}

namespace {

int failures = 0;

void expect(bool held, const char *what) {
    if (held) return;
    ++failures;
    printf("failed: %s\n", what);
}

uint64_t state = 1;
double uniform() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<double>(state >> 11) / 9007199254740992.0;
}
double normal() { return std::sqrt(-2 * std::log(1 - uniform())) * std::cos(6.283185307179586 * uniform()); }

// Elements of one dtype in memory of exactly their size.
struct Elements {
    int dtype;
    std::vector<uint32_t> wide;
    std::vector<uint16_t> narrow;
    std::vector<int8_t> bytes;

    Elements(int of, size_t n) : dtype(of) {
        if (dtype == AKV_FP32)
            wide.resize(n);
        else if (dtype == AKV_BF16)
            narrow.resize(n);
        else
            bytes.resize(n);
    }
    void *data() {
        if (dtype == AKV_FP32) return wide.data();
        return dtype == AKV_BF16 ? static_cast<void *>(narrow.data()) : bytes.data();
    }
    void set(size_t i, double x) {
        const float f = static_cast<float>(x);
        if (dtype == AKV_FP32)
            memcpy(&wide[i], &f, 4);
        else
            narrow[i] = bf16_of(f);
    }
    double get(size_t i) const {
        if (dtype != AKV_FP32) return float_of(narrow[i]);
        float f;
        memcpy(&f, &wide[i], 4);
        return f;
    }
    bool operator==(const Elements &other) const {
        return wide == other.wide && narrow == other.narrow && bytes == other.bytes;
    }
};

// What pages keep of these vectors of `size` elements.
std::vector<double> kept(const Elements &of, size_t n, int size, int kv_dtype) {
    std::vector<double> all(n);
    for (size_t i = 0; i < n; ++i) all[i] = of.get(i);
    if (kv_dtype != AKV_INT8) return all;
    for (size_t start = 0; start < n; start += size) {
        float most = 0;
        for (int i = 0; i < size; ++i) most = std::fmax(most, static_cast<float>(std::fabs(all[start + i])));
        const double scale = float_of(bf16_of(most / 127));
        for (int i = 0; i < size; ++i)
            all[start + i] = scale * std::nearbyint(static_cast<float>(all[start + i]) / static_cast<float>(scale));
    }
    return all;
}

struct Shape {
    int dtype, kv_dtype, kv_heads, group, key_size, value_size, page_size, window;
    float softcap;
    bool sinks;
};

struct Lengths {
    int query, context;
};

// Sequences 0 and 1 have their first pages, as many as `shared` says, in common.
void one_step(const Shape &shape, const std::vector<Lengths> &lengths, int shared, int threads) {
    const int heads = shape.kv_heads * shape.group, num_seqs = static_cast<int>(lengths.size()), P = shape.page_size;
    int max_pages = 0, num_tokens = 0, num_pages = 1;
    std::vector<int32_t> query_lens, seq_lens;
    for (const Lengths &each : lengths) {
        query_lens.push_back(each.query);
        seq_lens.push_back(each.query + each.context);
        const int pages = (each.query + each.context + P - 1) / P;
        max_pages = pages > max_pages ? pages : max_pages;
        num_tokens += each.query;
        num_pages += pages;
    }
    akv_layer layer = {nullptr, num_pages, P, shape.kv_heads, shape.key_size, shape.value_size, shape.dtype,
                       shape.kv_dtype};
    const size_t bytes = static_cast<size_t>(Layout(&layer).page_bytes()) * num_pages + SLACK;
    layer.pages = malloc(bytes);
    memset(layer.pages, 0, bytes);
    std::vector<int64_t> every(static_cast<size_t>(num_pages) * P);
    for (size_t i = 0; i < every.size(); ++i) every[i] = static_cast<int64_t>(i);
    akv_fill(&layer, every.data(), static_cast<int64_t>(every.size()), std::numeric_limits<float>::quiet_NaN());

    std::vector<int32_t> table(static_cast<size_t>(num_seqs) * max_pages);
    int32_t next = num_pages - 1;
    std::vector<Elements> keys, values;
    std::vector<std::vector<double>> kept_keys, kept_values;
    for (int s = 0; s < num_seqs; ++s) {
        const int pages = (seq_lens[s] + P - 1) / P;
        for (int p = 0; p < pages; ++p) table[s * max_pages + p] = next--;
        const size_t n = static_cast<size_t>(seq_lens[s]) * shape.kv_heads;
        keys.emplace_back(shape.dtype, n * shape.key_size);
        values.emplace_back(shape.dtype, n * shape.value_size);
        for (size_t i = 0; i < n * shape.key_size; ++i) keys[s].set(i, normal());
        for (size_t i = 0; i < n * shape.value_size; ++i) values[s].set(i, normal());
        if (shared && s == 1)
            for (int p = 0; p < shared; ++p) {
                table[max_pages + p] = table[p];
                for (int64_t i = 0; i < static_cast<int64_t>(P) * shape.kv_heads * shape.key_size; ++i)
                    keys[1].set(p * P * shape.kv_heads * shape.key_size + i,
                                keys[0].get(p * P * shape.kv_heads * shape.key_size + i));
                for (int64_t i = 0; i < static_cast<int64_t>(P) * shape.kv_heads * shape.value_size; ++i)
                    values[1].set(p * P * shape.kv_heads * shape.value_size + i,
                                  values[0].get(p * P * shape.kv_heads * shape.value_size + i));
            }
        kept_keys.push_back(kept(keys[s], n * shape.key_size, shape.key_size, shape.kv_dtype));
        kept_values.push_back(kept(values[s], n * shape.value_size, shape.value_size, shape.kv_dtype));
        std::vector<int64_t> slots;
        for (int i = 0; i < seq_lens[s]; ++i) slots.push_back(static_cast<int64_t>(table[s * max_pages + i / P]) * P + i % P);
        const int64_t kh = shape.key_size, vh = shape.value_size;
        expect(akv_store(&layer, keys[s].data(), kh * shape.kv_heads, kh, values[s].data(), vh * shape.kv_heads, vh,
                         slots.data(), seq_lens[s], threads) == AKV_OK, "tokens are stored");
    }
    Elements query(shape.dtype, static_cast<size_t>(num_tokens) * heads * shape.key_size);
    for (int64_t i = 0; i < static_cast<int64_t>(num_tokens) * heads * shape.key_size; ++i) query.set(i, normal());
    std::vector<float> sinks;
    for (int h = 0; h < heads; ++h) sinks.push_back(static_cast<float>(normal()));

    const akv_run run = {0, shared, 0, 2};
    const int32_t members[] = {0, 1};
    const akv_step step = {query_lens.data(), seq_lens.data(), table.data(), &run, members,
                           num_seqs, num_tokens, max_pages, shared ? 1 : 0};
    for (int isa = 0; isa < AKV_NUM_ISA; ++isa) {
        if (!(akv_supported() >> isa & 1)) continue;
        Elements out(shape.dtype, static_cast<size_t>(num_tokens) * heads * shape.value_size);
        for (int64_t i = 0; i < static_cast<int64_t>(num_tokens) * heads * shape.value_size; ++i) out.set(i, NAN);
        const akv_call call = {query.data(), out.data(), shape.sinks ? sinks.data() : nullptr,
                               static_cast<int64_t>(heads) * shape.key_size, shape.key_size, heads, shape.window, 0.3f,
                               shape.softcap, isa, threads};
        expect(akv_attend(&layer, &step, &call) == AKV_OK, "attention is computed");
        expect(akv_keys_read(&layer, &step, &call) > 0, "keys are counted");
        akv_read(&layer, &step, &call);
        double worst = 0;
        int token = 0;
        for (int s = 0; s < num_seqs; ++s)
            for (int q = 0; q < query_lens[s]; ++q, ++token)
                for (int h = 0; h < heads; ++h) {
                    const int position = seq_lens[s] - query_lens[s] + q, kv_head = h / shape.group;
                    const int from = shape.window && position + 1 > shape.window ? position + 1 - shape.window : 0;
                    std::vector<double> sums(shape.value_size, 0.0);
                    double total = shape.sinks ? std::exp(static_cast<double>(sinks[h])) : 0;
                    for (int k = from; k <= position; ++k) {
                        double score = 0;
                        for (int d = 0; d < shape.key_size; ++d)
                            score += query.get((static_cast<size_t>(token) * heads + h) * shape.key_size + d) *
                                     kept_keys[s][(static_cast<size_t>(k) * shape.kv_heads + kv_head) * shape.key_size + d];
                        score *= 0.3;
                        if (shape.softcap != 0) score = shape.softcap * std::tanh(score / shape.softcap);
                        const double weight = std::exp(score);
                        total += weight;
                        for (int v = 0; v < shape.value_size; ++v)
                            sums[v] +=
                                weight *
                                kept_values[s][(static_cast<size_t>(k) * shape.kv_heads + kv_head) * shape.value_size + v];
                    }
                    for (int v = 0; v < shape.value_size; ++v) {
                        const double got = out.get((static_cast<size_t>(token) * heads + h) * shape.value_size + v);
                        const double off = std::fabs(got - sums[v] / total);
                        if (!(off <= worst)) worst = off;
                    }
                }
        const double bound = shape.dtype == AKV_FP32 ? 2e-5 : 4e-2;
        if (!(worst <= bound)) {
            ++failures;
            printf("failed: isa %d dtype %d over %d heads %dx%d sizes %d %d pages of %d window %d softcap %g sinks %d threads %d "
                   "shared %d: off by %g\n", isa, shape.dtype, shape.kv_dtype, shape.kv_heads, shape.group, shape.key_size,
                   shape.value_size, P, shape.window, static_cast<double>(shape.softcap), shape.sinks, threads, shared, worst);
        }
    }

    // The first page is copied over the last, carried out and in again, and slots that are none are refused.
    Elements page_keys(shape.kv_dtype, static_cast<size_t>(P) * shape.kv_heads * shape.key_size), again_keys = page_keys;
    Elements page_values(shape.kv_dtype, static_cast<size_t>(P) * shape.kv_heads * shape.value_size), again_values = page_values;
    const int64_t source = table[0], target[] = {0, source}, sources[] = {source, 0};
    akv_export(&layer, &source, 1, page_keys.data(), page_values.data());
    expect(akv_copy(&layer, 1, &source, target, 1) == AKV_OK, "a page is copied");
    akv_export(&layer, target, 1, again_keys.data(), again_values.data());
    expect(page_keys == again_keys && page_values == again_values, "a copied page holds what its source held");
    std::vector<uint16_t> scales(static_cast<size_t>(P) * shape.kv_heads * 2), again_scales = scales;
    if (shape.kv_dtype == AKV_INT8) akv_export_scales(&layer, target, 1, scales.data());
    akv_fill(&layer, every.data(), P, 0.f);
    akv_import(&layer, target, 1, page_keys.data(), page_values.data());
    if (shape.kv_dtype == AKV_INT8) akv_import_scales(&layer, target, 1, scales.data());
    expect(akv_copy(&layer, 1, sources, target, 2) == AKV_OK, "two pages change places");
    akv_export(&layer, target, 1, again_keys.data(), again_values.data());
    if (shape.kv_dtype == AKV_INT8) {
        akv_export_scales(&layer, target, 1, again_scales.data());
        bool any = false;
        for (const uint16_t scale : scales) any = any || scale;
        expect(any, "a page has scales");
    }
    expect(page_keys == again_keys && page_values == again_values && scales == again_scales,
           "an imported page is what was exported");
    const int64_t none[] = {static_cast<int64_t>(num_pages) * P};
    expect(akv_fill(&layer, none, 1, 0.f) == AKV_BAD_SLOT, "a slot that is none is refused");
    free(layer.pages);
}

}  // namespace

#include "products.h"
#include "codes.h"
#include "team.h"

int main() {
    all_products();
    all_codes();
    all_teams();
    const int sizes[][2] = {{8, 8}, {64, 64}, {24, 40}, {12, 22}, {128, 96}, {256, 72}};
    const int page_sizes[] = {1, 4, 16, 24, 32};
    int turn = 0;
    for (const auto &size : sizes)
        for (const int page_size : page_sizes)
            for (int kind = 0; kind < 3; ++kind) {
                if (kind == AKV_INT8 && (page_size == 1 || page_size == 32)) continue;
                ++turn;
                const int kv_dtype = kind, dtype = kind == AKV_INT8 ? turn % 2 : kind, group = 1 + turn % 7;
                const int threads = 1 + turn / 2 % 2;
                const Shape shape = {dtype, kv_dtype, 1 + turn % 3, group, size[0], size[1], page_size,
                                     turn % 4 == 1 ? 7 : 0, turn % 5 == 2 ? 3.f : 0.f, turn / 4 % 3 == 0};
                one_step(shape, {{1, 2 * page_size}, {1, 2 * page_size + 5}, {3, 0}, {1, 0}, {37, 30}, {1, 3 * page_size - 1}},
                         turn % 2 == 0 ? 2 : 0, threads);
            }
    for (const int kv_dtype : {AKV_BF16, AKV_INT8}) {
        const Shape wide = {AKV_BF16, kv_dtype, 1, 4, 64, 64, 16, 0, 0, false};
        one_step(wide, {{1, 700}, {40, 600}}, 0, 3);
        one_step(wide, {{1, 700}, {40, 600}}, 36, 3);
        // On three threads the heads of 16 such sequences are taken together, but for the long one.
        const Shape many = {AKV_BF16, kv_dtype, 3, 3, 40, 24, 32, 0, 0, false};
        one_step(many, {{1, 500}, {1, 1}, {1, 15}, {1, 16}, {1, 31}, {1, 33}, {1, 64}, {1, 95}, {1, 96}, {1, 127}, {1, 128}, {1, 129},
                        {1, 130}, {1, 160}, {1, 99}, {1, 0}}, 0, 3);
    }
    printf("%d failed\n", failures);
    return failures != 0;
}
