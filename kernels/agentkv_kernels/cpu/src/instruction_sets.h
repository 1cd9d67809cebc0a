// Which kernels serve an instruction set: those compiled for it, or plain ones.
#pragma once

#include "work.h"

namespace {

const Kernels *kernels_of(int isa) {
    switch (isa) {
#if defined(AKV_WITH_AVX512_BF16)
        case AKV_AVX512_BF16: return &avx512_bf16_kernels;
#endif
#if defined(AKV_WITH_AVX512)
        case AKV_AVX512: return &avx512_kernels;
#endif
#if defined(AKV_WITH_AVX2)
        case AKV_AVX2: return &avx2_kernels;
#endif
        default: return &plain_kernels;
    }
}

}  // namespace
