// Weights are laid down in panels, and a product is parted among threads by panels, and by rows where they are many.

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include "instruction_sets.h"
#include "layout.h"
#include "linear_work.h"
#include "team.h"
#include "thread_memory.h"

namespace {

constexpr int64_t CHUNK_BYTES = 384 * 1024;  // of rows that meet one panel after the other: they stay in reach
constexpr int64_t ROWS_OF_A_BLOCK = 12, ROWS_PREPARED = 8, INPUTS_PACKED = 32, PIECES_PER_THREAD = 4;

thread_local Memory prepared_memory, wide_memory;

int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Where halves are gated, a panel is 16 gates and their 16 others.
int64_t num_panels(const akv_linear &linear, bool gated) {
    return gated ? up_to(linear.out / 2, 16) / 16 : up_to(linear.out, PANEL_OUTPUTS) / PANEL_OUTPUTS;
}

int64_t panel_bytes(const akv_linear &linear) {
    if (linear.bits == 8) return (4 + static_cast<int64_t>(linear.in)) * PANEL_OUTPUTS;
    if (linear.bits == 4) return static_cast<int64_t>(linear.in) / GROUP * INT4_GROUP_BYTES;
    return (linear.dtype == AKV_FP32 ? linear.in : (linear.in + 1) / 2) * static_cast<int64_t>(LINE_BYTES);
}

// The weight's row that is output `o` of panel `p`, or -1.
int64_t row_of(const akv_linear &linear, bool gated, int64_t p, int o) {
    if (!gated) return p * PANEL_OUTPUTS + o < linear.out ? p * PANEL_OUTPUTS + o : -1;
    const int64_t half = linear.out / 2, row = p * 16 + o % 16;
    return row >= half ? -1 : o < 16 ? row : half + row;
}

// The rows of a weight that one panel holds; null where there is none.
template <class T>
void find_rows(const akv_linear &linear, bool gated, const akv_part *parts, int num_parts, int64_t p, const T **rows) {
    for (int o = 0; o < PANEL_OUTPUTS; ++o) {
        int64_t row = row_of(linear, gated, p, o);
        rows[o] = nullptr;
        for (int part = 0; row >= 0 && part < num_parts; row -= parts[part++].out)
            if (row < parts[part].out) {
                rows[o] = static_cast<const T *>(parts[part].weight) + row * parts[part].row_stride;
                break;
            }
    }
}

template <class T> void pack(const akv_linear &linear, bool gated, const akv_part *parts, int num_parts, T *to, int threads) {
    constexpr int per_line = LINE_BYTES / PANEL_OUTPUTS / static_cast<int>(sizeof(T));
    const int64_t inputs = linear.in, padded = up_to(inputs, per_line);
    for_each(threads, num_panels(linear, gated), [&](int64_t p) {
        const T *rows[PANEL_OUTPUTS];
        find_rows(linear, gated, parts, num_parts, p, rows);
        T *panel = to + p * padded * PANEL_OUTPUTS;
        // So many inputs at a time that what is written stays in the nearest cache.
        for (int64_t first = 0; first < padded; first += INPUTS_PACKED)
            for (int o = 0; o < PANEL_OUTPUTS; ++o)
                for (int64_t i = first; i < padded && i < first + INPUTS_PACKED; ++i)
                    panel[i / per_line * PANEL_OUTPUTS * per_line + o * per_line + i % per_line] =
                        rows[o] && i < inputs ? rows[o][i] : T(0);
    });
}

// Codes [out][in]; scales [out], or with 4 bits scales and middles [out][in / 32], in bf16.
void pack_codes(const akv_linear &linear, bool gated, const int8_t *codes, const uint16_t *scales, const uint16_t *middles,
                char *to, int threads) {
    const int64_t inputs = linear.in, groups = inputs / GROUP;
    for_each(threads, num_panels(linear, gated), [&](int64_t p) {
        char *panel = to + p * panel_bytes(linear);
        memset(panel, 0, static_cast<size_t>(panel_bytes(linear)));
        for (int o = 0; o < PANEL_OUTPUTS; ++o) {
            const int64_t row = row_of(linear, gated, p, o);
            if (row < 0) continue;
            if (linear.bits == 8) {
                reinterpret_cast<float *>(panel)[o] = float_of(scales[row]);
                for (int64_t i = 0; i < inputs; ++i)
                    panel[PANEL_OUTPUTS * 4 + i * PANEL_OUTPUTS + o] = codes[row * inputs + i];
                continue;
            }
            for (int64_t g = 0; g < groups; ++g) {
                char *group = panel + g * INT4_GROUP_BYTES;
                memcpy(group + o * 2, scales + row * groups + g, 2);
                memcpy(group + PANEL_OUTPUTS * 2 + o * 2, middles + row * groups + g, 2);
                const int8_t *from = codes + row * inputs + g * GROUP;
                for (int i = 0; i < GROUP; ++i) {
                    char &byte = group[PANEL_OUTPUTS * 4 + i / 2 * PANEL_OUTPUTS + o];
                    byte = static_cast<char>(byte | (from[i] + 8) << (i % 2 ? 4 : 0));
                }
            }
        }
    });
}

// One product on its way.
class Multiplication {
  public:
    Multiplication(const akv_linear &linear, const akv_norm *norm, const akv_product &product)
        : linear_(linear), norm_(norm), product_(product), kernels_(kernels_of(product.isa)->linear),
          numbers_(static_cast<Numbers>(linear.dtype)), low_(linear.bits != 0), gated_(product.then == AKV_GATE),
          widened_(low_ || (numbers_ == Numbers::bf16 && kernels_->rows_are_fp32)), item_(numbers_ == Numbers::fp32 ? 4 : 2),
          given_bytes_(product.row_stride * item_), rows_(static_cast<const char *>(product.rows)),
          row_bytes_(given_bytes_), panels_(num_panels(linear, gated_)), panel_bytes_(panel_bytes(linear)) {}

    int32_t run() {
        if (product_.num_rows < 1 || panels_ < 1) return AKV_OK;
        if (must_prepare() && !prepare()) return AKV_NO_MEMORY;
        // Rows in chunks of equal size, for threads take equally many.
        const int64_t n = product_.num_rows, wanted = n * row_bytes_ / CHUNK_BYTES + 1;
        chunk_ = up_to((n + wanted - 1) / wanted, ROWS_OF_A_BLOCK);
        // A thread takes panels that follow each other, for memory is read fastest in one direction; but not all at once,
        // for another program may hold it up.
        const int64_t items = (n + chunk_ - 1) / chunk_ * panels_;
        const int64_t pieces = static_cast<int64_t>(product_.threads) * PIECES_PER_THREAD, each = (items + pieces - 1) / pieces;
        for_each(product_.threads, (items + each - 1) / each, [&](int64_t piece) {
            const int64_t end = (piece + 1) * each < items ? (piece + 1) * each : items;
            for (int64_t i = piece * each; i < end; ++i) multiply(i % panels_, i / panels_ * chunk_);
        });
        return AKV_OK;
    }

  private:
    const akv_linear &linear_;
    const akv_norm *norm_;
    const akv_product &product_;
    const LinearKernels *kernels_;
    Numbers numbers_;
    bool low_, gated_, widened_;
    int64_t item_, given_bytes_;
    const char *rows_;
    int64_t row_bytes_, panels_, panel_bytes_, chunk_ = 0;

    // Rows 4 KiB apart, or a multiple of that, fall into one set of the nearest cache, which has place for 8 of them.
    bool must_prepare() const {
        return norm_ || widened_ || (numbers_ == Numbers::bf16 && linear_.in % 2) ||
               (product_.num_rows > 4 && given_bytes_ % 4096 == 0);
    }

    // Puts rows as `multiply` reads them into memory of their own. False: there is none.
    bool prepare() {
        const int64_t n = product_.num_rows;
        row_bytes_ = up_to((linear_.in + (low_ ? linear_.in / GROUP : 1)) * (widened_ ? 4 : item_), 64);
        if (row_bytes_ / 64 % 2 == 0) row_bytes_ += 64;
        char *prepared = prepared_memory.take(static_cast<size_t>(row_bytes_ * n));
        if (!prepared) return false;
        const char *given = rows_;
        rows_ = prepared;
        std::atomic<bool> failed{false};
        for_each(product_.threads, (n + ROWS_PREPARED - 1) / ROWS_PREPARED, [&](int64_t block) {
            const int64_t first = block * ROWS_PREPARED, end = first + ROWS_PREPARED < n ? first + ROWS_PREPARED : n;
            float *wide = reinterpret_cast<float *>(wide_memory.take(static_cast<size_t>(linear_.in) * 4));
            if (!wide) {
                failed.store(true);
                return;
            }
            for (int64_t r = first; r < end; ++r) {
                const char *row = given + r * given_bytes_;
                char *to = prepared + r * row_bytes_;
                if (low_)
                    kernels_->prepare_low(row, linear_.in, linear_.bits, norm_, wide, to);
                else
                    kernels_->prepare(row, numbers_, linear_.in, norm_, wide, to);
            }
        });
        return !failed.load();
    }

    // A panel with the chunk of rows from `first` on.
    void multiply(int64_t p, int64_t first) const {
        const int64_t width = gated_ ? PANEL_OUTPUTS / 2 : PANEL_OUTPUTS, left = product_.num_rows - first;
        const int64_t outputs = (gated_ ? linear_.out / 2 : linear_.out) - p * width;
        const Panel panel = {static_cast<const char *>(linear_.panels) + p * panel_bytes_,
                             linear_.bias ? linear_.bias + p * PANEL_OUTPUTS : nullptr,
                             numbers_,
                             static_cast<Then>(product_.then),
                             linear_.bits,
                             static_cast<int32_t>(low_ ? linear_.in : panel_bytes_ / LINE_BYTES),
                             static_cast<int32_t>(outputs < width ? outputs : width),
                             row_bytes_,
                             product_.out_stride * item_};
        char *out = static_cast<char *>(product_.out) + first * panel.out_bytes + p * width * item_;
        const auto multiply_with = low_ ? kernels_->multiply_low : kernels_->multiply;
        multiply_with(panel, rows_ + first * row_bytes_, out, left < chunk_ ? left : chunk_);
    }
};

}  // namespace

extern "C" {

// Bytes that the panels of a weight take.
int64_t akv_panel_bytes(const akv_linear *linear, int32_t gated) {
    return num_panels(*linear, gated != 0) * panel_bytes(*linear);
}

// Lays down the rows of all parts, one below the other, in panels.
void akv_pack(const akv_linear *linear, int32_t gated, const akv_part *parts, int32_t num_parts, void *panels, int32_t threads) {
    if (linear->dtype == AKV_FP32)
        pack(*linear, gated != 0, parts, num_parts, static_cast<uint32_t *>(panels), threads);
    else
        pack(*linear, gated != 0, parts, num_parts, static_cast<uint16_t *>(panels), threads);
}

void akv_pack_codes(const akv_linear *linear, int32_t gated, const int8_t *codes, const void *scales, const void *middles,
                    void *panels, int32_t threads) {
    pack_codes(*linear, gated != 0, codes, static_cast<const uint16_t *>(scales), static_cast<const uint16_t *>(middles),
               static_cast<char *>(panels), threads);
}

int32_t akv_multiply(const akv_linear *linear, const akv_norm *norm, const akv_product *product) {
    return Multiplication(*linear, norm, *product).run();
}

// Queries and keys of every token, [num_tokens][num_heads][size] within rows of token_stride elements.
void akv_turn_heads(const akv_turn *how, void *tokens, int64_t token_stride, int64_t num_tokens) {
    const LinearKernels *kernels = kernels_of(how->isa)->linear;
    const Numbers numbers = static_cast<Numbers>(how->dtype);
    const int64_t bytes = token_stride * (numbers == Numbers::fp32 ? 4 : 2);
    const int64_t blocks = (num_tokens + ROWS_PREPARED - 1) / ROWS_PREPARED;
    for_each(how->threads, blocks, [&](int64_t block) {
        const int64_t first = block * ROWS_PREPARED;
        for (int64_t t = first; t < num_tokens && t < first + ROWS_PREPARED; ++t)
            kernels->turn(*how, numbers, static_cast<char *>(tokens) + t * bytes, how->cos + t * how->size,
                          how->sin + t * how->size);
    });
}

// Queries, and behind them the keys, of every token: to [num_tokens][num_heads of both][size].
void akv_hadamard_heads(const akv_hadamard *how, int64_t num_tokens, void *to) {
    const LinearKernels *kernels = kernels_of(how->isa)->linear;
    const Numbers numbers = static_cast<Numbers>(how->dtype);
    const int64_t item = numbers == Numbers::fp32 ? 4 : 2;
    const int64_t blocks = (num_tokens + ROWS_PREPARED - 1) / ROWS_PREPARED;
    for_each(how->threads, blocks, [&](int64_t block) {
        const int64_t first = block * ROWS_PREPARED;
        char *out = static_cast<char *>(to) + first * (how->heads[0].num_heads + how->heads[1].num_heads) * how->size * item;
        for (int64_t t = first; t < num_tokens && t < first + ROWS_PREPARED; ++t)
            for (const akv_heads &heads : how->heads) {
                const char *from = static_cast<const char *>(heads.start) + t * heads.token_stride * item;
                for (int32_t h = 0; h < heads.num_heads; ++h, from += heads.head_stride * item, out += how->size * item)
                    kernels->hadamard(from, numbers, how->size, heads.factor, out);
            }
    });
}
}
