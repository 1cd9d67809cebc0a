// What crosses between Python and this library: addresses, sizes and small ints, no type of torch or Python.
#pragma once

#include <cstdint>

extern "C" {

enum akv_dtype : int32_t { AKV_FP32 = 0, AKV_BF16 = 1, AKV_INT8 = 2 };

// Codes of the instruction sets, from the least to the most. A bit of akv_supported() for each.
enum akv_isa : int32_t { AKV_PLAIN = 0, AKV_AVX2 = 1, AKV_AVX512 = 2, AKV_AVX512_BF16 = 3, AKV_NUM_ISA = 4 };

enum akv_result : int32_t { AKV_OK = 0, AKV_NO_MEMORY = -1, AKV_BAD_SLOT = -2 };

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
}
