// A step's work is parted into items, run on threads, and partial results are merged.
//
//     |------ runs of shared pages ------|------ own keys ------|
//     0                              shared                  seq_len
//
// Every run is an item for all queries of its sequences; what a sequence does not share is one item for each tile of
// its queries, parted by keys where there would be too few items for the threads. Queries with more than one item get a
// partial result from each, and these are merged by their log-sum-exp (FlashDecoding; Dao et al. 2023).

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <new>
#include <vector>

#include "instruction_sets.h"
#include "layout.h"
#include "team.h"
#include "thread_memory.h"
#include "work.h"

namespace {

constexpr int ROWS_OF_A_TILE = 96;    // of queries times heads: a tile of keys is used so often while it is in reach
constexpr int ROWS_OF_A_RUN = 192;
constexpr int LEAST_KEYS = 256;       // for which another item pays
constexpr int ITEMS_PER_THREAD = 4;

thread_local Memory scratch_memory, partial_memory;

// A query of several items: its partial results are first_slot .. first_slot + num_slots.
struct Merge {
    int32_t token, first_slot, num_slots;
};

struct Plan {
    std::vector<Item> items;
    std::vector<Row> rows;
    std::vector<Merge> merges;
    std::vector<Unit> units;
    int32_t num_slots = 0;
    // Of each sequence: tokens in its runs, items of these, its first packed token, items added. Of each token: its first
    // slot.
    std::vector<int32_t> shared, num_parts, first_token, used, first_slot;

    void make(const akv_layer &layer, const akv_step &step, const akv_call &call) {
        clear(step);
        for (int r = 0; r < step.num_runs; ++r)
            for (int m = 0; m < step.runs[r].num_members; ++m) {
                const int s = step.run_members[step.runs[r].first_member + m];
                shared[s] = (step.runs[r].first_page + step.runs[r].num_pages) * layer.page_size;
                num_parts[s] += run_parts(layer, step.runs[r], call);
            }
        const int group = call.num_heads / layer.kv_heads, tile = ROWS_OF_A_TILE / group > 0 ? ROWS_OF_A_TILE / group : 1;
        const int parts = wanted_parts(layer, step, call, tile);
        for (int s = 0; s < step.num_seqs; ++s)
            for (int q = 0; q < step.query_lens[s]; q += tile) add_own(step, call, s, q, tile, parts);
        for (int r = 0; r < step.num_runs; ++r) {
            const akv_run &run = step.runs[r];
            const int begin = run.first_page * layer.page_size, end = begin + run.num_pages * layer.page_size;
            const int run_items = run_parts(layer, run, call), each = part_keys(end - begin, run_items);
            for (int p = 0; p < run_items; ++p)
                add_run(step, call, run, group, least(begin + p * each, end), least(begin + (p + 1) * each, end));
        }
    }

    // Items to units: for each head one, or all heads of an item together where its rows are few and its keys no more than
    // what a thread takes at a time of all such. Those that are divided come first, for they are the longest. Of the rest
    // heads are outermost: the items of one prompt then read the same keys and values one after the other.
    void divide(const Work &work) {
        units.clear();
        const int heads = work.layer->kv_heads;
        const auto few = [&](const Item &item) { return kernels_of(work.call->isa)->few_rows(work, item.num_rows); };
        const auto keys = [](const Item &item) { return int64_t{item.key_end} - item.key_begin; };
        int64_t keys_of_few = 0;
        for (const Item &item : items) keys_of_few += few(item) ? keys(item) : 0;
        const int64_t at_a_time = work.call->threads < 2 ? keys_of_few : keys_of_few / (work.call->threads * ITEMS_PER_THREAD);
        const auto is_long = [&](const Item &item) { return few(item) && keys(item) > at_a_time; };
        for (const Item &item : items)
            for (int head = 0; is_long(item) && head < heads; ++head) units.push_back({&item, head, 1});
        for (const Item &item : items)
            if (few(item) && !is_long(item)) units.push_back({&item, 0, heads});
        for (int head = 0; head < heads; ++head)
            for (const Item &item : items)
                if (!few(item)) units.push_back({&item, head, 1});
    }

  private:
    void clear(const akv_step &step) {
        items.clear();
        rows.clear();
        merges.clear();
        num_slots = 0;
        const size_t n = static_cast<size_t>(step.num_seqs);
        shared.assign(n, 0);
        num_parts.assign(n, 0);
        used.assign(n, 0);
        first_token.resize(n);
        first_slot.resize(static_cast<size_t>(step.num_tokens));
        int32_t token = 0;
        for (size_t s = 0; s < n; ++s) {
            first_token[s] = token;
            token += step.query_lens[s];
        }
    }

    // How many items the keys of one tile of queries are parted into, where they are many.
    static int wanted_parts(const akv_layer &layer, const akv_step &step, const akv_call &call, int tile) {
        if (call.threads < 2) return 1;
        int64_t units = 0;
        for (int s = 0; s < step.num_seqs; ++s) units += (step.query_lens[s] + tile - 1) / tile;
        units *= layer.kv_heads;
        const int64_t wanted = static_cast<int64_t>(call.threads) * ITEMS_PER_THREAD;
        return units >= wanted ? 1 : static_cast<int>((wanted + units - 1) / units);
    }

    // Into how many items the keys of a run are parted, and how many keys each has at most: whole tiles.
    static int run_parts(const akv_layer &layer, const akv_run &run, const akv_call &call) {
        const int worth = run.num_pages * layer.page_size / LEAST_KEYS;
        const int wanted = (call.threads * ITEMS_PER_THREAD + layer.kv_heads - 1) / layer.kv_heads;
        return call.threads < 2 || worth < 2 ? 1 : wanted < worth ? wanted : worth;
    }
    static int least(int a, int b) { return a < b ? a : b; }
    static int part_keys(int keys, int parts) { return ((keys + parts - 1) / parts + TILE - 1) / TILE * TILE; }

    static int first_seen(const akv_call &call, int position) {
        return call.window && position + 1 > call.window ? position + 1 - call.window : 0;
    }

    void add_own(const akv_step &step, const akv_call &call, int s, int q, int tile, int parts) {
        const int count = q + tile < step.query_lens[s] ? tile : step.query_lens[s] - q;
        const int position = step.seq_lens[s] - step.query_lens[s] + q, end = position + count;
        const int seen = first_seen(call, position), begin = seen > shared[s] ? seen : shared[s];
        const int worth = (end - begin) / LEAST_KEYS;
        const int own_parts = parts < worth ? parts : (worth > 1 ? worth : 1), slots = own_parts + num_parts[s];
        const int each = part_keys(end - begin, own_parts);
        for (int p = 0; p < own_parts; ++p) {
            // Parts end where tiles do, so that none is read twice.
            const int aligned = begin / TILE * TILE;
            const int from = p == 0 ? begin : aligned + p * each, to = p == own_parts - 1 ? end : aligned + (p + 1) * each;
            items.push_back({step.page_table + static_cast<int64_t>(s) * step.max_pages, from < end ? from : end,
                             to < end ? to : end, static_cast<int32_t>(rows.size()), count});
            for (int i = 0; i < count; ++i) {
                const int32_t slot = slots == 1 ? -1 : num_slots + i * slots + num_parts[s] + p;
                rows.push_back({first_token[s] + q + i, position + i, slot});
            }
        }
        if (slots == 1) return;
        for (int i = 0; i < count; ++i) {
            first_slot[first_token[s] + q + i] = num_slots + i * slots;
            merges.push_back({first_token[s] + q + i, num_slots + i * slots, slots});
        }
        num_slots += count * slots;
    }

    // Keys first .. end of a run, for all queries of its sequences.
    void add_run(const akv_step &step, const akv_call &call, const akv_run &run, int group, int first, int end) {
        const int most = ROWS_OF_A_RUN / group > 0 ? ROWS_OF_A_RUN / group : 1;
        const int32_t *members = step.run_members + run.first_member;
        const int32_t *pages = step.page_table + static_cast<int64_t>(members[0]) * step.max_pages;
        items.push_back({pages, first, end, static_cast<int32_t>(rows.size()), 0});
        int lowest = end;
        for (int m = 0; m < run.num_members; ++m) {
            const int s = members[m];
            for (int i = 0; i < step.query_lens[s]; ++i) {
                if (items.back().num_rows == most) {
                    items.back().key_begin = lowest;
                    items.push_back({pages, first, end, static_cast<int32_t>(rows.size()), 0});
                    lowest = end;
                }
                const int position = step.seq_lens[s] - step.query_lens[s] + i, seen = first_seen(call, position);
                const int from = seen > first ? seen : first;
                lowest = from < lowest ? from : lowest;
                rows.push_back({first_token[s] + i, position, first_slot[first_token[s] + i] + used[s]});
                items.back().num_rows += 1;
            }
            used[s] += 1;
        }
        items.back().key_begin = lowest;
    }
};

thread_local Plan plan;

void merge(const Work &work, const Merge &one) {
    const akv_call *call = work.call;
    const int value_size = work.layer->value_size;
    const int64_t slot_floats = static_cast<int64_t>(call->num_heads) * work.partial_width;
    for (int head = 0; head < call->num_heads; ++head) {
        float *parts = work.partials + one.first_slot * slot_floats + static_cast<int64_t>(head) * work.partial_width;
        float top = call->sinks ? call->sinks[head] * LOG2E : NO_SCORE;
        for (int i = 0; i < one.num_slots; ++i) {
            const float its = parts[i * slot_floats];
            top = its > top ? its : top;
        }
        float total = call->sinks ? std::exp2(call->sinks[head] * LOG2E - top) : 0;
        float *sums = parts + 2;
        for (int i = 0; i < one.num_slots; ++i) {
            const float *part = parts + i * slot_floats;
            const float weight = std::exp2(part[0] - top);
            total += weight * part[1];
            for (int v = 0; v < value_size; ++v) sums[v] = (i ? sums[v] : 0) + weight * part[2 + v];
        }
        const int64_t at = (static_cast<int64_t>(one.token) * call->num_heads + head) * value_size;
        const float factor = 1 / total;
        if (work.layer->dtype == AKV_FP32)
            for (int v = 0; v < value_size; ++v) static_cast<float *>(call->out)[at + v] = sums[v] * factor;
        else
            for (int v = 0; v < value_size; ++v) static_cast<uint16_t *>(call->out)[at + v] = bf16_of(sums[v] * factor);
    }
}

Work begin(const akv_layer *layer, const akv_step *step, const akv_call *call) {
    plan.make(*layer, *step, *call);
    const Work work = {layer, call, plan.rows.data(), nullptr, (layer->value_size + 2 + 15) / 16 * 16};
    plan.divide(work);
    return work;
}

int32_t attend(const akv_layer *layer, const akv_step *step, const akv_call *call) {
    Work work = begin(layer, step, call);
    const Kernels *kernels = kernels_of(call->isa);
    if (plan.num_slots) {
        const size_t floats = static_cast<size_t>(plan.num_slots) * call->num_heads * work.partial_width;
        work.partials = reinterpret_cast<float *>(partial_memory.take(floats * sizeof(float)));
        if (!work.partials) return AKV_NO_MEMORY;
    }
    const Unit *units = plan.units.data();
    std::atomic<bool> failed{false};
    for_each(call->threads, static_cast<int64_t>(plan.units.size()), [&](int64_t i) {
        const Unit &unit = units[i];
        char *scratch = scratch_memory.take(kernels->scratch_bytes(work, unit.item->num_rows, unit.num_heads));
        if (scratch)
            kernels->attend(work, unit, scratch);
        else
            failed.store(true);
    });
    if (failed.load()) return AKV_NO_MEMORY;
    const int64_t num_merges = static_cast<int64_t>(plan.merges.size());
    const Merge *merges = plan.merges.data();
    for_each(num_merges > 8 ? call->threads : 1, num_merges, [&](int64_t i) { merge(work, merges[i]); });
    return AKV_OK;
}

}  // namespace

extern "C" {

// Raised with every change of what crosses the border.
int32_t akv_interface(void) { return 4; }

// A bit for each instruction set that this library was made for and this processor has.
int32_t akv_supported(void) {
    int32_t found = 1 << AKV_PLAIN;
#if defined(AKV_WITH_AVX2)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found |= 1 << AKV_AVX2;
#endif
#if defined(AKV_WITH_AVX512)
    const bool wide = __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
    if (wide) found |= 1 << AKV_AVX512;
#if defined(AKV_WITH_AVX512_BF16)
    if (wide && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"))
        found |= 1 << AKV_AVX512_BF16;
#endif
#endif
    return found;
}

int32_t akv_attend(const akv_layer *layer, const akv_step *step, const akv_call *call) {
    try {
        return attend(layer, step, call);
    } catch (const std::bad_alloc &) {
        return AKV_NO_MEMORY;
    }
}

// Keys that `akv_attend` reads for each KV head, a key counted as often as it is read.
int64_t akv_keys_read(const akv_layer *layer, const akv_step *step, const akv_call *call) {
    try {
        begin(layer, step, call);
    } catch (const std::bad_alloc &) {
        return AKV_NO_MEMORY;
    }
    int64_t keys = 0;
    for (const Item &item : plan.items) keys += item.key_end > item.key_begin ? item.key_end - item.key_begin : 0;
    return keys;
}

// Reads what `akv_attend` would read, in the same order, on one thread, and adds it up.
uint64_t akv_read(const akv_layer *layer, const akv_step *step, const akv_call *call) {
    const Work work = begin(layer, step, call);
    uint64_t found = 0;
    for (const Unit &unit : plan.units) found += kernels_of(call->isa)->read(work, unit);
    return found;
}
}
