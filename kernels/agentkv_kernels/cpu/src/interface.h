// What crosses between Python and this library: addresses, sizes and small ints, no type of torch or Python.
#pragma once

#include <cstdint>

extern "C" {

enum akv_dtype : int32_t { AKV_FP32 = 0, AKV_BF16 = 1, AKV_INT8 = 2 };

// Codes of the instruction sets, from the least to the most. A bit of akv_supported() for each.
enum akv_isa : int32_t { AKV_PLAIN = 0, AKV_AVX2 = 1, AKV_AVX512 = 2, AKV_AVX512_BF16 = 3, AKV_NUM_ISA = 4 };

enum akv_result : int32_t { AKV_OK = 0, AKV_NO_MEMORY = -1, AKV_BAD_SLOT = -2, AKV_NO_OPENMP = -3 };

// One layer's pages; how they lie is told in layout.h. Made once a store.
struct akv_layer {
    void *pages;
    int32_t num_pages;
    int32_t page_size;
    int32_t kv_heads;
    int32_t key_size;
    int32_t value_size;
    int32_t dtype;     // of queries, new keys and values, and answers
    int32_t kv_dtype;  // of what the pages hold: the same, or AKV_INT8 with scales
};

// Pages first_page .. first_page + num_pages of the page tables of some sequences, where they are the same pages.
struct akv_run {
    int32_t first_page;
    int32_t num_pages;
    int32_t first_member;
    int32_t num_members;
};

// One step, for all layers. Page ids were checked against the store.
struct akv_step {
    const int32_t *query_lens;   // [num_seqs]
    const int32_t *seq_lens;     // [num_seqs]
    const int32_t *page_table;   // [num_seqs, max_pages]
    const akv_run *runs;         // [num_runs]; those of one sequence follow each other from its page 0
    const int32_t *run_members;  // sequences, run after run
    int32_t num_seqs;
    int32_t num_tokens;
    int32_t max_pages;
    int32_t num_runs;
};

// One layer's attention. Strides are in elements; the last dimension is contiguous.
struct akv_call {
    const void *query;  // [num_tokens, num_heads, key_size]
    void *out;          // [num_tokens, num_heads, value_size], contiguous
    const float *sinks; // [num_heads], or null
    int64_t query_token_stride;
    int64_t query_head_stride;
    int32_t num_heads;
    int32_t window;     // 0: none
    float scale;
    float softcap;      // 0: none
    int32_t isa;
    int32_t threads;
};

// What becomes of a product: it is written, added to what stands there, or its first half is gated with the second.
enum akv_then : int32_t { AKV_WRITE = 0, AKV_ADD = 1, AKV_GATE = 2 };

// A weight, or several over the same inputs, as akv_pack lays them down (linear.h).
struct akv_linear {
    const void *panels;
    const float *bias;  // 32 for each panel, in its order, or null
    int32_t in;
    int32_t out;
    int32_t dtype;      // of weight, rows and results
    int32_t bits;       // 8 or 4: codes (low_bit.h), rows and results are bf16; 0: none
};

// A weight as a model has it: [out][in], rows row_stride elements apart.
struct akv_part {
    const void *weight;
    int64_t row_stride;
    int64_t out;
};

// x / sqrt(mean(x^2) + eps) * weight; without a weight there is no norm.
struct akv_norm {
    const float *weight;
    float eps;
};

// One product. Strides are in elements; the last dimension is contiguous.
struct akv_product {
    const void *rows;  // [num_rows][in]
    void *out;         // [num_rows][out], or [num_rows][out / 2] where halves are gated
    int64_t row_stride;
    int64_t out_stride;
    int64_t num_rows;
    int32_t then;
    int32_t isa;
    int32_t threads;
};

// Norms, where there are some, and RoPE of queries and the keys behind them.
struct akv_turn {
    const float *cos;  // [num_tokens][size]
    const float *sin;
    akv_norm query_norm;
    akv_norm key_norm;
    int32_t num_query_heads;
    int32_t num_heads;  // of queries and keys together
    int32_t size;
    int32_t dtype;
    int32_t isa;
    int32_t threads;
};

// Heads of tokens, contiguous each, and what they are multiplied by. Strides are in elements.
struct akv_heads {
    const void *start;
    int64_t token_stride;
    int64_t head_stride;
    int32_t num_heads;
    float factor;
};

// Signs and a Hadamard matrix over queries and keys.
struct akv_hadamard {
    akv_heads heads[2];
    int32_t size;
    int32_t dtype;
    int32_t isa;
    int32_t threads;
};
}
